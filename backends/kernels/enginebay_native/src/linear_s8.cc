// The products of linear.h: weights of int8, rows of f32.
#define ENGINEBAY_NAME enginebay_linear_s8
#define ENGINEBAY_ROWS float
#define ENGINEBAY_WEIGHTS int8_t
#include "linear.h"
