// Q8_0: 32 values share one half-precision scale d; value j is d * qs[j].
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/half.h"

namespace delta {

// Bytes only: a block may start at any address.
struct BlockQ8_0 {
    uint8_t d[2];   // f16, little-endian
    int8_t qs[32];
};
static_assert(sizeof(BlockQ8_0) == 34 && alignof(BlockQ8_0) == 1);

static inline void to_float_q8_0(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockQ8_0*>(src);
    for (int64_t b = 0; b < n / 32; ++b) {
        uint16_t half;
        std::memcpy(&half, blocks[b].d, sizeof half);
        const float d = f16_to_f32(half);
        for (int64_t j = 0; j < 32; ++j) {
            dst[32 * b + j] = d * static_cast<float>(blocks[b].qs[j]);
        }
    }
}

// d = max |x| / 127; the codes use the unrounded d: round-half-away(x / d), the division as a product with 1 / d.
static inline void from_float_q8_0(const float* src, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockQ8_0*>(dst);
    for (int64_t b = 0; b < n / 32; ++b) {
        const float* x = src + 32 * b;
        float largest = 0;
        for (int64_t j = 0; j < 32; ++j) {
            largest = std::fabs(x[j]) > largest ? std::fabs(x[j]) : largest;
        }
        const float d = largest / 127.0f;
        const uint16_t half = f32_to_f16(d);
        std::memcpy(blocks[b].d, &half, sizeof half);
        // Where 1 / d overflows, d is zero as a half and every code decodes to zero.
        const float inverse = d != 0 && std::isfinite(1.0f / d) ? 1.0f / d : 0.0f;
        for (int64_t j = 0; j < 32; ++j) {
            const float scaled = x[j] * inverse;
            const auto whole = static_cast<int32_t>(scaled);
            const float rest = scaled - static_cast<float>(whole);
            blocks[b].qs[j] = static_cast<int8_t>(whole + (rest >= 0.5f) - (rest <= -0.5f));
        }
    }
}

}  // namespace delta
