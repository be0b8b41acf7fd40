// The attention of attention_kernel.h: keys and values of f32.
#define ENGINEBAY_NAME enginebay_attention_f32
#define ENGINEBAY_STORED float
#include "attention_kernel.h"
