// Products of few rows with a weight [out, in], for one form of the weight: the source that includes this defines
// ENGINEBAY_NAME, the name of the call, and ENGINEBAY_ROWS and ENGINEBAY_WEIGHTS, the types of the numbers.
#pragma once

#include "padding.h"
#include "products.h"

namespace enginebay {
namespace {

template <typename X, typename W>
ffi::Error run(ffi::ThreadPool pool, const X* x, const W* w, float* out, int64_t rows, int64_t in, int64_t outputs,
               Sharing sharing) {
  rows = without_padding(x, rows, in, out, outputs);
  if (rows == 0) return ffi::Error::Success();
  auto [chunk, width] = sharing.sizes<W>(outputs, outputs, in, rows, pool.num_threads());
  parallel_for(pool, (outputs + chunk - 1) / chunk, [=, chunk = chunk, width = width](int64_t task) {
    int64_t end = std::min(outputs, (task + 1) * chunk);
    for (int64_t first = task * chunk; first < end; first += width)
      block(x, w + first * in, out + first, rows, in, std::min(width, end - first), outputs);
  });
  return ffi::Error::Success();
}

using Rows = ENGINEBAY_ROWS;
using Weights = ENGINEBAY_WEIGHTS;

template <typename T>
constexpr ffi::DataType kTypeOf = ffi::F32;
template <>
constexpr ffi::DataType kTypeOf<bf16> = ffi::BF16;
template <>
constexpr ffi::DataType kTypeOf<int8_t> = ffi::S8;
template <>
constexpr ffi::DataType kTypeOf<fp8> = ffi::F8E4M3FN;

// x [rows, in] and w [out, in] -> f32 [rows, out].
ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> out,
                  int64_t block_bytes, int64_t tasks_per_thread) {
  auto shape = x.dimensions(), weight = w.dimensions();
  if (shape.size() != 2 || weight.size() != 2 || shape[1] != weight[1] || x.element_type() != kTypeOf<Rows> ||
      w.element_type() != kTypeOf<Weights>)
    return ffi::Error::InvalidArgument("linear wants x [rows, in] and w [out, in] of the dtypes in its name");
  if (block_bytes < 1 || tasks_per_thread < 1)
    return ffi::Error::InvalidArgument("linear wants block_bytes and tasks_per_thread of at least 1");
  return run(pool, static_cast<const Rows*>(x.untyped_data()), static_cast<const Weights*>(w.untyped_data()),
             out->typed_data(), shape[0], shape[1], weight[0], Sharing{block_bytes, tasks_per_thread});
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    ENGINEBAY_NAME, linear,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::Buffer<ffi::F32>>()
        .Attr<int64_t>("block_bytes").Attr<int64_t>("tasks_per_thread"));

}  // namespace enginebay
