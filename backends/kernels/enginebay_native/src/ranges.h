// Rows that are sorted by the weight that they are multiplied with.
#pragma once

#include "vectors.h"

namespace enginebay {
namespace {

// The rows of each of `count` weights. Without sizes, one weight has all rows.
struct Ranges {
  Ranges(const ffi::Buffer<ffi::S32>& sizes, int64_t rows)
      : sizes(sizes.element_count() ? sizes.typed_data() : nullptr), count(std::max<int64_t>(1, sizes.element_count())), rows(rows) {}

  // Calls f(weight, first row, rows) for each weight that has rows. Rows of out [rows, outputs] that no weight has become 0.
  template <typename F>
  void each(float* out, int64_t outputs, const F& f) const {
    int64_t first = 0;
    for (int64_t i = 0; i < count; ++i) {
      int64_t size = sizes ? std::min<int64_t>(std::max(sizes[i], 0), rows - first) : rows;
      if (size > 0) f(i, first, size);
      first += size;
    }
    std::fill_n(out + first * outputs, (rows - first) * outputs, 0.0f);
  }

  const int32_t* sizes;
  int64_t count, rows;
};

}  // namespace
}  // namespace enginebay
