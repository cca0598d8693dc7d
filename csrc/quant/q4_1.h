// Q4_1: 32 values share a half-precision scale d and minimum m; value j is d * q + m, q of 4 bits.
#pragma once

#include "quant/block.h"
#include "quant/fit_blocks.h"

namespace delta {

struct BlockQ4_1 {
    uint8_t d[2];    // f16
    uint8_t m[2];    // f16
    uint8_t qs[16];  // nibble32
};
static_assert(sizeof(BlockQ4_1) == 20 && alignof(BlockQ4_1) == 1);

static inline void to_float_q4_1(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockQ4_1*>(src);
    for (int64_t b = 0; b < n / 32; ++b) {
        const float d = load_f16(blocks[b].d), m = load_f16(blocks[b].m);
        for (int64_t j = 0; j < 32; ++j) {
            dst[32 * b + j] = d * static_cast<float>(nibble32(blocks[b].qs, j)) + m;
        }
    }
}

// d = (max - min) / 15, m = min; the codes use the unrounded ones. A minimum of zero is stored without a sign.
static inline void from_float_q4_1(const float* src, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockQ4_1*>(dst);
    for (int64_t b = 0; b < n / 32; ++b) {
        const float* x = src + 32 * b;
        const Range range = range_of(x, 32);
        const float d = (range.max - range.min) / 15;
        const float inverse = finite_reciprocal(d);
        store_f16(blocks[b].d, d);
        store_f16(blocks[b].m, inverse == 0 && d != 0 ? 0.0f : range.min + 0.0f);
        uint8_t q[32];
        store_steps(x, range.min, inverse, 0.5f, 15, q);
        store_nibbles32(q, blocks[b].qs);
    }
}

static inline void from_weighted_q4_1(const float* src, const float* importance, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockQ4_1*>(dst);
    fit_affine_blocks(src, importance, n, 15, [blocks](int64_t b, float d, float m, const int32_t* q) {
        store_f16(blocks[b].d, d);
        store_f16(blocks[b].m, m);
        uint8_t codes[32];
        for (int64_t j = 0; j < 32; ++j) {
            codes[j] = static_cast<uint8_t>(q[j]);
        }
        store_nibbles32(codes, blocks[b].qs);
    });
}

}  // namespace delta
