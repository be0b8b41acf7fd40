// The products of quantized_linear.h: weights of 8 bits and zero points, rows of f32.
#define ENGINEBAY_NAME enginebay_quantized_linear_zeros_s8
#define ENGINEBAY_ZEROS_S8
#include "quantized_linear.h"
