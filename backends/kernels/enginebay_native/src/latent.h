// Attention of one new token per row over a latent cache. Each token has one key, which all query heads share; the first
// columns of the key are the value.
//
// With sixteen or more queries per key, arithmetic takes longer than memory. A block of keys stays in the processor's cache
// while all queries of a task are multiplied with it, as keys and as values, so that it is read from memory once. A query's
// sums depend neither on other queries nor on where the keys lie.
#pragma once

#include <vector>

#include "codes.h"
#include "softmax.h"

namespace enginebay {

constexpr int kKeysAtOnce = 4;
constexpr int kQueriesAtOnce = kLanes / kKeysAtOnce;  // a vector of sums for each tile
constexpr int64_t kBlock = 64;                        // keys of one softmax step: a whole number of vectors

// The index after i, at most count - 1.
inline int64_t at_most(int64_t i, int64_t count) { return i < count ? i : count - 1; }

// sums[q * kKeysAtOnce + j] += query q * key j, lane by lane.
ENGINEBAY_INLINE void add_products(const float* const* queries, const float* const* keys, Floats* sums, int64_t dim) {
  for (int64_t d = 0; d + kLanes <= dim; d += kLanes) {
    Floats some[kKeysAtOnce];
#pragma GCC unroll 4
    for (int j = 0; j < kKeysAtOnce; ++j) some[j] = in_register(load(keys[j] + d));
#pragma GCC unroll 4
    for (int q = 0; q < kQueriesAtOnce; ++q) {
      Floats query = in_register(load(queries[q] + d));
#pragma GCC unroll 4
      for (int j = 0; j < kKeysAtOnce; ++j) sums[q * kKeysAtOnce + j] = add_product(sums[q * kKeysAtOnce + j], query, some[j]);
    }
  }
  for (int64_t d = dim / kLanes * kLanes, lane = 0; d < dim; ++d, ++lane)
    for (int i = 0; i < kLanes; ++i) sums[i][lane] += queries[i / kKeysAtOnce][d] * keys[i % kKeysAtOnce][d];
}

ENGINEBAY_INLINE void add_products(const float* const* queries, const bf16* const* keys, Floats* sums, int64_t dim) {
  for (int64_t d = 0; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    Pair some[kKeysAtOnce];
#pragma GCC unroll 4
    for (int j = 0; j < kKeysAtOnce; ++j) {
      some[j] = load_pair(keys[j] + d);
      some[j] = {in_register(some[j].even), in_register(some[j].odd)};
    }
#pragma GCC unroll 4
    for (int q = 0; q < kQueriesAtOnce; ++q) {
      Floats even = in_register(load(queries[q] + d)), odd = in_register(load(queries[q] + d + kLanes));
#pragma GCC unroll 4
      for (int j = 0; j < kKeysAtOnce; ++j) {
        Floats& sum = sums[q * kKeysAtOnce + j];
        sum = add_product(add_product(sum, even, some[j].even), odd, some[j].odd);
      }
    }
  }
  for (int64_t d = dim / (2 * kLanes) * (2 * kLanes), lane = 0; d < dim; ++d, lane = (lane + 1) % kLanes)
    for (int i = 0; i < kLanes; ++i) sums[i][lane] += queries[i / kKeysAtOnce][d] * to_float(keys[i % kKeysAtOnce][d]);
}

// scores[q][j] of `num` contiguous queries [dim] and `count` keys. Meanwhile the memory at `next` is prefetched.
template <typename T>
void multiply_keys(const float* queries, int64_t num, const T* const* keys, const T* const* next, float (*scores)[kBlock],
                   int64_t count, int64_t dim) {
  for (int64_t first = 0; first < count; first += kKeysAtOnce) {
    const T* some[kKeysAtOnce];
    for (int j = 0; j < kKeysAtOnce; ++j) some[j] = keys[at_most(first + j, count)];
    for (int64_t q = 0; q < num; q += kQueriesAtOnce) {
      const float* few[kQueriesAtOnce];
      for (int i = 0; i < kQueriesAtOnce; ++i) few[i] = queries + at_most(q + i, num) * dim;
      Floats sums[kLanes] = {};
      add_products(few, some, sums, dim);
      float found[kLanes];
      store(found, sum_each(sums));
      for (int64_t i = 0; i < kQueriesAtOnce && q + i < num; ++i)
        std::memcpy(scores[q + i] + first, found + i * kKeysAtOnce, kKeysAtOnce * sizeof(float));
    }
    for (int j = 0; next != nullptr && j < kKeysAtOnce; ++j)
      for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T))) fetch(next[first + j] + d);
  }
}

template <int V>
ENGINEBAY_INLINE void load_columns(const float* values, Floats* to) {
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) to[v] = load(values + v * kLanes);
}

template <int V>
ENGINEBAY_INLINE void load_columns(const bf16* values, Floats* to) {
#pragma GCC unroll 4
  for (int v = 0; v < V; v += 2) {
    Pair pair = load_pair(values + v * kLanes);
    to[v] = pair.even;
    to[v + 1] = pair.odd;
  }
}

// Queries that are multiplied with four vectors of a value at once.
#ifdef __AVX512F__
constexpr int kRows = 4;
#else
constexpr int kRows = 2;
#endif

// out[q] [v_dim] += the sum of weights[q][j] * columns d to d + V * kLanes of key j, for Q queries.
template <int Q, int V, typename T>
ENGINEBAY_INLINE void add_columns(const float (*weights)[kBlock], const T* const* keys, float* out, int64_t count, int64_t d,
                                  int64_t v_dim) {
  Floats sums[Q][V];
#pragma GCC unroll 4
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[q][v] = load(out + q * v_dim + d + v * kLanes);
  for (int64_t j = 0; j < count; ++j) {
    Floats some[V];
    load_columns<V>(keys[j] + d, some);
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q) {
      Floats weight = splat(weights[q][j]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[q][v] = add_product(sums[q][v], weight, some[v]);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(out + q * v_dim + d + v * kLanes, sums[q][v]);
}

// Multiplies a strip of V vectors with all queries while it is in the first-level cache.
template <int V, typename T>
void add_strip(const float (*weights)[kBlock], int64_t num, const T* const* keys, float* out, int64_t count, int64_t d,
               int64_t v_dim) {
  int64_t q = 0;
  for (; q + kRows <= num; q += kRows) add_columns<kRows, V>(weights + q, keys, out + q * v_dim, count, d, v_dim);
  for (; q < num; ++q) add_columns<1, V>(weights + q, keys, out + q * v_dim, count, d, v_dim);
}

template <typename T>
void add_values_of(const float (*weights)[kBlock], int64_t num, const T* const* keys, float* out, int64_t count, int64_t v_dim) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= v_dim; d += 4 * kLanes) add_strip<4>(weights, num, keys, out, count, d, v_dim);
  for (; d + 2 * kLanes <= v_dim; d += 2 * kLanes) add_strip<2>(weights, num, keys, out, count, d, v_dim);
  for (; d < v_dim; ++d)
    for (int64_t q = 0; q < num; ++q)
      for (int64_t j = 0; j < count; ++j) out[q * v_dim + d] += weights[q][j] * to_float(keys[j][d]);
}

template <typename T>
struct LatentProblem {
  int64_t rows, heads, dim, v_dim, page_size, table_width;
  Rule rule;
  Values q;
  const T* k;
  Scales scales;  // of codes
  const int32_t *table, *lengths;
  const float* sinks;  // null: none
  Values out;
  float* lse;

  // The place of the key of a position.
  int64_t place(const int32_t* pages, int64_t position) const {
    return int64_t(pages[position / page_size]) * page_size + position % page_size;
  }

  // The address of the key of a position.
  const T* key(const int32_t* pages, int64_t position) const { return k + place(pages, position) * scales.stored(dim); }

  // Finds the keys of `count` positions; codes become f32 in `wide`.
  void find(const int32_t* pages, int64_t start, int64_t count, const Wide<T>** keys, std::vector<float>& wide) const {
    if constexpr (kIsCode<T>) {
      wide.resize(kBlock * dim);
      for (int64_t j = 0; j < count; ++j) {
        widen(key(pages, start + j), scales.at(place(pages, start + j)), wide.data() + j * dim, 1, dim, 0);
        keys[j] = wide.data() + j * dim;
      }
    } else {
      for (int64_t j = 0; j < count; ++j) keys[j] = key(pages, start + j);
    }
  }

  // Computes query heads `first_head` to `first_head + num` - 1 of a row.
  void part(int64_t row, int64_t first_head, int64_t num) const {
    thread_local std::vector<float> queries, weighted, space, wide;
    thread_local std::vector<Total> totals;
    int64_t length = lengths[row], at = row * heads + first_head;
    queries.resize(num * dim);
    weighted.assign(num * v_dim, 0.0f);
    space.resize(num * kBlock + dim);
    totals.assign(num, Total{kLowest, 0.0f});
    float(*scores)[kBlock] = reinterpret_cast<float(*)[kBlock]>(space.data());
    float* plain = space.data() + num * kBlock;
    for (int64_t i = 0; i < num; ++i) {
      q.read((at + i) * dim, dim, plain);
      arrange(plain, queries.data() + i * dim, dim, static_cast<const Wide<T>*>(nullptr));
    }
    const int32_t* pages = table + row * table_width;
    const Wide<T> *keys[kBlock], *next[kBlock];
    for (int64_t start = rule.first(length); start < length; start += kBlock) {
      int64_t count = std::min(kBlock, length - start);
      bool is_last = kIsCode<T> || start + kBlock >= length;  // codes are not prefetched
      find(pages, start, count, keys, wide);
      if constexpr (!kIsCode<T>)
        for (int64_t j = 0; !is_last && j < kBlock; ++j) next[j] = key(pages, std::min(start + kBlock + j, length - 1));
      multiply_keys(queries.data(), num, keys, is_last ? nullptr : next, scores, count, dim);
      for (int64_t i = 0; i < num; ++i) add_to(totals[i], scores[i], count, weighted.data() + i * v_dim);
      add_values_of(scores, num, keys, weighted.data(), count, v_dim);
    }
    for (int64_t i = 0; i < num; ++i)
      finish<Wide<T>>(totals[i], weighted.data() + i * v_dim, v_dim, sinks ? sinks + first_head + i : nullptr,
                out, (at + i) * v_dim, lse + at + i);
  }

  // Turns the scores of a block into weights, and rescales earlier sums where the maximum has grown.
  void add_to(Total& total, float* scores, int64_t count, float* weighted) const {
    float maximum = scale_scores(scores, count, rule, total.maximum);
    if (maximum > total.maximum) {
      float keep = std::exp(total.maximum - maximum);
      total.sum *= keep;
      for (int64_t d = 0; d < v_dim; ++d) weighted[d] *= keep;
    }
    total = {maximum, total.sum + weigh(scores, count, maximum)};
  }

  // A row is one task. With fewer rows than threads it is several, each with some heads, a whole number of tiles.
  ffi::Error run(ffi::ThreadPool pool) const {
    int64_t tiles = (heads + kRows - 1) / kRows, wanted = (pool.num_threads() + rows - 1) / std::max<int64_t>(rows, 1);
    int64_t parts = std::max<int64_t>(1, std::min(tiles, wanted)), step = (tiles + parts - 1) / parts * kRows;
    parts = (heads + step - 1) / step;
    parallel_for(pool, rows * parts, [&](int64_t task) {
      int64_t first = task % parts * step;
      part(task / parts, first, std::min(step, heads - first));
    });
    return ffi::Error::Success();
  }
};

}  // namespace enginebay
