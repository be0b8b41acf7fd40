// Integers of 8 and 4 bits: products of bytes, summed in int32, and rows of inputs that are rounded to int8.
#pragma once

#include <cmath>
#include <limits>

#include "vectors.h"

namespace enginebay {
namespace {

constexpr int64_t kBytes = 4 * kLanes;  // of a vector

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr int kBias = 128;  // the instruction takes unsigned weights: values of 8 bits are moved up by kBias
#else
constexpr int kBias = 0;
#endif

ENGINEBAY_INLINE Ints load_ints(const void* p) {
  Ints v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// The first `bytes` bytes at p, and zeros.
inline Ints load_part(const void* p, int64_t bytes) {
  Ints v{};
  std::memcpy(&v, p, std::min<int64_t>(bytes, sizeof(v)));
  return v;
}

ENGINEBAY_INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

#if defined(__AVX2__)
// Without VNNI: the sign of each weight moves to its input. Two products of at most 128 * 127 fit 16 bits.
ENGINEBAY_INLINE __m256i add_dots_avx2(__m256i sum, __m256i weights, __m256i inputs) {
  __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(inputs, weights));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

// Lane i of the result is sum[i] plus the products of the four bytes of lane i. Inputs are -127 to 127; weights are unsigned
// where kBias is not 0, and signed otherwise.
ENGINEBAY_INLINE Ints add_dots(Ints sum, Ints weights, Ints inputs) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)inputs);
#elif defined(__AVX512F__)
  __m512i s = (__m512i)sum, w = (__m512i)weights, x = (__m512i)inputs;
  __m256i low = add_dots_avx2(_mm512_castsi512_si256(s), _mm512_castsi512_si256(w), _mm512_castsi512_si256(x));
  __m256i high = add_dots_avx2(_mm512_extracti64x4_epi64(s, 1), _mm512_extracti64x4_epi64(w, 1),
                               _mm512_extracti64x4_epi64(x, 1));
  return (Ints)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)inputs);
#elif defined(__AVX2__)
  return (Ints)add_dots_avx2((__m256i)sum, (__m256i)weights, (__m256i)inputs);
#else
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    int up = 24 - 8 * i;
    sum += ((weights << up) >> 24) * ((inputs << up) >> 24);
  }
  return sum;
#endif
}

// A vector of weights of 8 bits. Lane i holds the inputs 4i to 4i + 3.
struct Bytes {
  static constexpr int kBits = 8, kPerLane = 4, kOffset = kBias;
  static constexpr int64_t kInputs = kPerLane * kLanes;
  Ints bits;

  ENGINEBAY_INLINE explicit Bytes(Ints loaded) : bits(kBias ? loaded ^ int32_t(0x80808080u) : loaded) {}
  // sum + the products with a block of inputs.
  ENGINEBAY_INLINE Ints add(Ints sum, const int8_t* x) const { return add_dots(sum, bits, load_ints(x)); }
};

// A vector of weights of 4 bits, the lower half of a byte first. Lane i holds the inputs 8i to 8i + 7.
template <bool kSigned>
struct Nibbles {
  static constexpr int kBits = 4, kPerLane = 8, kOffset = kSigned ? 8 : 0;
  static constexpr int64_t kInputs = kPerLane * kLanes;
  Ints low, high;

  ENGINEBAY_INLINE explicit Nibbles(Ints loaded) {
    Ints bits = kSigned ? loaded ^ int32_t(0x88888888u) : loaded;
    low = bits & 0x0f0f0f0f;
    high = (bits >> 4) & 0x0f0f0f0f;
  }
  // The block of inputs has those of even index first.
  ENGINEBAY_INLINE Ints add(Ints sum, const int8_t* x) const {
    return add_dots(add_dots(sum, low, load_ints(x)), high, load_ints(x + kBytes));
  }
};

// The largest of all lanes.
ENGINEBAY_INLINE int32_t largest_lane(Ints v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t most = v[0];
  for (int i = 1; i < kLanes; ++i) most = std::max(most, v[i]);
  return most;
#endif
}

// Rounds a row to int8, and adds zeros up to `padded` inputs. Returns the scale, largest / 127; NaN where an input is not
// finite. The bits of absolute values, taken as integers, have the order of the numbers, and those of NaN come last.
inline float round_row(const float* x, int64_t in, int8_t* out, int64_t padded) {
  constexpr int32_t kNoSign = 0x7fffffff, kInfinity = 0x7f800000;
  Ints most{};
  int64_t k = 0;
  for (; k + kLanes <= in; k += kLanes) {
    Ints bits = (Ints)load(x + k) & kNoSign;
    most = bits > most ? bits : most;
  }
  int32_t largest = largest_lane(most);
  for (; k < in; ++k) {
    int32_t bits;
    std::memcpy(&bits, x + k, sizeof(bits));
    largest = std::max(largest, bits & kNoSign);
  }
  float scale;
  std::memcpy(&scale, &largest, sizeof(scale));
  scale /= 127.0f;
  std::fill(out + in, out + padded, int8_t(0));
  if (largest >= kInfinity || scale == 0.0f) {
    std::fill(out, out + in, int8_t(0));
    return largest < kInfinity ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  k = 0;
#if defined(__AVX512F__)
  for (; k + kLanes <= in; k += kLanes) {
    __m512i whole = _mm512_cvtps_epi32((__m512)(load(x + k) / splat(scale)));
    _mm_storeu_si128((__m128i*)(out + k), _mm512_cvtsepi32_epi8(whole));
  }
#endif
  for (; k < in; ++k) out[k] = int8_t(std::clamp(std::nearbyint(x[k] / scale), -127.0f, 127.0f));
  return scale;
}

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// A block of a rounded row beside weights with scales per group: the inputs in the order of W, the sum of each lane times
// -kOffset, and the negated sum of each lane in f32.
template <typename W>
struct Block {
  int8_t inputs[W::kInputs];
  int32_t offsets[kLanes];
  float negated[kLanes];
};

// A block of a row that has a scale for each kScaled inputs: the scale of each lane.
template <typename W>
struct ScaledBlock : Block<W> {
  float scales[kLanes];
};

constexpr int64_t kScaled = 32;

// B: Block<W>, or a ScaledBlock<W>, whose scales this leaves as they are.
template <typename W, typename B>
void pack_row(const int8_t* row, int64_t in, B* blocks) {
  for (int64_t first = 0; first < in; first += W::kInputs, ++blocks, row += W::kInputs) {
    for (int j = 0; j < kLanes; ++j) {
      int32_t sum = 0;
      for (int i = 0; i < W::kPerLane; ++i) sum += row[j * W::kPerLane + i];
      blocks->offsets[j] = -W::kOffset * sum;
      blocks->negated[j] = float(-sum);
    }
    if constexpr (W::kBits == 8) {
      std::memcpy(blocks->inputs, row, W::kInputs);
    } else {
      for (int64_t i = 0; i < W::kInputs / 2; ++i) {
        blocks->inputs[i] = row[2 * i];
        blocks->inputs[i + W::kInputs / 2] = row[2 * i + 1];
      }
    }
  }
}

// Rounds a row with a scale for each kScaled inputs, and packs it. `bytes` has room for the row and zeros.
template <typename W>
void pack_scaled_row(const float* x, int64_t in, int8_t* bytes, int64_t padded, ScaledBlock<W>* blocks) {
  static_assert(kScaled % W::kPerLane == 0);
  for (int64_t first = 0; first < padded; first += kScaled) {
    int64_t end = std::min(padded, first + kScaled);
    int64_t count = std::clamp<int64_t>(in - first, 0, end - first);
    float scale = round_row(x + first, count, bytes + first, end - first);
    for (int64_t k = first; k < end; k += W::kPerLane) blocks[k / W::kInputs].scales[k % W::kInputs / W::kPerLane] = scale;
  }
  pack_row<W>(bytes, in, blocks);
}

}  // namespace
}  // namespace enginebay
