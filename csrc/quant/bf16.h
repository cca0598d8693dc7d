// BF16: the upper half of a float32. Rows may start at any address.
#pragma once

#include "quant/block.h"

namespace delta {

static inline void to_float_bf16(const void* src, float* dst, int64_t n) {
    const auto* bytes = static_cast<const uint8_t*>(src);
    for (int64_t i = 0; i < n; ++i) {
        dst[i] = bf16_to_f32(load_u16(bytes + 2 * i));
    }
}

static inline void from_float_bf16(const float* src, void* dst, int64_t n) {
    auto* bytes = static_cast<uint8_t*>(dst);
    for (int64_t i = 0; i < n; ++i) {
        store_u16(bytes + 2 * i, f32_to_bf16(src[i]));
    }
}

}  // namespace delta
