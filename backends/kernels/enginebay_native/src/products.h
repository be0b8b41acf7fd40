// Tiles of products of rows with weights [out, in]. Each output is one sum over the inputs, with lanes in a fixed order, so
// that a row's result does not depend on the number of rows.
#pragma once

#include "vectors.h"

namespace enginebay {
namespace {

template <int R, int C>
struct Tile {
  Floats sums[R][C] = {};

  void put(float* out, int64_t stride) const {
    Floats flat[(R * C + kLanes - 1) / kLanes * kLanes] = {};
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) flat[r * C + c] = sums[r][c];
    float totals[(R * C + kLanes - 1) / kLanes * kLanes];
    for (int i = 0; i < R * C; i += kLanes) store(totals + i, sum_each(flat + i));
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) out[r * stride + c] = totals[r * C + c];
  }
};

// out[R, C] = x[R, in] w[C, in]^T. Meanwhile kFetch rows of `in` weights at `next` are prefetched.
template <int R, int C, int kFetch, typename W>
void multiply(const float* x, const W* w, float* out, int64_t in, int64_t stride, const W* next) {
  Tile<R, C> tile;
  int64_t k = 0;
  for (; k + kLanes <= in; k += kLanes) {
    Floats rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = in_register(load(x + r * in + k));
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      Floats weights = in_register(load(w + c * in + k));
      if (c < kFetch) fetch(next + c * in + k);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) tile.sums[r][c] = add_product(tile.sums[r][c], rows[r], weights);
    }
  }
  for (int64_t lane = 0; k < in; ++k, ++lane)
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) tile.sums[r][c][lane] += x[r * in + k] * to_float(w[c * in + k]);
  tile.put(out, stride);
}

template <int R, int C, int kFetch>
void multiply(const bf16* x, const bf16* w, float* out, int64_t in, int64_t stride, const bf16* next) {
  Tile<R, C> tile;
  int64_t k = 0;
  for (; k + 2 * kLanes <= in; k += 2 * kLanes) {
#ifdef __AVX512BF16__
    __m512bh rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = (__m512bh)in_register(_mm512_loadu_si512(x + r * in + k));
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      __m512bh weights = (__m512bh)in_register(_mm512_loadu_si512(w + c * in + k));
      if (c < kFetch) fetch(next + c * in + k);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        tile.sums[r][c] = (Floats)_mm512_dpbf16_ps((__m512)tile.sums[r][c], rows[r], weights);
    }
#else
    Pair rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = load_pair(x + r * in + k);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      Pair weights = load_pair(w + c * in + k);
      if (c < kFetch) fetch(next + c * in + k);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        tile.sums[r][c] = add_product(tile.sums[r][c], rows[r].even, weights.even);
        tile.sums[r][c] = add_product(tile.sums[r][c], rows[r].odd, weights.odd);
      }
    }
#endif
  }
  for (int64_t lane = 0; k < in; ++k, lane = (lane + 1) % kLanes)
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) tile.sums[r][c][lane] += to_float(x[r * in + k]) * to_float(w[c * in + k]);
  tile.put(out, stride);
}

#ifdef __AVX512F__
constexpr int kRows = 4, kColumns = 6;
#else
constexpr int kRows = 4, kColumns = 2;
#endif
constexpr int kLoneColumns = 8;  // columns of a tile of one row: enough sums at once to hide the latency of each

// out[R, width] = x[R, in] w[width, in]^T; each tile prefetches kFetch rows of weights that are `ahead` of its own.
template <int R, int C, int kFetch, typename X, typename W>
void columns(const X* x, const W* w, float* out, int64_t in, int64_t width, int64_t stride, int64_t ahead) {
  int64_t c = 0;
  for (; c + C <= width; c += C) multiply<R, C, kFetch>(x, w + c * in, out + c, in, stride, w + c * in + ahead);
  for (; c < width; ++c)
    for (int r = 0; r < R; ++r) multiply<1, 1, 0>(x + r * in, w + c * in, out + r * stride + c, in, stride, w);
}

// The same for the first `rows` of at most R, as a constant.
template <int R, int kFetch, typename X, typename W>
void some_rows(int64_t rows, const X* x, const W* w, float* out, int64_t in, int64_t width, int64_t stride,
               int64_t ahead) {
  if constexpr (R > 1) {
    if (rows < R) return some_rows<R - 1, kFetch>(rows, x, w, out, in, width, stride, ahead);
  }
  columns<R, (R == 1 ? kLoneColumns : kColumns), kFetch>(x, w, out, in, width, stride, ahead);
}

// out[rows, width] = x[rows, in] w[width, in]^T; the rows of out are `stride` apart. The first rows wait for memory, so they
// prefetch the weights that they need next. Later rows prefetch a share of the next block, so that memory is busy all the time.
template <typename X, typename W>
void block(const X* x, const W* w, float* out, int64_t rows, int64_t in, int64_t width, int64_t stride) {
  if (rows == 1) return columns<1, kLoneColumns, kLoneColumns>(x, w, out, in, width, stride, in * kLoneColumns);
  int64_t passes = (rows + kRows - 1) / kRows;
  int64_t share = passes > 1 ? (kColumns + passes - 2) / (passes - 1) : 0;
  some_rows<kRows, kColumns>(rows, x, w, out, in, width, stride, in * kColumns);
  for (int64_t p = 1; p < passes; ++p) {
    int64_t r = p * kRows, first = (p - 1) * share, ahead = in * (width + first);
    const X* from = x + r * in;
    float* to = out + r * stride;
    bool is_whole = rows - r >= kRows;  // the last rows have fewer loops of their own, which saves time of the compiler
    if (first >= kColumns || (share > 2 && p > 1) || (share <= 2 && !is_whole)) {
      some_rows<kRows, 0>(rows - r, from, w, to, in, width, stride, 0);
    } else if (share == 1) {
      columns<kRows, kColumns, 1>(from, w, to, in, width, stride, ahead);
    } else if (share == 2) {
      columns<kRows, kColumns, 2>(from, w, to, in, width, stride, ahead);
    } else {
      some_rows<kRows, kColumns>(rows - r, from, w, to, in, width, stride, in * width);
    }
  }
}

// How outputs are divided: the weights of a block stay in the second-level cache while all rows are multiplied, and each
// thread has several tasks. Neither changes a sum.
struct Sharing {
  int64_t block_bytes, tasks_per_thread;

  // (outputs of a task, outputs of a block) of `total` outputs of all tasks, of which a weight has `outputs`.
  template <typename W>
  std::pair<int64_t, int64_t> sizes(int64_t total, int64_t outputs, int64_t in, int64_t rows, int64_t threads) const {
    int64_t unit = rows == 1 ? kLoneColumns : kColumns;
    int64_t share = std::min(outputs, total / std::max<int64_t>(1, threads * tasks_per_thread));
    int64_t widest = block_bytes / (in * int64_t(sizeof(W))) / unit;
    int64_t width = std::max<int64_t>(1, std::min(widest, (share + unit - 1) / unit)) * unit;
    return {std::max<int64_t>(1, share / width) * width, width};
  }
};

}  // namespace
}  // namespace enginebay
