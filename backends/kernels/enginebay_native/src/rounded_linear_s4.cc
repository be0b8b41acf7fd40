// The products of quantized_linear.h: weights of 4 bits with a sign, rows that are rounded to int8.
#define ENGINEBAY_NAME enginebay_rounded_linear_s4
#define ENGINEBAY_S4
#define ENGINEBAY_ROUNDED
#include "quantized_linear.h"
