// Products with one or several quantised weights [out, in]: rows of f32, or rows that are rounded to int8 here. The source that
// includes this defines ENGINEBAY_NAME, the name of the call; ENGINEBAY_S8, ENGINEBAY_ZEROS_S8 (with zero points), ENGINEBAY_S4
// or ENGINEBAY_U4 (with zero points): the form of the weights; and ENGINEBAY_ROUNDED for rows that are rounded with one scale,
// or ENGINEBAY_ROUNDED_GROUPS for rows that are rounded with a scale for each 32 inputs.
#pragma once

#include "amx.h"
#include "group_products.h"
#include "padding.h"
#include "ranges.h"

namespace enginebay {
namespace {

struct Call {
  ffi::ThreadPool& pool;
  const float* x;
  float* out;
  int64_t rows, in, outputs;
  Sharing sharing;
  int8_t *work, *work_end;

  // The next part of the workspace, aligned; null where it is too small.
  template <typename T>
  T* take(int64_t count) {
    auto* p = reinterpret_cast<int8_t*>(round_up(reinterpret_cast<int64_t>(work), 64));
    work = p + count * int64_t(sizeof(T));
    return work <= work_end ? reinterpret_cast<T*>(p) : nullptr;
  }

  // Calls f(row) for `count` rows, on the pool's threads where it is worth while.
  template <typename F>
  void each(int64_t count, int64_t inputs, const F& f) {
    if (count * inputs < 32 << 10) {
      for (int64_t r = 0; r < count; ++r) f(r);
    } else {
      parallel_for(pool, count, f);
    }
  }
};

ffi::Error too_small() { return ffi::Error::InvalidArgument("quantized_linear wants a larger workspace"); }

// Shares the outputs out among the threads, in multiples of `unit`, and calls f(first, width) for each block.
template <typename F>
void in_blocks(Call& call, int64_t row_bytes, int64_t unit, const F& f) {
  int64_t threads = std::max<int64_t>(1, call.pool.num_threads()) * call.sharing.tasks_per_thread;
  int64_t chunk = round_up((call.outputs + threads - 1) / threads, unit);
  int64_t width = std::max<int64_t>(1, call.sharing.block_bytes / std::max<int64_t>(1, row_bytes) / unit) * unit;
  parallel_for(call.pool, (call.outputs + chunk - 1) / chunk, [=, &f, outputs = call.outputs](int64_t task) {
    int64_t end = std::min(outputs, (task + 1) * chunk);
    for (int64_t first = task * chunk; first < end; first += width) f(first, std::min(width, end - first));
  });
}

template <typename X, typename V>
void multiply_all(Call& call, const X& x, const V& weight) {
  int64_t unit = call.rows == 1 ? kLoneColumns : V::kWide;
  in_blocks(call, weight.row_bytes(), unit, [&](int64_t first, int64_t width) {
    rounded_block(x, weight.from(first), call.out + first, call.rows, width, call.outputs);
  });
}

// One scale per output. Many rows are multiplied in tiles where the processor has them.
ffi::Error rounded(Call& call, const Int8Weight& weight) {
  bool tiled = call.rows >= kFewestTiledRows && call.in % kTileInputs == 0 && has_tiles();
  int64_t padded = round_up(call.in, 64), rows = tiled ? round_up(call.rows, kTile) : call.rows;
  auto* data = call.take<int8_t>(rows * padded);
  auto* scales = call.take<float>(rows);
  auto* sums = call.take<int32_t>(rows);
  auto* tiles = tiled ? call.take<int8_t>(rows * padded) : data;
  if (!data || !scales || !sums || !tiles) return too_small();
  auto round = [&](int64_t r) {
    int8_t* row = data + r * padded;
    scales[r] = round_row(call.x + r * call.in, call.in, row, padded);
    int32_t sum = 0;
    for (int64_t k = 0; k < padded; ++k) sum += row[k];
    sums[r] = sum;
  };
  Rounded x{data, padded, scales, sums};
  if (!tiled) {
    call.each(rows, call.in, round);
    multiply_all(call, x, weight);
    return ffi::Error::Success();
  }
  call.each(rows / kTile, call.in * kTile, [&](int64_t tile) {
    for (int64_t r = tile * kTile; r < (tile + 1) * kTile; ++r) {
      if (r < call.rows) {
        round(r);
      } else {
        std::fill_n(data + r * padded, padded, int8_t(0));
        scales[r] = 0.0f, sums[r] = 0;
      }
    }
    tile_rows(data + tile * kTile * padded, padded, call.in, tiles + tile * kTile * call.in);
  });
  in_blocks(call, weight.row_bytes(), 2 * kTile, [&](int64_t first, int64_t width) {
    int64_t whole = width / (2 * kTile) * (2 * kTile);
    float* out = call.out + first;
    if (whole) tiled_block(tiles, scales, weight.from(first), out, call.rows, whole, call.outputs);
    if (whole < width) rounded_block(x, weight.from(first + whole), out + whole, call.rows, width - whole, call.outputs);
  });
  return ffi::Error::Success();
}

// Scales per group, rounded rows.
template <typename W, bool kZeros>
ffi::Error rounded(Call& call, const GroupedWeight<W, kZeros>& weight) {
  int64_t blocks = (call.in + W::kInputs - 1) / W::kInputs, padded = blocks * W::kInputs;
  auto* data = call.take<Block<W>>(call.rows * blocks);
  auto* scales = call.take<float>(call.rows);
  auto* bytes = call.take<int8_t>(call.rows * padded);
  if (!data || !scales || !bytes) return too_small();
  call.each(call.rows, call.in, [&](int64_t r) {
    int8_t* row = bytes + r * padded;
    scales[r] = round_row(call.x + r * call.in, call.in, row, padded);
    pack_row<W>(row, call.in, data + r * blocks);
  });
  Rounded x{reinterpret_cast<const int8_t*>(data), blocks * int64_t(sizeof(Block<W>)), scales, nullptr};
  multiply_all(call, x, weight);
  return ffi::Error::Success();
}

// Rounded rows with scales of their own.
template <typename W, bool kZeros>
ffi::Error rounded_groups(Call& call, const GroupedWeight<W, kZeros, ScaledBlock<W>>& weight) {
  int64_t blocks = (call.in + W::kInputs - 1) / W::kInputs, padded = blocks * W::kInputs;
  auto* data = call.take<ScaledBlock<W>>(call.rows * blocks);
  auto* bytes = call.take<int8_t>(call.rows * padded);
  if (!data || !bytes) return too_small();
  call.each(call.rows, call.in, [&](int64_t r) {
    pack_scaled_row<W>(call.x + r * call.in, call.in, bytes + r * padded, padded, data + r * blocks);
  });
  Rounded x{reinterpret_cast<const int8_t*>(data), blocks * int64_t(sizeof(ScaledBlock<W>)), nullptr, nullptr};
  multiply_all(call, x, weight);
  return ffi::Error::Success();
}

// Scales per group, rows of f32.
template <typename W, bool kZeros>
ffi::Error unpacked(Call& call, const UnpackedWeight<W, kZeros>& weight) {
  int64_t padded = round_up(call.in, W::kInputs);
  auto* data = call.take<float>(call.rows * padded);
  if (!data) return too_small();
  call.each(call.rows, call.in, [&](int64_t r) { order_row<W>(call.x + r * call.in, call.in, data + r * padded); });
  multiply_all(call, Ordered{data, padded}, weight);
  return ffi::Error::Success();
}

// A weight as it is stored. zeros is null where there are no zero points.
struct Stored {
  ffi::DataType dtype;
  const uint8_t* values;
  const void *scales, *zeros;
  int64_t in;
  Groups groups;

  Stored from(int64_t output) const {
    int64_t bits = dtype == ffi::S8 ? 8 : 4;
    return {dtype, values + output * in * bits / 8, groups.from(scales, output), zeros ? groups.from(zeros, output) : nullptr, in, groups};
  }
};

#if defined(ENGINEBAY_S4)
constexpr auto kForm = ffi::S4;
using Numbers = Nibbles<true>;
#elif defined(ENGINEBAY_U4)
constexpr auto kForm = ffi::U4;
using Numbers = Nibbles<false>;
#else
constexpr auto kForm = ffi::S8;
using Numbers = Bytes;
#endif
#if defined(ENGINEBAY_ZEROS_S8) || defined(ENGINEBAY_U4)
constexpr bool kHasZeros = true;
#else
constexpr bool kHasZeros = false;
#endif

ffi::Error multiply(Call& call, const Stored& w) {
#ifdef ENGINEBAY_ROUNDED
#ifdef ENGINEBAY_S8
  if (w.groups.count == 1 && !w.groups.is_half)
    return rounded(call, Int8Weight{reinterpret_cast<const int8_t*>(w.values), static_cast<const float*>(w.scales), w.in});
#endif
  return rounded(call, GroupedWeight<Numbers, kHasZeros>{w.values, w.scales, w.zeros, w.in, w.groups});
#elif defined(ENGINEBAY_ROUNDED_GROUPS)
  using Weight = GroupedWeight<Numbers, kHasZeros, ScaledBlock<Numbers>>;
  return rounded_groups(call, Weight{w.values, w.scales, w.zeros, w.in, w.groups});
#else
  return unpacked(call, UnpackedWeight<Numbers, kHasZeros>{w.values, w.scales, w.zeros, w.in, w.groups});
#endif
}

// The groups of `in` inputs, or count 0 where the kernels do not serve them.
Groups groups_of(int64_t count, int64_t in, bool is_half) {
  if (count == 1) return {1, 62, is_half};
  for (int64_t shift = 4; count > 1 && count << shift <= in; ++shift)
    if (count << shift == in) return {count, shift, is_half};
  return {0, 0, is_half};
}

// x f32 [rows, in]; values s8, s4 or u4 [weights * out, in]; scales f32 or f16 [weights * out, groups]; zeros of the same shape
// and dtype, or empty; sizes [weights], the rows of each weight in turn, or empty with one weight -> f32 [rows, out]. The
// workspace holds the rows in the order of the kernel.
ffi::Error quantized_linear(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer values, ffi::AnyBuffer scales,
                            ffi::AnyBuffer zeros, ffi::Buffer<ffi::S32> sizes, ffi::ResultBuffer<ffi::F32> out,
                            ffi::ResultBuffer<ffi::S8> workspace, int64_t block_bytes, int64_t tasks_per_thread) {
  auto shape = x.dimensions(), weight = values.dimensions(), per_group = scales.dimensions();
  if (shape.size() != 2 || weight.size() != 2 || per_group.size() != 2 || shape[1] != weight[1] || per_group[0] != weight[0])
    return ffi::Error::InvalidArgument("quantized_linear wants x [rows, in], values [out, in], scales [out, groups]");
  auto dtype = scales.element_type();
  bool has_zeros = zeros.element_count() != 0;
  if ((dtype != ffi::F32 && dtype != ffi::F16) ||
      (has_zeros && (zeros.element_type() != dtype || zeros.element_count() != scales.element_count())))
    return ffi::Error::InvalidArgument("quantized_linear wants scales in f32 or f16, and zero points like scales");
  bool is_packed = kForm != ffi::S8;
  if (values.element_type() != kForm || has_zeros != kHasZeros || (is_packed && shape[1] % 2 != 0))
    return ffi::Error::InvalidArgument("quantized_linear wants values of the form in its name, and 4 bits in pairs");
  const Ranges ranges(sizes, shape[0]);
  Groups groups = groups_of(per_group[1], shape[1], dtype == ffi::F16);
  if (block_bytes < 1 || tasks_per_thread < 1 || groups.count == 0 || weight[0] % ranges.count != 0)
    return ffi::Error::InvalidArgument("quantized_linear wants one group, or groups of 16, 32, 64, ... inputs");
  Stored stored{kForm, static_cast<const uint8_t*>(values.untyped_data()), scales.untyped_data(),
                has_zeros ? zeros.untyped_data() : nullptr, shape[1], groups};
  int64_t outputs = weight[0] / ranges.count;
  if (outputs == 0) return ffi::Error::Success();
  auto error = ffi::Error::Success();
  ranges.each(out->typed_data(), outputs, [&](int64_t i, int64_t first, int64_t rows) {
    const float* from = x.typed_data() + first * shape[1];
    float* to = out->typed_data() + first * outputs;
    rows = without_padding(from, rows, shape[1], to, outputs);
    if (rows == 0) return;
    int8_t* work = workspace->typed_data();
    Call call{pool, from, to, rows, shape[1], outputs,
              Sharing{block_bytes, tasks_per_thread}, work, work + workspace->element_count()};
    auto found = multiply(call, stored.from(i * outputs));
    if (found.failure()) error = found;
  });
  return error;
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    ENGINEBAY_NAME, quantized_linear,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::S8>>()
        .Attr<int64_t>("block_bytes").Attr<int64_t>("tasks_per_thread"));

}  // namespace enginebay
