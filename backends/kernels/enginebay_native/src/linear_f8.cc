// The products of linear.h: weights of float8_e4m3fn, rows of f32.
#define ENGINEBAY_NAME enginebay_linear_f8
#define ENGINEBAY_ROWS float
#define ENGINEBAY_WEIGHTS fp8
#include "linear.h"
