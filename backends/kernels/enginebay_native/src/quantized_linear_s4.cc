// The products of quantized_linear.h: weights of 4 bits with a sign, rows of f32.
#define ENGINEBAY_NAME enginebay_quantized_linear_s4
#define ENGINEBAY_S4
#include "quantized_linear.h"
