// The attention of attention_kernel.h over keys and values of f32.
#define ENGINEBAY_NAME enginebay_attention_f32
#include "codes.h"

namespace enginebay {
namespace {
using Stored = float;
}
}  // namespace enginebay

#include "attention_kernel.h"
