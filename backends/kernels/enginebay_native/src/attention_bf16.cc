// The attention of attention_kernel.h: keys and values of bf16.
#define ENGINEBAY_NAME enginebay_attention_bf16
#define ENGINEBAY_STORED bf16
#include "attention_kernel.h"
