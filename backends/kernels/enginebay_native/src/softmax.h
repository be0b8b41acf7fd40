// The parts that all forms of attention share: scaling of scores, the order of queries and results in 16 bits, softmax, and
// the output of a row.
#pragma once

#include <cmath>

#include "vectors.h"

namespace enginebay {

constexpr float kLowest = -5e29f;  // log-sum-exp of a row without keys

struct Rule {
  float scale, softcap;  // softcap 0: none
  int64_t window;        // 0: none

  // The first key that a row of this length sees.
  int64_t first(int64_t length) const { return window > 0 ? std::max<int64_t>(0, length - window) : 0; }
};

// Queries or results, f32 or bf16. The loops over keys are compiled for neither, because only the first and the last step of a
// row see them.
struct Values {
  void* data;
  bool is_bf16;

  // to[d] = value first + d.
  void read(int64_t first, int64_t count, float* to) const {
    if (is_bf16)
      for (int64_t d = 0; d < count; ++d) to[d] = to_float(static_cast<const bf16*>(data)[first + d]);
    else
      std::memcpy(to, static_cast<const float*>(data) + first, count * sizeof(float));
  }

  // Value first + d = from[d].
  void write(int64_t first, int64_t count, const float* from) const {
    if (is_bf16)
      for (int64_t d = 0; d < count; ++d) put(static_cast<bf16*>(data) + first + d, from[d]);
    else
      std::memcpy(static_cast<float*>(data) + first, from, count * sizeof(float));
  }
};

// The query in the order of the products: unchanged for f32; for bf16, the even and then the odd values of each two vectors.
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

struct Total {
  float maximum, sum;
};

inline Floats greater(Floats a, Floats b) { return a > b ? a : b; }

// Turns products into scores and returns the largest of them and `maximum`. The array has whole vectors; the elements after
// the last score get weight 0.
inline float scale_scores(float* scores, int64_t count, const Rule& rule, float maximum) {
  for (int64_t i = count; i % kLanes; ++i) scores[i] = 0.0f;
  Floats highest = splat(maximum);
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats some = load(scores + i) * splat(rule.scale);
    store(scores + i, some);
    if (rule.softcap > 0)
      for (int lane = 0; lane < kLanes; ++lane) scores[i + lane] = rule.softcap * std::tanh(some[lane] / rule.softcap);
    for (int64_t past = count; past < i + kLanes; ++past) scores[past] = 2 * kLowest;
    highest = greater(load(scores + i), highest);
  }
  for (int lane = 0; lane < kLanes; ++lane) maximum = highest[lane] > maximum ? highest[lane] : maximum;
  return maximum;
}

// Turns scores into weights e^(score - maximum) and returns their sum.
inline float weigh(float* scores, int64_t count, float maximum) {
  Floats sums = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats weights = exp_of(load(scores + i) - splat(maximum));
    store(scores + i, weights);
    sums += weights;
  }
  return sum(sums);
}

// Writes the output, values `first` to first + dim, and the log-sum-exp of one query from its sum of weighted values, which has
// the order of type T. `sink` is null, or a score without a value.
template <typename T>
void finish(Total total, float* weighted, int64_t dim, const float* sink, const Values& out, int64_t first, float* lse) {
  float keep = 1.0f;
  if (sink != nullptr) {
    float higher = std::max(total.maximum, *sink);
    keep = std::exp(total.maximum - higher);
    total = {higher, total.sum * keep + std::exp(*sink - higher)};
  }
  float sum = total.sum == 0 ? 1.0f : total.sum;
  back(weighted, dim, static_cast<const T*>(nullptr));
  for (int64_t d = 0; d < dim; ++d) weighted[d] = weighted[d] * keep / sum;
  out.write(first, dim, weighted);
  *lse = total.maximum + std::log(sum);
}

}  // namespace enginebay
