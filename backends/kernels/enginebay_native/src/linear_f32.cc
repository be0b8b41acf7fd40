// The products of linear.h for weights and rows of f32.
#define ENGINEBAY_NAME enginebay_linear_f32
#include "vectors.h"

namespace enginebay {
namespace {
using Rows = float;
using Weights = float;
constexpr auto kRowsType = ffi::F32, kWeightsType = ffi::F32;
}  // namespace
}  // namespace enginebay

#include "linear.h"
