// Whole matrices of encoded rows, on several threads: what conversion calls through delta_quantize_rows.
#pragma once

#include <cstdint>

namespace delta {

// Rows [n_rows, n_cols] of float32 to `type`. Throws Error: UNSUPPORTED (type, no quantizer), ARG (shape, null), NUMERIC naming row
// and column where a value does not survive: NaN or infinity in a block type, a finite value beyond the type's largest.
void quantize_rows(uint32_t type, const float* src, void* dst, int64_t n_rows, int64_t n_cols, int32_t n_threads);
// Rows of `type` to float32 [n_rows, n_cols]. Throws Error (UNSUPPORTED, ARG).
void dequantize_rows(uint32_t type, const void* src, float* dst, int64_t n_rows, int64_t n_cols, int32_t n_threads);

}  // namespace delta
