// The products of linear.h: weights and rows of f32.
#define ENGINEBAY_NAME enginebay_linear_f32
#define ENGINEBAY_ROWS float
#define ENGINEBAY_WEIGHTS float
#include "linear.h"
