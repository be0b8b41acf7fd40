// The products of quantized_linear.h: weights of 8 bits, rows that are rounded to int8.
#define ENGINEBAY_NAME enginebay_rounded_linear_s8
#define ENGINEBAY_S8
#define ENGINEBAY_ROUNDED
#include "quantized_linear.h"
