// The products of linear.h: weights and rows of bf16.
#define ENGINEBAY_NAME enginebay_linear_bf16
#define ENGINEBAY_ROWS bf16
#define ENGINEBAY_WEIGHTS bf16
#include "linear.h"
