// Q4_0: 32 values share one half-precision scale d; value j is d * (q - 8), q of 4 bits.
#pragma once

#include "quant/block.h"
#include "quant/fit_blocks.h"

namespace delta {

struct BlockQ4_0 {
    uint8_t d[2];    // f16
    uint8_t qs[16];  // nibble32
};
static_assert(sizeof(BlockQ4_0) == 18 && alignof(BlockQ4_0) == 1);

static inline void to_float_q4_0(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockQ4_0*>(src);
    for (int64_t b = 0; b < n / 32; ++b) {
        const float d = load_f16(blocks[b].d);
        for (int64_t j = 0; j < 32; ++j) {
            dst[32 * b + j] = d * static_cast<float>(nibble32(blocks[b].qs, j) - 8);
        }
    }
}

// The value of largest magnitude becomes code 0, d = -x / 8; the codes use the unrounded d.
static inline void from_float_q4_0(const float* src, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockQ4_0*>(dst);
    for (int64_t b = 0; b < n / 32; ++b) {
        const float* x = src + 32 * b;
        const float d = first_extreme(x, 32) / -8;
        const float inverse = finite_reciprocal(d);
        store_f16(blocks[b].d, inverse == 0 && d != 0 ? -0.0f : d);
        uint8_t q[32];
        store_steps(x, 0, inverse, 8.5f, 15, q);
        store_nibbles32(q, blocks[b].qs);
    }
}

static inline void from_weighted_q4_0(const float* src, const float* importance, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockQ4_0*>(dst);
    fit_scaled_blocks(SignedCodes{8}, src, importance, n, 9, 0.1f, [blocks](int64_t b, float d, const int32_t* q) {
        store_f16(blocks[b].d, d);
        uint8_t codes[32];
        for (int64_t j = 0; j < 32; ++j) {
            codes[j] = static_cast<uint8_t>(q[j] + 8);
        }
        store_nibbles32(codes, blocks[b].qs);
    });
}

}  // namespace delta
