// TQ2_0: 256 values share one half-precision scale d; value i is d * (q - 1), q = 0, 1, 2 in 2 bits.
#pragma once

#include "quant/block.h"

namespace delta {

struct BlockTQ2_0 {
    uint8_t qs[64];  // value 128 h + 32 l + m in bits 2 l of byte 32 h + m
    uint8_t d[2];    // f16
};
static_assert(sizeof(BlockTQ2_0) == 66 && alignof(BlockTQ2_0) == 1);

static inline void to_float_tq2_0(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockTQ2_0*>(src);
    for (int64_t b = 0; b < n / 256; ++b) {
        const float d = load_f16(blocks[b].d);
        for (int64_t i = 0; i < 256; ++i) {
            const int32_t q = blocks[b].qs[i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3;
            dst[256 * b + i] = d * static_cast<float>(q - 1);
        }
    }
}

// Codes of 256 values (TQ1_0, TQ2_0), and the scale: d = max |x|, q = round-half-away(x / d) + 1.
static inline float ternary_codes(const float* x, uint8_t* q) {
    const float d = largest_magnitude(x, 256);
    const float inverse = finite_reciprocal(d);
    for (int64_t i = 0; i < 256; ++i) {
        const float scaled = x[i] * inverse;
        q[i] = static_cast<uint8_t>(1 + (scaled >= 0.5f) - (scaled <= -0.5f));
    }
    return d;
}

static inline void from_float_tq2_0(const float* src, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockTQ2_0*>(dst);
    for (int64_t b = 0; b < n / 256; ++b) {
        uint8_t q[256];
        store_f16(blocks[b].d, ternary_codes(src + 256 * b, q));
        for (int64_t h = 0; h < 2; ++h) {
            for (int64_t m = 0; m < 32; ++m) {
                const uint8_t* of = q + 128 * h + m;
                blocks[b].qs[32 * h + m] = static_cast<uint8_t>(of[0] | of[32] << 2 | of[64] << 4 | of[96] << 6);
            }
        }
    }
}

}  // namespace delta
