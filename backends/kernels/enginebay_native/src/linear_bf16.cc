// The products of linear.h for weights and rows of bf16.
#define ENGINEBAY_NAME enginebay_linear_bf16
#include "vectors.h"

namespace enginebay {
namespace {
using Rows = bf16;
using Weights = bf16;
constexpr auto kRowsType = ffi::BF16, kWeightsType = ffi::BF16;
}  // namespace
}  // namespace enginebay

#include "linear.h"
