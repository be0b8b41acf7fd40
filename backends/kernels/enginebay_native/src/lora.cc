// Products of low rank that are added to the results of a linear layer: each token has the adapter of a slot, or none. Tokens
// of the same adapter share its reads; adapters without tokens are not read, and tokens without an adapter are not touched.

#include <cmath>

#include "products.h"

namespace enginebay {
namespace {

// The same bits as a lane of add_product.
inline float add_product_of_one(float sum, float a, float b) {
#if defined(__FMA__) || defined(__aarch64__)
  return std::fma(a, b, sum);
#else
  return sum + a * b;
#endif
}

// Tokens of one adapter, at most kBlockTokens.
struct TokenBlock {
  int64_t slot;
  const int64_t* tokens;
  int64_t count;
};

constexpr int64_t kBlockTokens = 64;
constexpr int kTokens = 4;    // tokens of a tile
constexpr int kDown = 4;      // rows of a in a tile of several tokens
constexpr int kLoneDown = 8;  // rows of a in a tile of one token
constexpr int kVectors = 4;   // vectors of outputs in a tile
constexpr int64_t kWidth = kVectors * kLanes;
constexpr int64_t kAhead = 4;  // tiles between the outputs that are computed and those that are prefetched

// sums[R, C] = x[R] a[C, in]^T. Each sum has its lanes in a fixed order, so that it does not depend on other tokens.
// Meanwhile the rows of a at `next` are prefetched.
template <int R, int C, bool kFetches, typename W>
void shrink_tile(const float* const* x, const W* a, float* const* out, int64_t in, const W* next) {
  Tile<R, C> tile;
  constexpr int64_t kLine = 64 / sizeof(W);
  int64_t k = 0;
  for (; k + kLanes <= in; k += kLanes) {
    Floats rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = in_register(load(x[r] + k));
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      Floats weights = in_register(load(a + c * in + k));
      if (kFetches && k % kLine == 0) fetch(next + c * in + k);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) tile.sums[r][c] = add_product(tile.sums[r][c], rows[r], weights);
    }
  }
  for (int64_t lane = 0; k < in; ++k, ++lane)
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c)
        tile.sums[r][c][lane] = add_product_of_one(tile.sums[r][c][lane], x[r][k], to_float(a[c * in + k]));
  float sums[R * C];
  tile.put(sums, C);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) out[r][c] = sums[r * C + c];
}

// sums[R, width] = values[R, rank] b[rank, width], of at most kWidth outputs. Rows of b are `stride` apart.
template <int R, typename W>
void expand_tile(const float* const* values, const W* b, int64_t rank, int64_t stride, float (*sums)[kWidth], int64_t width) {
  constexpr int64_t kLine = 64 / sizeof(W);
  if (width == kWidth) {
    Floats tile[R][kVectors] = {};
    for (int64_t k = 0; k < rank; ++k) {
      const W* row = b + k * stride;
      Floats weights[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) weights[v] = in_register(load(row + v * kLanes));
#pragma GCC unroll 8
      for (int64_t i = 0; i < kWidth; i += kLine) fetch(row + kAhead * kWidth + i);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        Floats value = splat(values[r][k]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) tile[r][v] = add_product(tile[r][v], value, weights[v]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) store(sums[r] + v * kLanes, tile[r][v]);
    return;
  }
  for (int64_t c = 0; c < width; ++c)
    for (int r = 0; r < R; ++r) {
      float sum = 0;
      for (int64_t k = 0; k < rank; ++k) sum = add_product_of_one(sum, values[r][k], to_float(b[k * stride + c]));
      sums[r][c] = sum;
    }
}

inline void put_as(float* p, float x) { *p = x; }
inline void put_as(bf16* p, float x) { put(p, x); }
inline void put_as(f16* p, float x) { *p = f16(x); }

// y[first..first + width] += sums. Not a template of the weights' dtype, for which all loops would be compiled anew.
using Add = void (*)(void* y, int64_t first, const float* sums, int64_t width);

template <typename Y>
void add_to(void* y, int64_t first, const float* sums, int64_t width) {
  Y* to = static_cast<Y*>(y) + first;
  for (int64_t c = 0; c < width; ++c) put_as(to + c, to_float(to[c]) + sums[c]);
}

// f(constant R) with R = min(tokens, kTokens).
template <int R = kTokens, typename F>
void with_tokens(int64_t tokens, const F& f) {
  if constexpr (R > 1) {
    if (tokens < R) return with_tokens<R - 1>(tokens, f);
  }
  f(std::integral_constant<int, R>());
}

// The tokens of x in f32: the loops are compiled for one dtype, since all values of the others are exact in f32. `dtype` is the
// one that x has.
struct Rows {
  const float* data;
  int64_t in;
  ffi::DataType dtype;

  float rounded(float v) const {
    if (dtype == ffi::BF16) return to_float(to_bf16(v));
    return dtype == ffi::F16 ? float(f16(v)) : v;
  }
};

template <typename X>
const float* widen(ffi::ThreadPool& pool, const X* x, int64_t count, int64_t in, std::vector<float>& wide) {
  wide.resize(count * in);
  auto widen_row = [&](int64_t t) {
    int64_t k = 0;
    for (; k + kLanes <= in; k += kLanes) store(wide.data() + t * in + k, load(x + t * in + k));
    for (; k < in; ++k) wide[t * in + k] = to_float(x[t * in + k]);
  };
  if (count * in < 64 << 10) {
    for (int64_t t = 0; t < count; ++t) widen_row(t);
  } else {
    parallel_for(pool, count, widen_row);
  }
  return wide.data();
}

inline const float* widen(ffi::ThreadPool&, const float* x, int64_t, int64_t, std::vector<float>&) { return x; }

// values[token, first..end] of a block's tokens: x times rows first..end of its a, rounded to x's dtype.
template <typename W>
void shrink(const TokenBlock& block, const Rows& x, const W* a, float* values, int64_t down, int64_t first, int64_t end) {
  int64_t in = x.in;
  for (int64_t c = first; c < end;) {
    const W* from = a + (block.slot * down + c) * in;
    bool is_lone = block.count == 1 && end - c >= kLoneDown;
    int64_t width = is_lone ? kLoneDown : end - c >= kDown ? kDown : 1;
    for (int64_t t = 0; t < block.count; t += kTokens) {
      const float* rows[kTokens];
      float* out[kTokens];
      int64_t count = std::min<int64_t>(kTokens, block.count - t);
      for (int64_t r = 0; r < count; ++r) {
        rows[r] = x.data + block.tokens[t + r] * in;
        out[r] = values + block.tokens[t + r] * down + c;
      }
      if (is_lone) {
        shrink_tile<1, kLoneDown, true>(rows, from, out, in, from + width * in);
      } else {
        with_tokens(count, [&](auto tokens) {
          constexpr int R = decltype(tokens)::value;
          if (width == 1)
            shrink_tile<R, 1, false>(rows, from, out, in, from);
          else if (t == 0)
            shrink_tile<R, kDown, true>(rows, from, out, in, from + width * in);
          else
            shrink_tile<R, kDown, false>(rows, from, out, in, from);
        });
      }
      for (int64_t r = 0; r < count; ++r)
        for (int64_t i = 0; i < width; ++i) out[r][i] = x.rounded(out[r][i]);
    }
    c += width;
  }
}

// The outputs of a part are those of every run of `period` outputs from the end of the part before to its own end.
struct Parts {
  int64_t period;
  ffi::Span<const int64_t> ends;
};

// y[token, first..end] of a block's tokens += values times b.
template <typename W>
void expand(const TokenBlock& block, const float* values, const W* b, void* y, Add add, int64_t rank, int64_t outputs,
            const Parts& parts, int64_t first, int64_t end) {
  int64_t num_parts = parts.ends.size(), down = rank * num_parts;
  int64_t start = first / parts.period * parts.period, part = 0;
  while (start + parts.ends[part] <= first) ++part;
  const W* from = b + block.slot * rank * outputs;
  for (int64_t k = 0; k < rank; ++k)
    for (int64_t c = first; c < std::min(end, first + kAhead * kWidth); c += 64 / int64_t(sizeof(W)))
      fetch(from + k * outputs + c);
  for (int64_t c = first; c < end;) {
    int64_t last = std::min(end, start + parts.ends[part]);
    for (int64_t low = c; low < last; low += kWidth) {
      int64_t width = std::min(kWidth, last - low);
      for (int64_t t = 0; t < block.count; t += kTokens) {
        const float* rows[kTokens];
        float sums[kTokens][kWidth];
        int64_t count = std::min<int64_t>(kTokens, block.count - t);
        for (int64_t r = 0; r < count; ++r) rows[r] = values + block.tokens[t + r] * down + part * rank;
        with_tokens(count, [&](auto tokens) {
          expand_tile<decltype(tokens)::value>(rows, from + low, rank, outputs, sums, width);
        });
        for (int64_t r = 0; r < count; ++r) add(y, block.tokens[t + r] * outputs + low, sums[r], width);
      }
    }
    c = last;
    do {
      if (++part == num_parts) {
        part = 0;
        start += parts.period;
      }
    } while (c < end && start + parts.ends[part] <= c);  // parts without outputs
  }
}

// The tokens of each adapter, in blocks.
struct Tokens {
  std::vector<int64_t> sorted;
  std::vector<TokenBlock> blocks;

  Tokens(const int32_t* places, int64_t count, int64_t slots) {
    std::vector<int64_t> firsts(slots + 2, 0);
    auto slot_of = [=](int64_t t) { return places[t] > 0 && places[t] <= slots ? places[t] : 0; };
    for (int64_t t = 0; t < count; ++t) ++firsts[slot_of(t) + 1];
    for (int64_t s = 0; s <= slots; ++s) firsts[s + 1] += firsts[s];
    sorted.resize(count);
    std::vector<int64_t> next(firsts);
    for (int64_t t = 0; t < count; ++t) sorted[next[slot_of(t)]++] = t;
    for (int64_t s = 1; s <= slots; ++s)
      for (int64_t i = firsts[s]; i < firsts[s + 1]; i += kBlockTokens)
        blocks.push_back({s - 1, sorted.data() + i, std::min(kBlockTokens, firsts[s + 1] - i)});
  }
};

// Size of a task: a multiple of `unit`, at most `most`, so that each thread has several tasks.
int64_t task_size(int64_t total, int64_t blocks, int64_t threads, int64_t unit, int64_t most) {
  int64_t share = total * blocks / std::max<int64_t>(1, 4 * threads);
  return std::clamp((share + unit - 1) / unit * unit, unit, most);
}

// x [T, in], a [slots, parts * rank, in], b [slots, rank, outputs], places [T]; y [T, outputs] is changed in place.
template <typename W>
void run(ffi::ThreadPool& pool, const Rows& x, const W* a, const W* b, void* y, Add add, const Tokens& tokens, int64_t count,
         int64_t rank, int64_t outputs, const Parts& parts) {
  int64_t down = rank * int64_t(parts.ends.size()), blocks = tokens.blocks.size(), threads = pool.num_threads();
  std::vector<float> values(count * down);
  int64_t size = task_size(down, blocks, threads, kLoneDown, 4 * kLoneDown), each = (down + size - 1) / size;
  parallel_for(pool, blocks * each, [&](int64_t task) {
    int64_t first = task % each * size;
    shrink(tokens.blocks[task / each], x, a, values.data(), down, first, std::min(down, first + size));
  });
  size = task_size(outputs, blocks, threads, kWidth, 16 * kWidth), each = (outputs + size - 1) / size;
  parallel_for(pool, blocks * each, [&](int64_t task) {
    int64_t first = task % each * size;
    expand(tokens.blocks[task / each], values.data(), b, y, add, rank, outputs, parts, first, std::min(outputs, first + size));
  });
}

// f(a null pointer to the type of a buffer's numbers).
template <typename F>
ffi::Error with_dtype(ffi::DataType dtype, const F& f) {
  switch (dtype) {
    case ffi::F32: return f(static_cast<const float*>(nullptr));
    case ffi::BF16: return f(static_cast<const bf16*>(nullptr));
    case ffi::F16: return f(static_cast<const f16*>(nullptr));
    default: return ffi::Error::InvalidArgument("lora wants arrays of f32, bf16 or f16");
  }
}

// y [T, outputs], x [T, in], a [slots, parts * rank, in], b [slots, rank, outputs], places [T] -> y with the products added,
// in place when the result shares the memory of y. ends: where each part ends in every `period` outputs.
ffi::Error lora(ffi::ThreadPool pool, ffi::AnyBuffer y, ffi::AnyBuffer x, ffi::AnyBuffer a, ffi::AnyBuffer b,
                ffi::Buffer<ffi::S32> places, ffi::Result<ffi::AnyBuffer> out, int64_t period,
                ffi::Span<const int64_t> ends) {
  auto of_y = y.dimensions(), of_x = x.dimensions(), down = a.dimensions(), up = b.dimensions();
  if (of_y.size() != 2 || of_x.size() != 2 || down.size() != 3 || up.size() != 3 || of_y[0] != of_x[0] ||
      int64_t(places.element_count()) != of_x[0] || down[0] != up[0] || down[2] != of_x[1] || up[2] != of_y[1] ||
      ends.size() == 0 || down[1] != up[1] * int64_t(ends.size()) || a.element_type() != b.element_type() ||
      out->element_type() != y.element_type() || (period < 1 && of_y[1] > 0) ||
      !std::is_sorted(ends.begin(), ends.end()) || ends[ends.size() - 1] != period)
    return ffi::Error::InvalidArgument(
        "lora wants y [rows, out], x [rows, in], a [slots, parts * rank, in], b [slots, rank, out] and a place of each row");
  int64_t count = of_x[0], in = of_x[1], rank = up[1], outputs = of_y[1];
  if (out->untyped_data() != y.untyped_data()) std::memcpy(out->untyped_data(), y.untyped_data(), y.size_bytes());
  const int32_t* of_token = places.typed_data();
  if (in == 0 || outputs == 0 || rank == 0 || std::all_of(of_token, of_token + count, [](int32_t p) { return p <= 0; }))
    return ffi::Error::Success();
  Tokens tokens(of_token, count, up[0]);
  Parts parts{period, ends};
  std::vector<float> wide;
  Rows rows{nullptr, in, x.element_type()};
  auto error = with_dtype(x.element_type(), [&](auto* type) {
    rows.data = widen(pool, static_cast<decltype(type)>(x.untyped_data()), count, in, wide);
    return ffi::Error::Success();
  });
  if (error.failure()) return error;
  Add add = nullptr;
  error = with_dtype(y.element_type(), [&](auto* type) {
    add = add_to<std::remove_const_t<std::remove_pointer_t<decltype(type)>>>;
    return ffi::Error::Success();
  });
  if (error.failure()) return error;
  return with_dtype(a.element_type(), [&](auto* type) {
    using W = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
    run(pool, rows, static_cast<const W*>(a.untyped_data()), static_cast<const W*>(b.untyped_data()), out->untyped_data(),
        add, tokens, count, rank, outputs, parts);
    return ffi::Error::Success();
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    enginebay_lora, lora,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::AnyBuffer>().Attr<int64_t>("period")
        .Attr<ffi::Span<const int64_t>>("ends"));

}  // namespace enginebay
