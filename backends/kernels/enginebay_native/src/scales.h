// Scales and zero points of groups of inputs, spread over the lanes of a vector of weights.
#pragma once

#include "vectors.h"

namespace enginebay {
namespace {

// The groups of a weight: `count` per output, each of 2^shift inputs; shift is 62 where there is one group. Their numbers are
// f16 where is_half, and f32 otherwise.
struct Groups {
  int64_t count, shift;
  bool is_half;

  // The numbers of output `output`.
  const void* from(const void* numbers, int64_t output) const {
    return static_cast<const uint8_t*>(numbers) + output * count * (is_half ? 2 : 4);
  }
};

// The groups of vectors of kInputs inputs: each vector has `per` of them, or is a part of one.
template <int64_t kInputs>
class Spread {
 public:
  explicit Spread(Groups groups) : groups_(groups), per_(std::max<int64_t>(1, kInputs >> groups.shift)) {
    for (int i = 0; i < kLanes; ++i) lane_[i] = int32_t(i * per_ / kLanes);
  }

  // The groups of a vector.
  struct Part {
    int64_t group, count;
  };

  // The groups of the vector that begins at input `first`. The last vector of an output may have fewer.
  ENGINEBAY_INLINE Part part(int64_t first) const {
    int64_t group = first >> groups_.shift;
    return {group, std::min(per_, groups_.count - group)};
  }

  // The numbers of the groups of each lane.
  ENGINEBAY_INLINE Floats of(const void* numbers, Part part) const {
    if (groups_.is_half) return lanes(static_cast<const f16*>(numbers), part);
    return lanes(static_cast<const float*>(numbers), part);
  }

 private:
  template <typename S>
  ENGINEBAY_INLINE Floats lanes(const S* numbers, Part part) const {
    auto [group, n] = part;
#if defined(__AVX512F__)
    return (Floats)_mm512_permutexvar_ps((__m512i)lane_, few(numbers + group, n));
#else
    if (per_ == 1) return splat(float(numbers[group]));
    Floats v;
    for (int i = 0; i < kLanes; ++i) v[i] = float(numbers[group + std::min<int64_t>(lane_[i], n - 1)]);
    return v;
#endif
  }

#if defined(__AVX512F__)
  static ENGINEBAY_INLINE __m512 few(const float* p, int64_t n) {
    return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
  }

  static ENGINEBAY_INLINE __m512 few(const f16* p, int64_t n) {
    return _mm512_castps256_ps512(_mm256_cvtph_ps(_mm_maskz_loadu_epi16(__mmask8((1u << n) - 1), p)));
  }
#endif

  Groups groups_;
  int64_t per_;
  Ints lane_;
};

}  // namespace
}  // namespace enginebay
