// The products of quantized_linear.h: weights of 4 bits without a sign, with zero points, rows that are rounded to int8 in
// groups of 32 inputs.
#define ENGINEBAY_NAME enginebay_group_rounded_linear_u4
#define ENGINEBAY_U4
#define ENGINEBAY_ROUNDED_GROUPS
#include "quantized_linear.h"
