// Products of rows that are rounded to int8 with weights of 8 or 4 bits [out, in]. Sums of one scale are whole numbers in
// int32; scales of groups are applied in a fixed order. So a row's result does not depend on the number of rows.
#pragma once

#include <type_traits>

#include "bytes.h"
#include "products.h"
#include "scales.h"

namespace enginebay {
namespace {

// Rounded rows, `stride` bytes apart. sums: of all inputs of a row.
struct Rounded {
  const int8_t* data;
  int64_t stride;
  const float* scales;
  const int32_t* sums;

  Rounded from(int64_t row) const { return {data + row * stride, stride, scales + row, sums + row}; }
};

// Vectors of bytes, `stride` bytes apart.
struct Strided {
  const uint8_t* data;
  int64_t stride;
};

// C rows of `bytes` bytes in vectors, of which the last ones are completed with zeros. So one loop serves rows of any length.
template <int C>
class Vectors {
 public:
  Vectors(const void* rows, int64_t bytes) : rows_(static_cast<const uint8_t*>(rows)), bytes_(bytes), whole_(bytes / kBytes * kBytes) {
    if (whole_ == bytes) return;
    for (int c = 0; c < C; ++c) {
      Ints part = load_part(rows_ + c * bytes + whole_, bytes - whole_);
      std::memcpy(last_ + c * kBytes, &part, kBytes);
    }
  }

  // The vectors that begin at byte k of each row.
  ENGINEBAY_INLINE Strided at(int64_t k) const {
    return k < whole_ ? Strided{rows_ + k, bytes_} : Strided{last_, kBytes};
  }

 private:
  const uint8_t* rows_;
  int64_t bytes_, whole_;
  alignas(64) uint8_t last_[C * kBytes];
};

// A weight with one scale per output.
struct Int8Weight {
  using Form = Bytes;
  static constexpr int kWide = kColumns;  // outputs of a tile
  const int8_t* values;
  const float* scales;
  int64_t in;

  int64_t row_bytes() const { return in; }
  Int8Weight from(int64_t output) const { return {values + output * in, scales + output, in}; }

  template <int R, int C>
  void multiply(const Rounded& x, float* out, int64_t stride, int64_t ahead) const {
    Ints sums[R][C] = {};
    const Vectors<C> vectors(values, in);
    for (int64_t k = 0; k < in; k += kBytes) add<R, C>(sums, x, k, ahead, vectors.at(k));
    Ints flat[(R * C + kLanes - 1) / kLanes * kLanes] = {};
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) flat[r * C + c] = sums[r][c];
    int32_t totals[(R * C + kLanes - 1) / kLanes * kLanes];
    for (int i = 0; i < R * C; i += kLanes) {
      Ints each = sum_each(flat + i);
      std::memcpy(totals + i, &each, sizeof(each));
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c)
        out[r * stride + c] = float(totals[r * C + c] - kBias * x.sums[r]) * (x.scales[r] * scales[c]);
  }

 private:
  template <int R, int C>
  ENGINEBAY_INLINE void add(Ints (&sums)[R][C], const Rounded& x, int64_t k, int64_t ahead, Strided weights) const {
    Ints rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = in_register(load_ints(x.data + r * x.stride + k));
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      Bytes each(load_ints(weights.data + c * weights.stride));
      fetch(values + c * in + k + ahead);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r][c] = add_dots(sums[r][c], each.bits, rows[r]);
    }
  }
};

// A weight with scales, and zero points where kZeros, per group of inputs. W: Bytes or Nibbles. B: how the blocks of rows are
// packed, with scales of their own or without.
template <typename W, bool kZeros, typename B = Block<W>>
struct GroupedWeight {
  static constexpr bool kScaledRows = std::is_same_v<B, ScaledBlock<W>>;
  using Form = W;
  static constexpr int kWide = kColumns - kColumns % 4 + (kColumns < 4 ? 2 : 0);
  const uint8_t* values;
  const void *scales, *zeros;
  int64_t in;
  Groups groups;

  int64_t row_bytes() const { return in * W::kBits / 8; }
  GroupedWeight from(int64_t output) const {
    const void* from_zeros = kZeros ? groups.from(zeros, output) : nullptr;
    return {values + output * row_bytes(), groups.from(scales, output), from_zeros, in, groups};
  }

  template <int R, int C>
  void multiply(const Rounded& x, float* out, int64_t stride, int64_t ahead) const {
    Tile<R, C> tile;
    const Spread<W::kInputs> spread(groups);
    const Vectors<C> vectors(values, row_bytes());
    for (int64_t k = 0; k < row_bytes(); k += kBytes) add<R, C>(tile, spread, x, k, ahead, vectors.at(k));
    tile.put(out, stride);
    if constexpr (!kScaledRows)
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) out[r * stride + c] *= x.scales[r];
  }

 private:
  template <int R, int C>
  ENGINEBAY_INLINE void add(Tile<R, C>& tile, const Spread<W::kInputs>& spread, const Rounded& x, int64_t k, int64_t ahead, Strided weights) const {
    int64_t bytes = row_bytes(), block = k / kBytes;
    auto part_of = spread.part(block * W::kInputs);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      W each(load_ints(weights.data + c * weights.stride));
      fetch(values + c * bytes + k + ahead);
      Floats scale = spread.of(groups.from(scales, c), part_of), zero;
      if (kZeros) zero = spread.of(groups.from(zeros, c), part_of);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        auto* inputs = reinterpret_cast<const B*>(x.data + r * x.stride) + block;
        Floats part = to_floats(each.add(load_ints(inputs->offsets), inputs->inputs));
        if (kZeros) part = add_product(part, zero, load(inputs->negated));
        if constexpr (kScaledRows) part *= load(inputs->scales);
        tile.sums[r][c] = add_product(tile.sums[r][c], part, scale);
      }
    }
  }
};

// out[R, width]; each tile prefetches weights that are `ahead` tiles away.
template <int R, int C, typename X, typename V>
void rounded_rows(const X& x, const V& weight, float* out, int64_t width, int64_t stride, int64_t ahead) {
  int64_t c = 0, bytes = ahead * C * weight.row_bytes();
  for (; c + C <= width; c += C) weight.from(c).template multiply<R, C>(x, out + c, stride, bytes);
  for (; c < width; ++c)
    for (int64_t r = 0; r < R; ++r) weight.from(c).template multiply<1, 1>(x.from(r), out + r * stride + c, stride, 0);
}

// out[rows, width]; the rows of out are `stride` apart. The first rows wait for memory, so they prefetch the next weights.
template <typename X, typename V>
void rounded_block(const X& x, const V& weight, float* out, int64_t rows, int64_t width, int64_t stride) {
  if (rows == 1) return rounded_rows<1, kLoneColumns>(x, weight, out, width, stride, 1);
  for (int64_t r = 0; r < rows;) {
    int64_t left = rows - r, ahead = r == 0;
    float* to = out + r * stride;
    if (left >= kRows) {
      rounded_rows<kRows, V::kWide>(x.from(r), weight, to, width, stride, ahead);
      r += kRows;
    } else if (left >= 2) {
      rounded_rows<2, V::kWide>(x.from(r), weight, to, width, stride, ahead);
      r += 2;
    } else {
      rounded_rows<1, kLoneColumns>(x.from(r), weight, to, width, stride, ahead);
      r += 1;
    }
  }
}

}  // namespace
}  // namespace enginebay
