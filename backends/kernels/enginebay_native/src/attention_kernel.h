// Attention of one new token per row over a paged cache: scores of all keys of the row, softmax, weighted sum of the values.
//
// Heads are independent, and sums run in the order of the keys. So a result depends neither on other rows, nor on where the
// pages lie, nor on the length of the page table. Nothing after a row's length is read.
//
// Keys and values of a quantised cache become f32 a few at a time, and all queries of a head are multiplied with these while
// they are in the first-level cache.
//
// The source that includes this defines ENGINEBAY_NAME, the name of the call, and ENGINEBAY_STORED, the type of keys and values.
#pragma once

#include <vector>

#include "codes.h"
#include "latent.h"
#include "softmax.h"

namespace enginebay {
namespace {

using Stored = ENGINEBAY_STORED;

struct Shape {
  int64_t rows, kv_heads, group, dim, page_size, table_width;
};

// Scratch memory of a thread, kept between calls.
struct Space {
  std::vector<float> query, scores, out, wide;
};

Space& space() {
  thread_local Space mine;
  return mine;
}

// Keys and values are read in contiguous pieces: the part of a page that belongs to the row.
template <typename T>
struct Pages {
  const T* base;
  const int32_t* table;
  int64_t page_stride, page_size;

  // Calls f(piece, first position, number of positions, distance to the next piece).
  template <typename F>
  void each(int64_t first, int64_t end, int64_t dim, const F& f) const {
    for (int64_t at = first; at < end;) {
      int64_t offset = at % page_size, count = std::min(page_size - offset, end - at), page = at / page_size;
      const T* piece = base + table[page] * page_stride + offset * dim;
      int64_t ahead = at + count < end ? (int64_t(table[page + 1]) - table[page]) * page_stride - offset * dim : 0;
      f(piece, at - first, count, ahead);
      at += count;
    }
  }
};

// Values per head: D if it is known at compile time, so that loops over it are unrolled; otherwise (D = 0) `dim`.
template <int D>
inline int64_t width(int64_t dim) {
  return D ? D : dim;
}

// sums[j] = the products of a query with key j, lane by lane, and each lane's in their order: N keys that lie together. With
// kFetch, what lies `ahead` of each key is brought into the cache meanwhile.
template <int N, int D, bool kFetch>
ENGINEBAY_INLINE void dot_each(const float* query, const float* keys, Floats* sums, int64_t dim, int64_t ahead) {
  const int64_t wide = width<D>(dim);
#pragma GCC unroll 16
  for (int j = 0; j < N; ++j) sums[j] = Floats{};
  int64_t d = 0;
#pragma GCC unroll 16
  for (; d + kLanes <= wide; d += kLanes) {
    Floats some = load(query + d);
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) {
      if (kFetch) fetch(keys + j * wide + d + ahead);
      sums[j] = add_product(sums[j], some, load(keys + j * wide + d));
    }
  }
  for (int lane = 0; d < wide; ++d, ++lane)
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) sums[j][lane] += query[d] * keys[j * wide + d];
}

template <int N, int D, bool kFetch>
ENGINEBAY_INLINE void dot_each(const float* query, const bf16* keys, Floats* sums, int64_t dim, int64_t ahead) {
  const int64_t wide = width<D>(dim);
#pragma GCC unroll 16
  for (int j = 0; j < N; ++j) sums[j] = Floats{};
  int64_t d = 0;
#pragma GCC unroll 8
  for (; d + 2 * kLanes <= wide; d += 2 * kLanes) {
    Floats even = load(query + d), odd = load(query + d + kLanes);
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) {
      if (kFetch) fetch(keys + j * wide + d + ahead);
      Pair values = load_pair(keys + j * wide + d);
      sums[j] = add_product(sums[j], even, values.even);
      sums[j] = add_product(sums[j], odd, values.odd);
    }
  }
  for (int lane = 0; d < wide; ++d, lane = (lane + 1) % kLanes)
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) sums[j][lane] += query[d] * to_float(keys[j * wide + d]);
}

template <int D, bool kFetch, typename T>
void score_for(const float* query, const T* keys, float* scores, int64_t count, int64_t dim, int64_t ahead) {
  const int64_t wide = width<D>(dim);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Floats sums[kLanes];
    dot_each<kLanes, D, kFetch>(query, keys + i * wide, sums, dim, ahead);
    store(scores + i, sum_each(sums));
  }
  for (; i < count; ++i) {
    Floats one;
    dot_each<1, D, kFetch>(query, keys + i * wide, &one, dim, ahead);
    scores[i] = sum(one);
  }
}

// Scores of `count` contiguous keys. The first query reads them from memory, the others from the processor's cache.
template <int D, typename T>
__attribute__((noinline)) void score_keys(const float* queries, const T* keys, float* scores, int64_t count, int64_t stride,
                                          const Shape& s, int64_t ahead) {
  const int64_t wide = width<D>(s.dim);
  score_for<D, true>(queries, keys, scores, count, s.dim, ahead);
  for (int64_t g = 1; g < s.group; ++g) score_for<D, false>(queries + g * wide, keys, scores + g * stride, count, s.dim, 0);
}

template <int V>
inline void load_values(const float* values, Floats* to) {
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) to[v] = load(values + v * kLanes);
}

// Even values and then odd ones of each two vectors.
template <int V>
inline void load_values(const bf16* values, Floats* to) {
#pragma GCC unroll 4
  for (int v = 0; v < V; v += 2) {
    Pair pair = load_pair(values + v * kLanes);
    to[v] = pair.even;
    to[v + 1] = pair.odd;
  }
}

// Queries that are multiplied with V vectors of a value at once: enough sums to hide the latency of each, within the registers.
#ifdef __AVX512F__
constexpr int kQueries = 4;
#else
constexpr int kQueries = 2;
#endif

// out[q] += the sum of weights[q][i] * values[i]: V vectors of Q queries.
template <int Q, int V, int D, typename T>
inline void add_values(const float* weights, int64_t stride, const T* values, float* out, int64_t count, int64_t dim,
                       int64_t ahead) {
  const int64_t wide = width<D>(dim);
  Floats sums[Q][V];
#pragma GCC unroll 4
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[q][v] = load(out + q * wide + v * kLanes);
  for (int64_t i = 0; i < count; ++i) {
    Floats some[V];
    load_values<V>(values + i * wide, some);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) fetch(values + i * wide + v * kLanes + ahead);
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q) {
      Floats weight = splat(weights[q * stride + i]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[q][v] = add_product(sums[q][v], weight, some[v]);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(out + q * wide + v * kLanes, sums[q][v]);
}

template <int Q, int D, typename T>
void sum_for(const float* weights, int64_t stride, const T* values, float* out, int64_t count, int64_t dim, int64_t ahead) {
  const int64_t wide = width<D>(dim);
  int64_t d = 0;
  for (; d + 4 * kLanes <= wide; d += 4 * kLanes)
    add_values<Q, 4, D>(weights, stride, values + d, out + d, count, dim, ahead);
  for (; d + 2 * kLanes <= wide; d += 2 * kLanes)
    add_values<Q, 2, D>(weights, stride, values + d, out + d, count, dim, ahead);
  for (; d < wide; ++d)
    for (int q = 0; q < Q; ++q)
      for (int64_t i = 0; i < count; ++i) out[q * wide + d] += weights[q * stride + i] * to_float(values[i * wide + d]);
}

// The same for the first `queries` of at most R, as a constant.
template <int R, int D, typename T>
void sum_few(int64_t queries, const float* weights, int64_t stride, const T* values, float* out, int64_t count, int64_t dim,
             int64_t ahead) {
  if constexpr (R > 0) {
    if (queries < R) return sum_few<R - 1, D>(queries, weights, stride, values, out, count, dim, ahead);
    sum_for<R, D>(weights, stride, values, out, count, dim, ahead);
  }
}

template <int D, typename T>
__attribute__((noinline)) void sum_values(const float* weights, const T* values, float* out, int64_t count, int64_t stride,
                                          const Shape& s, int64_t ahead) {
  for (int64_t g = 0; g < s.group; g += kQueries)
    sum_few<kQueries, D>(s.group - g, weights + g * stride, stride, values, out + g * width<D>(s.dim), count, s.dim, ahead);
}

constexpr int64_t kWidened = 32;  // keys, or values, that become f32 at once

template <typename T>
struct Problem {
  Shape s;
  Rule rule;
  Values q;
  const T *k, *v;
  Scales k_scales, v_scales;
  const int32_t *table, *lengths;
  const float* sinks;  // null: none
  Values out;
  float* lse;

  template <int D>
  void head(int64_t row, int64_t h) const {
    int64_t length = lengths[row], first = rule.first(length);
    int64_t count = std::max<int64_t>(0, length - first), stride = (count + kLanes - 1) / kLanes * kLanes;
    int64_t at = (row * s.kv_heads + h) * s.group;
    Space& mine = space();
    mine.query.resize(s.group * s.dim);
    mine.scores.resize(s.group * stride);
    mine.out.assign(s.group * s.dim, 0.0f);
    std::vector<float>& plain = mine.out;  // not needed yet: holds the query as f32
    for (int64_t g = 0; g < s.group; ++g) {
      q.read((at + g) * s.dim, s.dim, plain.data());
      arrange(plain.data(), mine.query.data() + g * s.dim, s.dim, static_cast<const Wide<T>*>(nullptr));
    }
    std::fill_n(plain.begin(), s.dim, 0.0f);
    const int64_t stored = k_scales.stored(s.dim), page_stride = s.kv_heads * s.page_size * stored;
    const int32_t* pages = table + row * s.table_width;
    Pages<T> keys{k + h * s.page_size * stored, pages, page_stride, s.page_size};
    Pages<T> values{v + h * s.page_size * stored, pages, page_stride, s.page_size};
    keys.each(first, length, stored, [&](const T* some, int64_t from, int64_t n, int64_t ahead) {
      if constexpr (kIsCode<T>)
        widened<D>(some, k_scales.at(place(pages, h, first + from)), n, ahead, [&](const float* wide, int64_t i, int64_t m) {
          for (int64_t g = 0; g < s.group; ++g)
            score_for<D, false>(mine.query.data() + g * width<D>(s.dim), wide, mine.scores.data() + g * stride + from + i, m,
                                s.dim, 0);
        });
      else
        score_keys<D>(mine.query.data(), some, mine.scores.data() + from, n, stride, s, ahead);
    });
    std::vector<Total>& totals = totals_of(s.group);
    for (int64_t g = 0; g < s.group; ++g) {
      float* scores = mine.scores.data() + g * stride;
      totals[g].maximum = scale_scores(scores, count, rule, kLowest);
      totals[g].sum = weigh(scores, count, totals[g].maximum);
    }
    values.each(first, length, stored, [&](const T* some, int64_t from, int64_t n, int64_t ahead) {
      if constexpr (kIsCode<T>)
        widened<D>(some, v_scales.at(place(pages, h, first + from)), n, ahead, [&](const float* wide, int64_t i, int64_t m) {
          sum_values<D>(mine.scores.data() + from + i, wide, mine.out.data(), m, stride, s, 0);
        });
      else
        sum_values<D>(mine.scores.data() + from, some, mine.out.data(), n, stride, s, ahead);
    });
    for (int64_t g = 0; g < s.group; ++g)
      finish<Wide<T>>(totals[g], mine.out.data() + g * s.dim, s.dim, sinks ? sinks + h * s.group + g : nullptr,
                out, (at + g) * s.dim, lse + at + g);
  }

  // The place of a position of head h in the arrays of scales.
  int64_t place(const int32_t* pages, int64_t h, int64_t position) const {
    return (int64_t(pages[position / s.page_size]) * s.kv_heads + h) * s.page_size + position % s.page_size;
  }

  // Calls f(keys as f32, first, number) for `count` contiguous keys.
  template <int D, typename F>
  void widened(const T* codes, Scales scales, int64_t count, int64_t ahead, const F& f) const {
    const int64_t dim = width<D>(s.dim);
    std::vector<float>& to = space().wide;
    to.resize(kWidened * dim);
    for (int64_t i = 0; i < count; i += kWidened) {
      int64_t some = std::min(kWidened, count - i);
      widen(codes + i * scales.stored(dim), scales.at(i), to.data(), some, dim, ahead);
      f(to.data(), i, some);
    }
  }

  static std::vector<Total>& totals_of(int64_t group) {
    thread_local std::vector<Total> mine;
    mine.resize(group);
    return mine;
  }
};

template <int D, typename T>
ffi::Error run_for(ffi::ThreadPool pool, const Problem<T>& problem) {
  parallel_for(pool, problem.s.rows * problem.s.kv_heads, [&problem](int64_t task) {
    problem.template head<D>(task / problem.s.kv_heads, task % problem.s.kv_heads);
  });
  return ffi::Error::Success();
}

template <typename T>
ffi::Error run(ffi::ThreadPool pool, const Problem<T>& problem) {
  switch (problem.s.dim) {
    case 32: return run_for<32>(pool, problem);
    case 64: return run_for<64>(pool, problem);
    case 128: return run_for<128>(pool, problem);
    default: return run_for<0>(pool, problem);
  }
}

// q [rows, q_heads, dim]; k, v [pages, kv_heads, page_size, dim] of one dtype; table [rows, width] and lengths [rows] int32;
// sinks f32 [q_heads] or [0] -> out like q, log-sum-exp f32 [rows, q_heads]. With v_prefix values are the first columns of the
// keys of one KV head, as many as out has, and v is not read. k and v may be codes: int8, or uint8 with the bits of
// float8_e4m3fn, or uint8 with two codes in a byte. Then scales [pages, kv_heads, page_size] are bf16, and the last kind has
// zero points in int16; arrays that are not needed are [0].
ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer k_scales,
                     ffi::AnyBuffer v_scales, ffi::AnyBuffer k_zeros, ffi::AnyBuffer v_zeros, ffi::Buffer<ffi::S32> table,
                     ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::AnyBuffer> out,
                     ffi::ResultBuffer<ffi::F32> lse, float scale, float softcap, int64_t window,
                     bool v_prefix) {
  auto qs = q.dimensions(), ks = k.dimensions();
  bool packed = k.element_type() == ffi::U8 && k_zeros.element_count() > 0;
  if (qs.size() != 3 || ks.size() != 4 || (packed ? (qs[2] + 1) / 2 : qs[2]) != ks[3] || qs[1] % ks[1])
    return ffi::Error::InvalidArgument("attention wants q [rows, heads, dim] and k, v [pages, kv_heads, page_size, dim]");
  int64_t v_dim = out->dimensions()[2];
  if (v_prefix ? ks[1] != 1 || v_dim > qs[2] : v_dim != qs[2])
    return ffi::Error::InvalidArgument("attention wants out [rows, heads, dim], or one KV head whose values are narrower");
  Shape shape{qs[0], ks[1], qs[1] / ks[1], qs[2], ks[2], table.dimensions()[1]};
  Rule rule{scale, softcap, window};
  Kind kind = packed                         ? Kind::kUint4
              : k.element_type() == ffi::S8 ? Kind::kInt8
              : k.element_type() == ffi::U8 ? Kind::kFloat8
                                            : Kind::kPlain;
  auto scales_of = [&](ffi::AnyBuffer& scales, ffi::AnyBuffer& zeros) {
    return Scales{kind, static_cast<const bf16*>(scales.untyped_data()),
                  packed ? static_cast<const int16_t*>(zeros.untyped_data()) : nullptr};
  };
  Scales of_keys = scales_of(k_scales, k_zeros), of_values = scales_of(v_scales, v_zeros);
  Values queries{q.untyped_data(), q.element_type() == ffi::BF16}, results{out->untyped_data(), queries.is_bf16};
  bool is_code = kind != Kind::kPlain;
  auto plain = std::is_same_v<Stored, bf16> ? ffi::BF16 : ffi::F32;
  if (is_code != kIsCode<Stored> || (!is_code && k.element_type() != plain))
    return ffi::Error::InvalidArgument("attention wants keys and values of the form in its name");
  auto* keys = static_cast<const Stored*>(k.untyped_data());
  const float* sink = sinks.element_count() ? sinks.typed_data() : nullptr;
  if (v_prefix)
    return LatentProblem<Stored>{qs[0], qs[1], qs[2], v_dim, ks[2], shape.table_width, rule, queries, keys, of_keys,
                                 table.typed_data(), lengths.typed_data(), sink, results, lse->typed_data()}
        .run(pool);
  return run(pool, Problem<Stored>{shape, rule, queries, keys, static_cast<const Stored*>(v.untyped_data()), of_keys, of_values,
                                   table.typed_data(), lengths.typed_data(), sink, results, lse->typed_data()});
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ENGINEBAY_NAME, attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window")
                                  .Attr<bool>("v_prefix"));

}  // namespace enginebay
