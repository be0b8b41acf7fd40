// Products of rows of f32 with weights of 8 or 4 bits [out, in] that have scales per group of inputs. Weights are unpacked in
// registers. Each output is one sum with lanes in a fixed order, so that a row's result does not depend on the number of rows.
#pragma once

#include "int8_products.h"

namespace enginebay {
namespace {

// Weight i of each lane of a vector of W, in f32.
template <typename W, int i>
ENGINEBAY_INLINE Floats weight_of(Ints bits) {
  constexpr int kUp = 32 - W::kBits * (i + 1), kDown = W::kBits * i;
  if constexpr (W::kBits == 8) {
    return to_floats((bits << kUp) >> 24);
  } else {
#if defined(__AVX512F__)
    // The lowest four bits of a lane choose a number.
    const __m512 numbers = W::kOffset ? _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1)
                                      : _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (Floats)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)bits, kDown), numbers);
#else
    if constexpr (W::kOffset != 0) return to_floats((bits << kUp) >> 28);
    return to_floats((bits >> kDown) & 15);
#endif
  }
}

// Rows of f32 in the order of W: of each block, input i of every lane, then input i + 1. Zeros follow the last input.
template <typename W>
void order_row(const float* row, int64_t in, float* out) {
  for (int64_t first = 0; first < in; first += W::kInputs, out += W::kInputs)
    for (int i = 0; i < W::kPerLane; ++i)
      for (int j = 0; j < kLanes; ++j) {
        int64_t k = first + j * W::kPerLane + i;
        out[i * kLanes + j] = k < in ? row[k] : 0.0f;
      }
}

struct Ordered {
  const float* data;
  int64_t stride;

  Ordered from(int64_t row) const { return {data + row * stride, stride}; }
};

// The same weight beside rows of f32.
template <typename W, bool kZeros>
struct UnpackedWeight {
  using Form = W;
  static constexpr int kWide = GroupedWeight<W, kZeros>::kWide;
  const uint8_t* values;
  const void *scales, *zeros;
  int64_t in;
  Groups groups;

  int64_t row_bytes() const { return in * W::kBits / 8; }
  UnpackedWeight from(int64_t output) const {
    const void* from_zeros = kZeros ? groups.from(zeros, output) : nullptr;
    return {values + output * row_bytes(), groups.from(scales, output), from_zeros, in, groups};
  }

  template <int R, int C>
  void multiply(const Ordered& x, float* out, int64_t stride, int64_t ahead) const {
    Tile<R, C> tile;
    const Spread<W::kInputs> spread(groups);
    const Vectors<C> vectors(values, row_bytes());
    for (int64_t k = 0; k < row_bytes(); k += kBytes) add<R, C>(tile, spread, x, k, ahead, vectors.at(k));
    tile.put(out, stride);
  }

 private:
  template <int R, int C>
  ENGINEBAY_INLINE void add(Tile<R, C>& tile, const Spread<W::kInputs>& spread, const Ordered& x, int64_t k, int64_t ahead, Strided weights) const {
    int64_t bytes = row_bytes(), first = k / kBytes * W::kInputs;
    auto part_of = spread.part(first);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      Ints bits = in_register(load_ints(weights.data + c * weights.stride));
      fetch(values + c * bytes + k + ahead);
      Floats zero{};
      if (kZeros) zero = spread.of(groups.from(zeros, c), part_of);
      Floats parts[R] = {};
      each<0, R>(parts, bits, zero, x.data + first, x.stride);
      Floats scale = spread.of(groups.from(scales, c), part_of);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) tile.sums[r][c] = add_product(tile.sums[r][c], parts[r], scale);
    }
  }

  template <int i, int R>
  static ENGINEBAY_INLINE void each(Floats (&parts)[R], Ints bits, Floats zero, const float* x, int64_t stride) {
    Floats weight = weight_of<W, i>(bits);
    if (kZeros) weight -= zero;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) parts[r] = add_product(parts[r], load(x + r * stride + i * kLanes), weight);
    if constexpr (i + 1 < W::kPerLane) each<i + 1, R>(parts, bits, zero, x, stride);
  }
};

}  // namespace
}  // namespace enginebay
