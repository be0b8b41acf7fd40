// The products of quantized_linear.h: weights of 4 bits without a sign, with zero points, rows of f32.
#define ENGINEBAY_NAME enginebay_quantized_linear_u4
#define ENGINEBAY_U4
#include "quantized_linear.h"
