// Products of many rows of f32 with one or several quantised weights [out, in] of any form. A panel of outputs is dequantised into memory
// that stays in the second-level cache, transposed, and multiplied with all rows; the whole weight is never dequantised.

#include "padding.h"
#include "ranges.h"

namespace enginebay {
namespace {

constexpr int kVectors = 3;  // vectors of outputs of a panel
constexpr int64_t kWidth = kVectors * kLanes;
#if defined(__AVX__) && !defined(__AVX512F__)
constexpr int kRows = 4;
#else
constexpr int kRows = 8;
#endif
constexpr int64_t kDepth = 1024;  // inputs of a panel, at most
constexpr int64_t kStep = 128;    // inputs that are dequantised before they are transposed
constexpr int64_t kFewestRows = 64;  // rows of a task, at least, where a panel has several tasks

typedef uint8_t Codes __attribute__((vector_size(16)));

// A weight as it is stored. zeros is null where there are no zero points.
struct Weight {
  ffi::DataType dtype;
  const uint8_t* values;
  const float *scales, *zeros;
  int64_t in, groups;
};

// Weights `first` to `first + count` of all numbers of 4 bits, two in a byte, as bytes.
void unpack(const uint8_t* packed, int64_t first, int64_t count, bool is_signed, int8_t* to) {
  const uint8_t flip = is_signed ? 8 : 0;
  auto one = [&](int64_t i) {
    uint8_t code = packed[(first + i) / 2] >> 4 * ((first + i) % 2) & 15;
    to[i] = int8_t(code ^ flip) - int8_t(flip);
  };
  int64_t i = 0;
  for (; i < count && (first + i) % 2 != 0; ++i) one(i);
  for (; i + 32 <= count; i += 32) {
    Codes bytes;
    std::memcpy(&bytes, packed + (first + i) / 2, sizeof(bytes));
    Codes low = ((bytes & 15) ^ flip) - flip, high = ((bytes >> 4) ^ flip) - flip;
    Codes begin = __builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    Codes end = __builtin_shufflevector(low, high, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    std::memcpy(to + i, &begin, sizeof(begin));
    std::memcpy(to + i + sizeof(begin), &end, sizeof(end));
  }
  for (; i < count; ++i) one(i);
}

template <typename V>
void widen(const V* values, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(values + i));
  for (; i < count; ++i) to[i] = to_float(values[i]);
}

// The weights of inputs [first, first + count) of an output; count is at most kStep.
void dequantize(const Weight& w, int64_t output, int64_t first, int64_t count, float* to) {
  int64_t begin = output * w.in + first;
  if (w.dtype == ffi::S8) {
    widen(reinterpret_cast<const int8_t*>(w.values) + begin, count, to);
  } else if (w.dtype == ffi::F8E4M3FN) {
    widen(reinterpret_cast<const fp8*>(w.values) + begin, count, to);
  } else {
    int8_t bytes[kStep];
    unpack(w.values, begin, count, w.dtype == ffi::S4, bytes);
    widen(bytes, count, to);
  }
  int64_t size = w.in / w.groups, group = first / size;
  for (int64_t i = 0; i < count; ++group) {
    int64_t end = std::min(count, (group + 1) * size - first);
    float scale = w.scales[output * w.groups + group], zero = w.zeros ? w.zeros[output * w.groups + group] : 0.0f;
    for (; i < end; ++i) to[i] = (to[i] - zero) * scale;
  }
}

// The first halves of a and b, lane by lane in turn, and their second halves.
ENGINEBAY_INLINE void interleave(Floats a, Floats b, Floats& low, Floats& high) {
#if defined(__AVX512F__)
  low = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  high = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX__)
  low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// Writes rows of kLanes weights, kStep apart, as columns of a panel. log2(kLanes) perfect shuffles are a transposition.
void transpose(const float* rows, float* to) {
  Floats v[kLanes], w[kLanes];
  for (int i = 0; i < kLanes; ++i) v[i] = load(rows + i * kStep);
#pragma GCC unroll 4
  for (int level = 1; level < kLanes; level *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) interleave(v[i], v[i + kLanes / 2], w[2 * i], w[2 * i + 1]);
    for (int i = 0; i < kLanes; ++i) v[i] = w[i];
  }
  for (int i = 0; i < kLanes; ++i) store(to + i * kWidth, v[i]);
}

// panel[depth, kWidth] = the weights of `width` outputs and the inputs [from, from + depth), with zeros for other outputs.
void fill_panel(const Weight& w, int64_t output, int64_t width, int64_t from, int64_t depth, float* panel) {
  alignas(64) float rows[kLanes * kStep];
  for (int64_t k = 0; k < depth; k += kStep) {
    int64_t count = std::min(kStep, depth - k);
    for (int64_t c = 0; c < kWidth; c += kLanes) {
      for (int64_t i = 0; i < kLanes; ++i) {
        float* row = rows + i * kStep;
        if (c + i < width) {
          dequantize(w, output + c + i, from + k, count, row);
        } else {
          std::fill_n(row, count, 0.0f);
        }
      }
      float* to = panel + k * kWidth + c;
      int64_t j = 0;
      for (; j + kLanes <= count; j += kLanes) transpose(rows + j, to + j * kWidth);
      for (; j < count; ++j)
        for (int64_t i = 0; i < kLanes; ++i) to[j * kWidth + i] = rows[i * kStep + j];
    }
  }
}

// sums[R, kWidth] += x[R, depth] panel[depth, kWidth]; the rows of x are `in`, those of sums are `stride` apart.
template <int R>
void multiply(const float* x, int64_t in, const float* panel, int64_t depth, float* sums, int64_t stride) {
  Floats tile[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) tile[r][v] = load(sums + r * stride + v * kLanes);
  for (int64_t k = 0; k < depth; ++k, panel += kWidth) {
    Floats weights[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) weights[v] = in_register(load(panel + v * kLanes));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      Floats one = in_register(x[r * in + k] - Floats{});  // x in each lane
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) tile[r][v] = add_product(tile[r][v], one, weights[v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) store(sums + r * stride + v * kLanes, tile[r][v]);
}

// The same for `rows` rows and the first `width` outputs of the panel.
template <int R>
void multiply_rows(const float* x, int64_t in, const float* panel, int64_t depth, float* out, int64_t rows, int64_t width,
                   int64_t stride) {
  for (; rows >= R; rows -= R, x += R * in, out += R * stride) {
    if (width == kWidth) {
      multiply<R>(x, in, panel, depth, out, stride);
      continue;
    }
    float sums[R * kWidth] = {};
    for (int r = 0; r < R; ++r) std::copy_n(out + r * stride, width, sums + r * kWidth);
    multiply<R>(x, in, panel, depth, sums, kWidth);
    for (int r = 0; r < R; ++r) std::copy_n(sums + r * kWidth, width, out + r * stride);
  }
  if constexpr (R > 1) {
    if (rows) multiply_rows<R / 2>(x, in, panel, depth, out, rows, width, stride);
  }
}

// out[rows, outputs] = x[rows, in] times the weights of `outputs` outputs from the first one.
void run(ffi::ThreadPool& pool, const float* x, const Weight& w, int64_t begin, int64_t outputs, float* out, int64_t rows) {
  int64_t panels = (outputs + kWidth - 1) / kWidth, threads = std::max<int64_t>(1, pool.num_threads());
  int64_t parts = std::max<int64_t>(1, std::min((2 * threads + panels - 1) / panels, rows / kFewestRows));
  parallel_for(pool, panels * parts, [&, parts](int64_t task) {
    int64_t output = task / parts * kWidth, width = std::min(kWidth, outputs - output), part = task % parts;
    int64_t first = rows * part / parts, count = rows * (part + 1) / parts - first;
    float* to = out + first * outputs + output;
    for (int64_t r = 0; r < count; ++r) std::fill_n(to + r * outputs, width, 0.0f);
    std::vector<float> panel(std::min(kDepth, w.in) * kWidth);
    for (int64_t k = 0; k < w.in; k += kDepth) {
      int64_t depth = std::min(kDepth, w.in - k);
      fill_panel(w, begin + output, width, k, depth, panel.data());
      multiply_rows<kRows>(x + first * w.in + k, w.in, panel.data(), depth, to, count, width, outputs);
    }
  });
}

// x f32 [rows, in]; values s8, s4, u4 or f8e4m3fn [weights * out, in]; scales f32 [weights * out, groups]; zeros the same, or
// empty; sizes [weights], the rows of each weight in turn, or empty with one weight -> f32 [rows, out].
ffi::Error panel_linear(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer values, ffi::Buffer<ffi::F32> scales,
                        ffi::Buffer<ffi::F32> zeros, ffi::Buffer<ffi::S32> sizes, ffi::ResultBuffer<ffi::F32> out) {
  auto shape = x.dimensions(), weight = values.dimensions(), per_group = scales.dimensions();
  if (shape.size() != 2 || weight.size() != 2 || per_group.size() != 2 || shape[1] != weight[1] || per_group[0] != weight[0])
    return ffi::Error::InvalidArgument("panel_linear wants x [rows, in], values [out, in], scales [out, groups]");
  bool has_zeros = zeros.element_count() != 0;
  const Ranges ranges(sizes, shape[0]);
  if (per_group[1] < 1 || weight[0] % ranges.count != 0 || weight[1] % per_group[1] != 0 || (has_zeros && zeros.element_count() != scales.element_count()))
    return ffi::Error::InvalidArgument("panel_linear wants groups of equal size, and zero points like scales");
  auto dtype = values.element_type();
  if (dtype != ffi::S8 && dtype != ffi::S4 && dtype != ffi::U4 && dtype != ffi::F8E4M3FN)
    return ffi::Error::InvalidArgument("panel_linear wants values of s8, s4, u4 or f8e4m3fn");
  Weight w{dtype, static_cast<const uint8_t*>(values.untyped_data()), scales.typed_data(),
           has_zeros ? zeros.typed_data() : nullptr, weight[1], per_group[1]};
  int64_t outputs = weight[0] / ranges.count;
  ranges.each(out->typed_data(), outputs, [&](int64_t i, int64_t first, int64_t rows) {
    const float* from = x.typed_data() + first * w.in;
    float* to = out->typed_data() + first * outputs;
    rows = without_padding(from, rows, w.in, to, outputs);
    if (rows > 0) run(pool, from, w, i * outputs, outputs, to, rows);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    enginebay_panel_linear, panel_linear,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::Buffer<ffi::F32>>());

}  // namespace enginebay
