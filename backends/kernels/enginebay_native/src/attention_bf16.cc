// The attention of attention_kernel.h over keys and values of bf16.
#define ENGINEBAY_NAME enginebay_attention_bf16
#include "codes.h"

namespace enginebay {
namespace {
using Stored = bf16;
}
}  // namespace enginebay

#include "attention_kernel.h"
