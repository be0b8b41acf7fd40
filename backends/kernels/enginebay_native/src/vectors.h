// Vectors of f32 with the width of the processor, their exponential, sums over lanes, and a loop over the threads of XLA's
// pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

#ifdef __AVX__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Always inlined, so that sums which are indexed by constants stay in registers.
#define ENGINEBAY_INLINE inline __attribute__((always_inline))

namespace enginebay {

namespace ffi = xla::ffi;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint16_t bf16;
typedef _Float16 f16;
struct fp8 {  // e4m3: finite numbers only
  uint8_t bits;
};

inline Floats splat(float x) { return Floats{} + x; }

inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline Floats load(const int8_t* p) {
#if defined(__AVX512F__)  // the compiler would convert one value at a time
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes v;
  std::memcpy(&v, p, sizeof(v));
  return __builtin_convertvector(v, Floats);
#endif
}

inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }
inline float to_float(f16 x) { return float(x); }

// The bits of e4m3 are those of an f16 with a smaller exponent.
inline float to_float(fp8 x) {
  uint16_t bits = uint16_t((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7);
  f16 f;
  std::memcpy(&f, &bits, sizeof(f));
  return float(f) * 256.0f;
}

inline Floats load(const fp8* p) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  __m256i v = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  __m256i sign = _mm256_and_si256(_mm256_slli_epi16(v, 8), _mm256_set1_epi16(int16_t(0x8000)));
  __m256i rest = _mm256_and_si256(_mm256_slli_epi16(v, 7), _mm256_set1_epi16(0x3f80));
  return (Floats)_mm512_cvtph_ps(_mm256_or_si256(sign, rest)) * splat(256.0f);
#else
  Floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

inline Floats load(const bf16* p) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  Halves v;
  std::memcpy(&v, p, sizeof(v));
  return (Floats)(__builtin_convertvector(v, Ints) << 16);
}

inline Floats load(const f16* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  Floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = float(p[i]);
  return v;
#endif
}

// Prefetches into the second-level cache. The first-level cache allows few reads at once, and the processor would wait for
// them.
inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof(v)); }

// v, loaded once. The compiler would load it again at each use, and the loads would slow the sums down.
template <typename V>
ENGINEBAY_INLINE V in_register(V v) {
#if defined(__AVX__)
  asm("" : "+v"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}

// sum + a * b, fused wherever the processor can. It is an explicit call because the compiler may fuse one loop and not
// another, and then a row's bits would depend on the number of rows.
inline Floats add_product(Floats sum, Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  return sum + a * b;
#endif
}

// e^x for x <= 0: 2^n times a polynomial of the rest (Cephes' expf: error below 2 units of the last place); 0 below -87.
inline Floats exp_of(Floats x) {
  Ints tiny = x < splat(-87.0f);
  x = tiny ? splat(-87.0f) : x;
  Floats scaled = x * splat(1.44269504f) + splat(12582912.0f);  // 1.5 * 2^23: rounds to a whole number
  Ints n;
  std::memcpy(&n, &scaled, sizeof(n));
  Floats whole = scaled - splat(12582912.0f);
  Floats r = x - whole * splat(0.693359375f) + whole * splat(2.12194440e-4f);
  Floats p = splat(1.9875691500e-4f);
  p = add_product(splat(1.3981999507e-3f), p, r);
  p = add_product(splat(8.3334519073e-3f), p, r);
  p = add_product(splat(4.1665795894e-2f), p, r);
  p = add_product(splat(1.6666665459e-1f), p, r);
  p = add_product(splat(5.0000001201e-1f), p, r);
  p = p * r * r + r + splat(1.0f);
  Ints bits;
  std::memcpy(&bits, &p, sizeof(bits));
  bits += n << 23;
  bits = tiny ? Ints{} : bits;
  std::memcpy(&p, &bits, sizeof(p));
  return p;
}

// Rounds to nearest, ties to even. A NaN stays a NaN.
inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) { *p = to_bf16(x); }

// 2 * kLanes bf16 as two vectors: the values of even index, and those of odd index.
struct Pair {
  Floats even, odd;
};

inline Pair load_pair(const bf16* p) {
  Ints bits;
  std::memcpy(&bits, p, sizeof(bits));
  Ints even = bits << 16, odd = bits & (Ints{} + int32_t(0xffff0000u));
  Pair out;
  std::memcpy(&out.even, &even, sizeof(even));
  std::memcpy(&out.odd, &odd, sizeof(odd));
  return out;
}

// Sums of neighbouring lanes: of a in the lower half of the result, of b in the upper half.
template <typename V>
inline V add_neighbours(V a, V b) {
#if defined(__AVX512F__)
  V x = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  V y = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX__)
  V x = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
  V y = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  V x = __builtin_shufflevector(a, b, 0, 2, 4, 6);
  V y = __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
  return x + y;
}

// The levels of the tree of sums, from N vectors to one.
template <int N, typename V>
ENGINEBAY_INLINE void add_pairs(V* v) {
#pragma GCC unroll 8
  for (int i = 0; i < N / 2; ++i) v[i] = add_neighbours(v[2 * i], v[2 * i + 1]);
  if constexpr (N > 2) add_pairs<N / 2>(v);
}

// Lane i of the result is the sum of the lanes of v[i], for kLanes vectors. Each sum is the same tree.
template <typename V>
ENGINEBAY_INLINE V sum_each(V* v) {
  add_pairs<kLanes>(v);
  return v[0];
}

// The same tree for one vector.
inline float sum(Floats v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
  return lanes[0];
}

// Calls f(i) for i in 0..n-1 on the pool's threads and this one. Each thread begins with a run of consecutive i, so that it
// uses what it has prefetched, and then takes over the remaining ones of other threads. A thread that starts late finds no
// work, so that no thread waits for one that the pool has not started.
template <typename F>
void parallel_for(ffi::ThreadPool& pool, int64_t n, const F& f) {
  int64_t threads = std::min<int64_t>(n, pool.num_threads());
  if (threads <= 1) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
  struct alignas(64) Count {
    std::atomic<int64_t> value{0};
  };
  struct Shared {
    explicit Shared(int64_t threads) : taken(threads) {}
    std::vector<Count> taken;
    Count started, done;
  };
  auto shared = std::make_shared<Shared>(threads);
  auto work = [shared, n, threads, call = &f] {
    int64_t own = shared->started.value.fetch_add(1, std::memory_order_relaxed);
    for (int64_t t = own; t < own + threads; ++t) {
      int64_t run = t % threads, first = n * run / threads, size = n * (run + 1) / threads - first;
      std::atomic<int64_t>& taken = shared->taken[run].value;
      if (t > own && taken.load(std::memory_order_relaxed) >= size) continue;
      for (int64_t i; (i = taken.fetch_add(1, std::memory_order_relaxed)) < size;) {
        (*call)(first + i);
        shared->done.value.fetch_add(1, std::memory_order_release);
      }
    }
  };
  for (int64_t t = 1; t < threads; ++t) pool.Schedule(decltype(work)(work));
  work();
  for (int spins = 0; shared->done.value.load(std::memory_order_acquire) < n; ++spins) {
    if (spins > 2000) std::this_thread::yield();
  }
}

}  // namespace enginebay
