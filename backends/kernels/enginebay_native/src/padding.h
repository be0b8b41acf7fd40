// Rows of zeros, which the padding of a step is: their products are zeros and take no time.
#pragma once

#include <type_traits>

#include "vectors.h"

namespace enginebay {
namespace {

// The number of rows of x [rows, in], f32 or bf16, before the zeros at its end.
template <typename X>
int64_t rows_before_zeros(const X* x, int64_t rows, int64_t in) {
  using Bits = std::conditional_t<sizeof(X) == 4, uint32_t, uint16_t>;
  constexpr int64_t kStep = 64;  // numbers between two tests: a row that is none of zeros ends the search early
  auto is_zero = [in](const X* row) {
    for (int64_t k = 0; k < in;) {
      Bits found = 0;
      for (int64_t end = std::min(in, k + kStep); k < end; ++k) {
        Bits bits;
        std::memcpy(&bits, row + k, sizeof(bits));
        found |= Bits(bits << 1);  // without the sign
      }
      if (found) return false;
    }
    return true;
  };
  while (rows > 0 && is_zero(x + (rows - 1) * in)) --rows;
  return rows;
}

// The same number. The other rows of out [rows, outputs] become zeros.
template <typename X>
int64_t without_padding(const X* x, int64_t rows, int64_t in, float* out, int64_t outputs) {
  int64_t used = rows_before_zeros(x, rows, in);
  std::fill_n(out + used * outputs, (rows - used) * outputs, 0.0f);
  return used;
}

}  // namespace
}  // namespace enginebay
