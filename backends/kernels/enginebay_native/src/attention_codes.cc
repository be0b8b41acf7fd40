// The attention of attention_kernel.h over keys and values of the codes of a quantised cache.
#define ENGINEBAY_NAME enginebay_attention_codes
#include "codes.h"

namespace enginebay {
namespace {
using Stored = Code;
}
}  // namespace enginebay

#include "attention_kernel.h"
