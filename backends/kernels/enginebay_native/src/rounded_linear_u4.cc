// The products of quantized_linear.h: weights of 4 bits without a sign, with zero points, rows that are rounded to int8.
#define ENGINEBAY_NAME enginebay_rounded_linear_u4
#define ENGINEBAY_U4
#define ENGINEBAY_ROUNDED
#include "quantized_linear.h"
