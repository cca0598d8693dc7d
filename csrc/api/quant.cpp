// The C interface to encoded rows: check arguments, call. These functions keep no state and may run on any thread at any time.
#include <algorithm>

#include "api/handles.h"
#include "quant/quant.h"
#include "quant/rows.h"

namespace delta {
namespace {

RowsShape rows_shape(int64_t n_rows, int64_t n_cols, uint32_t n_threads) {
    return {n_rows, n_cols, static_cast<int32_t>(std::min<uint32_t>(n_threads, INT32_MAX))};
}

}  // namespace
}  // namespace delta

using namespace delta;

size_t delta_row_bytes(uint32_t type, int64_t n_cols) {
    const TypeInfo* info = find_type(type);
    return info == nullptr || n_cols < 0 || n_cols % info->block != 0 ? 0 : row_bytes(*info, n_cols);
}

delta_status delta_quantize_rows(uint32_t type, void* dst, uint32_t src_type, const void* src, int64_t n_rows, int64_t n_cols,
                                 const float* importance, uint32_t n_threads, int64_t* bad_value) {
    return guard([&] { quantize_rows(type, dst, src_type, src, importance, rows_shape(n_rows, n_cols, n_threads), bad_value); });
}

delta_status delta_dequantize_rows(uint32_t type, const void* src, float* dst, int64_t n_rows, int64_t n_cols, uint32_t n_threads) {
    return guard([&] { dequantize_rows(type, src, dst, rows_shape(n_rows, n_cols, n_threads)); });
}

delta_status delta_repack_mxfp4(const uint8_t* packed, const uint8_t* scales, void* dst, int64_t n_rows, int64_t n_cols,
                                uint32_t n_threads, int64_t* bad_block) {
    return guard([&] { repack_mxfp4(packed, scales, dst, rows_shape(n_rows, n_cols, n_threads), bad_block); });
}
