// Whole matrices of encoded rows, on several threads: what conversion calls through delta_quantize_rows.
#pragma once

#include <cstdint>

namespace delta {

struct RowsShape {
    int64_t n_rows, n_cols;
    int32_t n_threads;  // 0: physical cores
};

// Rows [n_rows, n_cols] of `src_type` (F32, F16 or BF16) to `type`. `importance` [n_cols] weighs the squared error of each column,
// only ratios count; null: all alike. Throws Error: UNSUPPORTED (type, no quantizer), ARG (shape, null, an importance that is negative
// or no number), NUMERIC naming row, column and value where a value does not survive: NaN, infinity, or beyond the type's largest.
// In the last case `bad_value`, if not null, gets row * n_cols + column, and what `dst` holds is not defined.
void quantize_rows(uint32_t type, void* dst, uint32_t src_type, const void* src, const float* importance, RowsShape shape,
                   int64_t* bad_value);
// Rows of `type` to float32 [n_rows, n_cols]. Throws Error (UNSUPPORTED, ARG).
void dequantize_rows(uint32_t type, const void* src, float* dst, RowsShape shape);
// MXFP4 codes [n_rows, n_cols / 2] and scales [n_rows, n_cols / 32] as compressed-tensors packs them, to GGUF blocks. Throws Error: ARG,
// NUMERIC naming row and block where a scale is 255, which is no number; `bad_block` as above gets row * (n_cols / 32) + block.
void repack_mxfp4(const uint8_t* packed, const uint8_t* scales, void* dst, RowsShape shape, int64_t* bad_block);

}  // namespace delta
