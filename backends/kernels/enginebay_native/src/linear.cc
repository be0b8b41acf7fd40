// Products of few rows with a weight [out, in].

#include "products.h"

namespace enginebay {
namespace {

template <typename X, typename W>
ffi::Error run(ffi::ThreadPool pool, const X* x, const W* w, float* out, int64_t rows, int64_t in, int64_t outputs,
               Sharing sharing) {
  if (in == 0 || rows == 0) {
    std::fill_n(out, rows * outputs, 0.0f);
    return ffi::Error::Success();
  }
  auto [chunk, width] = sharing.sizes<W>(outputs, outputs, in, rows, pool.num_threads());
  parallel_for(pool, (outputs + chunk - 1) / chunk, [=, chunk = chunk, width = width](int64_t task) {
    int64_t end = std::min(outputs, (task + 1) * chunk);
    for (int64_t first = task * chunk; first < end; first += width)
      block(x, w + first * in, out + first, rows, in, std::min(width, end - first), outputs);
  });
  return ffi::Error::Success();
}

// x [rows, in] and w [out, in], both f32, both bf16, or f32 and int8 or fp8 -> f32 [rows, out].
ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> out,
                  int64_t block_bytes, int64_t tasks_per_thread) {
  auto shape = x.dimensions(), weight = w.dimensions();
  bool is_int8 = x.element_type() == ffi::F32 && w.element_type() == ffi::S8;
  bool is_fp8 = x.element_type() == ffi::F32 && w.element_type() == ffi::F8E4M3FN;
  if (shape.size() != 2 || weight.size() != 2 || shape[1] != weight[1] ||
      (x.element_type() != w.element_type() && !is_int8 && !is_fp8))
    return ffi::Error::InvalidArgument("linear wants x [rows, in] and w [out, in] of one dtype, or w of int8 or fp8");
  if (block_bytes < 1 || tasks_per_thread < 1)
    return ffi::Error::InvalidArgument("linear wants block_bytes and tasks_per_thread of at least 1");
  Sharing sharing{block_bytes, tasks_per_thread};
  int64_t rows = shape[0], in = shape[1], outputs = weight[0];
  if (is_int8)
    return run(pool, x.typed_data<float>(), w.typed_data<int8_t>(), out->typed_data(), rows, in, outputs,
               sharing);
  if (is_fp8)
    return run(pool, x.typed_data<float>(), static_cast<const fp8*>(w.untyped_data()), out->typed_data(), rows, in,
               outputs, sharing);
  if (x.element_type() == ffi::F32)
    return run(pool, x.typed_data<float>(), w.typed_data<float>(), out->typed_data(), rows, in, outputs,
               sharing);
  if (x.element_type() == ffi::BF16)
    return run(pool, static_cast<const bf16*>(x.untyped_data()), static_cast<const bf16*>(w.untyped_data()),
               out->typed_data(), rows, in, outputs, sharing);
  return ffi::Error::InvalidArgument("linear wants f32 or bf16");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    enginebay_linear, linear,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::Buffer<ffi::F32>>()
        .Attr<int64_t>("block_bytes").Attr<int64_t>("tasks_per_thread"));

}  // namespace enginebay
