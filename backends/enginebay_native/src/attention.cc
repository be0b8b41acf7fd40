// Attention of one new token a row over a paged cache, each row over its own length: scores of all keys, softmax, weighted sum.
//
// A row's heads are independent, and their sums run in the order of the keys, so that a result does not depend on the other
// rows, on where the pages lie or on how long the page table is. Nothing past a row's length is read.

#include <cmath>
#include <vector>

#include "vectors.h"

namespace enginebay {
namespace {

constexpr float kLowest = -5e29f;  // log-sum-exp of a row without keys

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

struct Shape {
  int64_t rows, kv_heads, group, dim, page_size, table_width;
};

struct Rule {
  float scale, softcap;  // softcap 0: none
  int64_t window;        // 0: none
};

// What a thread works in, kept from call to call.
struct Space {
  std::vector<float> query, scores, out;
};

Space& space() {
  thread_local Space mine;
  return mine;
}

// Keys and values come in pieces that lie together: the part of a page that the row has.
template <typename T>
struct Pages {
  const T* base;
  const int32_t* table;
  int64_t page_stride, page_size;

  template <typename F>
  void each(int64_t first, int64_t end, int64_t dim, const F& f) const {
    for (int64_t at = first; at < end;) {
      int64_t offset = at % page_size, count = std::min(page_size - offset, end - at);
      f(base + table[at / page_size] * page_stride + offset * dim, at - first, count);
      at += count;
    }
  }
};

// The query in the order in which `dot` takes it: as it is for f32, even values and then odd ones of each two vectors for bf16.
inline void arrange(const float* query, float* to, int64_t dim, const float*) { std::memcpy(to, query, dim * sizeof(float)); }

inline void arrange(const float* query, float* to, int64_t dim, const bf16*) {
  int64_t d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes)
    for (int i = 0; i < kLanes; ++i) {
      to[d + i] = query[d + 2 * i];
      to[d + kLanes + i] = query[d + 2 * i + 1];
    }
  for (; d < dim; ++d) to[d] = query[d];
}

inline void back(float* out, int64_t, const float*) { (void)out; }

inline void back(float* out, int64_t dim, const bf16*) {
  float part[2 * kLanes];
  for (int64_t d = 0; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      part[2 * i] = out[d + i];
      part[2 * i + 1] = out[d + kLanes + i];
    }
    std::memcpy(out + d, part, sizeof(part));
  }
}

inline Floats dot(const float* query, const float* key, int64_t dim) {
  Floats sum = {};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) sum = add_product(sum, load(query + d), load(key + d));
  for (int lane = 0; d < dim; ++d, ++lane) sum[lane] += query[d] * key[d];
  return sum;
}

inline Floats dot(const float* query, const bf16* key, int64_t dim) {
  Floats sum = {};
  int64_t d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    Pair values = load_pair(key + d);
    sum = add_product(sum, load(query + d), values.even);
    sum = add_product(sum, load(query + d + kLanes), values.odd);
  }
  for (int lane = 0; d < dim; ++d, lane = (lane + 1) % kLanes) sum[lane] += query[d] * to_float(key[d]);
  return sum;
}

// Scores of `count` keys that lie together: they come from memory for the first query, and from the cache for the others.
template <typename T>
void score_keys(const float* queries, const T* keys, float* scores, int64_t count, int64_t stride, const Shape& s) {
  for (int64_t g = 0; g < s.group; ++g) {
    const float* query = queries + g * s.dim;
    float* to = scores + g * stride;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      Floats sums[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) sums[j] = dot(query, keys + (i + j) * s.dim, s.dim);
      store(to + i, sum_each(sums));
    }
    for (; i < count; ++i) to[i] = sum(dot(query, keys + i * s.dim, s.dim));
  }
}

// scores -> weights e^(score - maximum); their maximum and sum.
struct Total {
  float maximum, sum;
};

Total weigh(float* scores, int64_t count, const Rule& rule) {
  float maximum = kLowest;
  for (int64_t i = 0; i < count; ++i) {
    scores[i] *= rule.scale;
    if (rule.softcap > 0) scores[i] = rule.softcap * std::tanh(scores[i] / rule.softcap);
  }
  for (int64_t i = 0; i < count; ++i) maximum = scores[i] > maximum ? scores[i] : maximum;
  for (int64_t i = count; i % kLanes; ++i) scores[i] = 2 * kLowest;  // the space is a whole number of vectors
  Floats sums = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats weights = exp_of(load(scores + i) - splat(maximum));
    store(scores + i, weights);
    sums += weights;
  }
  return {maximum, sum(sums)};
}

template <int V>
inline void add_values(const float* weights, const float* values, float* out, int64_t count, int64_t dim) {
  Floats sums[V];
  for (int v = 0; v < V; ++v) sums[v] = load(out + v * kLanes);
  for (int64_t i = 0; i < count; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[v] = add_product(sums[v], splat(weights[i]), load(values + i * dim + v * kLanes));
  for (int v = 0; v < V; ++v) store(out + v * kLanes, sums[v]);
}

template <int V>
inline void add_values(const float* weights, const bf16* values, float* out, int64_t count, int64_t dim) {
  static_assert(V % 2 == 0, "bf16 comes in pairs of vectors");
  Floats sums[V];
  for (int v = 0; v < V; ++v) sums[v] = load(out + v * kLanes);
  for (int64_t i = 0; i < count; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; v += 2) {
      Pair pair = load_pair(values + i * dim + v * kLanes);
      sums[v] = add_product(sums[v], splat(weights[i]), pair.even);
      sums[v + 1] = add_product(sums[v + 1], splat(weights[i]), pair.odd);
    }
  for (int v = 0; v < V; ++v) store(out + v * kLanes, sums[v]);
}

template <typename T>
void sum_values(const float* weights, const T* values, float* out, int64_t count, int64_t stride, const Shape& s) {
  for (int64_t g = 0; g < s.group; ++g) {
    const float* mine = weights + g * stride;
    float* to = out + g * s.dim;
    int64_t d = 0;
    for (; d + 4 * kLanes <= s.dim; d += 4 * kLanes) add_values<4>(mine, values + d, to + d, count, s.dim);
    for (; d + 2 * kLanes <= s.dim; d += 2 * kLanes) add_values<2>(mine, values + d, to + d, count, s.dim);
    for (; d < s.dim; ++d)
      for (int64_t i = 0; i < count; ++i) to[d] += mine[i] * to_float(values[i * s.dim + d]);
  }
}

template <typename Q, typename T>
struct Problem {
  Shape s;
  Rule rule;
  const Q* q;
  const T *k, *v;
  const int32_t *table, *lengths;
  const float* sinks;  // null: none
  Q* out;
  float* lse;

  void head(int64_t row, int64_t h) const {
    int64_t length = lengths[row], first = rule.window > 0 ? std::max<int64_t>(0, length - rule.window) : 0;
    int64_t count = std::max<int64_t>(0, length - first), stride = (count + kLanes - 1) / kLanes * kLanes;
    int64_t at = (row * s.kv_heads + h) * s.group;
    Space& mine = space();
    mine.query.resize(s.group * s.dim);
    mine.scores.assign(s.group * stride, 0.0f);
    mine.out.assign(s.group * s.dim, 0.0f);
    std::vector<float>& plain = mine.out;  // not needed yet: holds the query as f32
    for (int64_t g = 0; g < s.group; ++g) {
      for (int64_t d = 0; d < s.dim; ++d) plain[d] = to_float(q[(at + g) * s.dim + d]);
      arrange(plain.data(), mine.query.data() + g * s.dim, s.dim, k);
    }
    std::fill_n(plain.begin(), s.dim, 0.0f);
    int64_t page_stride = s.kv_heads * s.page_size * s.dim;
    const int32_t* pages = table + row * s.table_width;
    Pages<T> keys{k + h * s.page_size * s.dim, pages, page_stride, s.page_size};
    Pages<T> values{v + h * s.page_size * s.dim, pages, page_stride, s.page_size};
    keys.each(first, length, s.dim, [&](const T* some, int64_t from, int64_t n) {
      score_keys(mine.query.data(), some, mine.scores.data() + from, n, stride, s);
    });
    std::vector<Total>& totals = totals_of(s.group);
    for (int64_t g = 0; g < s.group; ++g) totals[g] = weigh(mine.scores.data() + g * stride, count, rule);
    values.each(first, length, s.dim, [&](const T* some, int64_t from, int64_t n) {
      sum_values(mine.scores.data() + from, some, mine.out.data(), n, stride, s);
    });
    for (int64_t g = 0; g < s.group; ++g) finish(at + g, h * s.group + g, totals[g], mine.out.data() + g * s.dim);
  }

  static std::vector<Total>& totals_of(int64_t group) {
    thread_local std::vector<Total> mine;
    mine.resize(group);
    return mine;
  }

  void finish(int64_t at, int64_t q_head, Total total, float* weighted) const {
    float keep = 1.0f;
    if (sinks != nullptr) {
      float higher = std::max(total.maximum, sinks[q_head]);
      keep = std::exp(total.maximum - higher);
      total = {higher, total.sum * keep + std::exp(sinks[q_head] - higher)};
    }
    float sum = total.sum == 0 ? 1.0f : total.sum;
    back(weighted, s.dim, k);
    for (int64_t d = 0; d < s.dim; ++d) put(out + at * s.dim + d, weighted[d] * keep / sum);
    lse[at] = total.maximum + std::log(sum);
  }
};

template <typename Q, typename T>
ffi::Error run(ffi::ThreadPool pool, const Problem<Q, T>& problem) {
  parallel_for(pool, problem.s.rows * problem.s.kv_heads, [&problem](int64_t task) {
    problem.head(task / problem.s.kv_heads, task % problem.s.kv_heads);
  });
  return ffi::Error::Success();
}

// q [rows, q_heads, dim]; k, v [pages, kv_heads, page_size, dim] of one dtype; table [rows, width] and lengths [rows] int32;
// sinks f32 [q_heads] or [0] -> out like q, log-sum-exp f32 [rows, q_heads].
ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> table,
                     ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::AnyBuffer> out,
                     ffi::ResultBuffer<ffi::F32> lse, float scale, float softcap, int64_t window) {
  auto qs = q.dimensions(), ks = k.dimensions();
  if (qs.size() != 3 || ks.size() != 4 || qs[2] != ks[3] || qs[1] % ks[1])
    return ffi::Error::InvalidArgument("attention wants q [rows, heads, dim] and k, v [pages, kv_heads, page_size, dim]");
  Shape shape{qs[0], ks[1], qs[1] / ks[1], qs[2], ks[2], table.dimensions()[1]};
  Rule rule{scale, softcap, window};
  auto with = [&](auto* query, auto* key) {
    using Q = std::remove_const_t<std::remove_pointer_t<decltype(query)>>;
    using T = std::remove_const_t<std::remove_pointer_t<decltype(key)>>;
    return run(pool, Problem<Q, T>{shape, rule, static_cast<const Q*>(q.untyped_data()), static_cast<const T*>(k.untyped_data()),
                                   static_cast<const T*>(v.untyped_data()), table.typed_data(), lengths.typed_data(),
                                   sinks.element_count() ? sinks.typed_data() : nullptr, static_cast<Q*>(out->untyped_data()),
                                   lse->typed_data()});
  };
  bool wide_q = q.element_type() == ffi::F32, wide_k = k.element_type() == ffi::F32;
  const float* wide = nullptr;
  const bf16* narrow = nullptr;
  if (wide_q) return wide_k ? with(wide, wide) : with(wide, narrow);
  return wide_k ? with(narrow, wide) : with(narrow, narrow);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(enginebay_attention, attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
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
                                  .Attr<int64_t>("window"));

}  // namespace enginebay
