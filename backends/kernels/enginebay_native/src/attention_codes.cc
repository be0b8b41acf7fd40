// The attention of attention_kernel.h: keys and values of the codes of a quantised cache.
#define ENGINEBAY_NAME enginebay_attention_codes
#define ENGINEBAY_STORED Code
#include "attention_kernel.h"
