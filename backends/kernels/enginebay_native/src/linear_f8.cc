// The products of linear.h for weights of float8_e4m3fn, rows of f32.
#define ENGINEBAY_NAME enginebay_linear_f8
#include "vectors.h"

namespace enginebay {
namespace {
using Rows = float;
using Weights = fp8;
constexpr auto kRowsType = ffi::F32, kWeightsType = ffi::F8E4M3FN;
}  // namespace
}  // namespace enginebay

#include "linear.h"
