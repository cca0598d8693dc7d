// What ops share that treat each row by itself.
#pragma once

#include "cpu/cpu_backend.h"

namespace delta {

// A weight of type F32 with a single row, or all rows of one.
inline const float* vector(const Weight& w) { return reinterpret_cast<const float*>(w.data); }

// f(r) for every row; `cost` of one, in multiplications.
template <class F>
void each_row(CpuBackend& self, int64_t n_rows, int64_t cost, const F& f) {
    self.parallel(n_rows, cost, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t r = begin; r < end; ++r) {
            f(r);
        }
    });
}

}  // namespace delta
