// The products of quantized_linear.h: weights of 8 bits and zero points, rows that are rounded to int8 in
// groups of 32 inputs.
#define ENGINEBAY_NAME enginebay_group_rounded_linear_zeros_s8
#define ENGINEBAY_ZEROS_S8
#define ENGINEBAY_ROUNDED_GROUPS
#include "quantized_linear.h"
