// The products of quantized_linear.h: weights of 8 bits and zero points, rows that are rounded to int8.
#define ENGINEBAY_NAME enginebay_rounded_linear_zeros_s8
#define ENGINEBAY_ZEROS_S8
#define ENGINEBAY_ROUNDED
#include "quantized_linear.h"
