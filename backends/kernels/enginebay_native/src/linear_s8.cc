// The products of linear.h for weights of int8, rows of f32.
#define ENGINEBAY_NAME enginebay_linear_s8
#include "vectors.h"

namespace enginebay {
namespace {
using Rows = float;
using Weights = int8_t;
constexpr auto kRowsType = ffi::F32, kWeightsType = ffi::S8;
}  // namespace
}  // namespace enginebay

#include "linear.h"
