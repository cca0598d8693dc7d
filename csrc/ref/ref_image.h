// The definitions of the ops of a vision tower (items: see ref_ops.h), and what the fast versions share with them.
#pragma once

#include "ref/ref_ops.h"

namespace delta {

// Place `i` of `length` between two of `size` samples, both lines divided evenly: value = (1 - high_share) * low + high_share * high.
struct GridSample {
    int32_t low;
    int32_t high;
    double high_share;
};
GridSample grid_sample(int64_t i, int32_t length, int32_t size);

// x * Phi(x), Phi the distribution function of the standard normal.
double gelu_erf(double x);

void pixels(const WideCall& call, WideDot dot, int64_t begin, int64_t end, void* scratch);
void grid_position(const WideCall& call, WideDot dot, int64_t begin, int64_t end, void* scratch);
void grid_rope(const WideCall& call, WideDot dot, int64_t begin, int64_t end, void* scratch);
void image_attention(const WideCall& call, WideDot dot, int64_t begin, int64_t end, void* scratch);
void gelu(const WideCall& call, WideDot dot, int64_t begin, int64_t end, void* scratch);
void merge_squares(const WideCall& call, WideDot dot, int64_t begin, int64_t end, void* scratch);
int64_t each_head_of_each_patch(const WideCall& call);

}  // namespace delta
