// Codes of a quantised cache, and their conversion to f32: a few keys at a time, into memory that stays in the processor's cache.
// enginebay/ops/kv_storage.py defines the formats.
#pragma once

#include <type_traits>

#include "vectors.h"

namespace enginebay {

// A byte of codes, whatever their kind: the kind is known at run time, so that attention is compiled once for all kinds.
struct Code {
  uint8_t bits;
};

struct Float8 {  // float8_e4m3fn
  uint8_t bits;
};

template <typename T>
constexpr bool kIsCode = std::is_same_v<T, Code>;

// The type in which products read keys and values.
template <typename T>
using Wide = std::conditional_t<kIsCode<T>, float, T>;

enum class Kind { kPlain, kInt8, kUint4, kFloat8 };

// The scales and zero points of codes, one for each place, and how codes become f32. Zero points are null where codes have none.
struct Scales {
  Kind kind = Kind::kPlain;
  const bf16* scales = nullptr;
  const int16_t* zeros = nullptr;

  Scales at(int64_t place) const { return {kind, scales + place, zeros ? zeros + place : nullptr}; }

  // Elements that a key of `dim` values has in the cache.
  int64_t stored(int64_t dim) const { return kind == Kind::kUint4 ? (dim + 1) / 2 : dim; }
};

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

inline Bytes load_bytes(const void* p) {
  Bytes v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// The bits of a float8 moved to those of an f16 give 2^-8 of its value, for subnormal numbers too.
inline float to_float(Float8 x) {
  uint16_t bits = uint16_t((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7);
  f16 f;
  std::memcpy(&f, &bits, sizeof(f));
  return float(f) * 256.0f;
}

inline Floats load(const Float8* p) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  Halves wide = __builtin_convertvector(load_bytes(p), Halves);
  wide = (wide & 0x80) << 8 | (wide & 0x7f) << 7;
  f16 halves[kLanes];
  std::memcpy(halves, &wide, sizeof(halves));
  return load(halves) * splat(256.0f);
}

inline Floats load_code(const Float8* p) { return load(p); }

// kLanes bytes as integers. The compiler's own conversions of bytes are several times slower.
inline Ints load_ints(const int8_t* p) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  typedef int8_t Signed __attribute__((vector_size(kLanes)));
  return __builtin_convertvector((Signed)load_bytes(p), Ints);
#endif
}

inline Ints load_ints(const Code* p) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  return __builtin_convertvector(load_bytes(p), Ints);
#endif
}

inline Floats load_code(const int8_t* p) { return __builtin_convertvector(load_ints(p), Floats); }

template <typename T>
void widen_bytes(const T* codes, Scales s, float* to, int64_t count, int64_t dim, int64_t ahead) {
  for (int64_t i = 0; i < count; ++i, codes += dim, to += dim) {
    float one = to_float(s.scales[i]);
    Floats scale = splat(one);
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      if (d % 64 == 0) fetch(codes + d + ahead);
      store(to + d, load_code(codes + d) * scale);
    }
    for (; d < dim; ++d) to[d] = to_float(codes[d]) * one;
  }
}

// Code i lies in the low and code i + ceil(dim / 2) in the high four bits of byte i.
inline void widen_nibbles(const Code* codes, Scales s, float* to, int64_t count, int64_t dim, int64_t ahead) {
  const int64_t half = (dim + 1) / 2;
  for (int64_t i = 0; i < count; ++i, codes += half, to += dim) {
    float scale = to_float(s.scales[i]), zero = s.zeros[i];
    int64_t d = 0;
    for (; d + kLanes <= dim - half; d += kLanes) {
      if (d % 64 == 0) fetch(codes + d + ahead);
      Ints bits = load_ints(codes + d);
      Floats low = __builtin_convertvector(bits & 15, Floats), high = __builtin_convertvector(bits >> 4, Floats);
      store(to + d, (low - splat(zero)) * splat(scale));
      store(to + half + d, (high - splat(zero)) * splat(scale));
    }
    for (; d < half; ++d) {
      to[d] = ((codes[d].bits & 15) - zero) * scale;
      if (half + d < dim) to[half + d] = ((codes[d].bits >> 4) - zero) * scale;
    }
  }
}

// to[i * dim + d] = value d of key i, for `count` keys that lie together. Meanwhile what lies `ahead` of each is prefetched.
__attribute__((noinline)) inline void widen(const Code* codes, Scales s, float* to, int64_t count, int64_t dim, int64_t ahead) {
  if (s.kind == Kind::kUint4) return widen_nibbles(codes, s, to, count, dim, ahead);
  if (s.kind == Kind::kInt8) return widen_bytes(reinterpret_cast<const int8_t*>(codes), s, to, count, dim, ahead);
  widen_bytes(reinterpret_cast<const Float8*>(codes), s, to, count, dim, ahead);
}

}  // namespace enginebay
