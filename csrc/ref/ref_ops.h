// The definition of every op, in float64. ops.h has the formulas.
//
// An op is a number of items that do not depend on each other (rows, heads, output columns), so that a device can divide them among
// threads: the ref device runs them in turn, the cpu device does so in parallel when it must be exact.
#pragma once

#include "backend/host.h"

namespace delta {

// <w, x> over n values. The order of the sum may depend on n alone.
using WideDot = double (*)(const double* w, const double* x, int64_t n);
double ref_dot(const double* w, const double* x, int64_t n);

struct RefOp {
    int64_t (*n_items)(const WideCall& call);
    // Items begin .. end - 1. `scratch`: ref_scratch_bytes(), of one thread.
    void (*run)(const WideCall& call, WideDot dot, int64_t begin, int64_t end, void* scratch);
};

const RefOp& ref_op(OpKind kind);
size_t ref_scratch_bytes(const Op& op);

}  // namespace delta
