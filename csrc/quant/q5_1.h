// Q5_1: 32 values share a half-precision scale d and minimum m; value j is d * q + m, q of 5 bits.
#pragma once

#include "quant/q5_0.h"

namespace delta {

struct BlockQ5_1 {
    uint8_t d[2];    // f16
    uint8_t m[2];    // f16
    uint8_t qh[4];   // u32: bit j is the highest bit of value j
    uint8_t qs[16];  // nibble32
};
static_assert(sizeof(BlockQ5_1) == 24 && alignof(BlockQ5_1) == 1);

static inline void to_float_q5_1(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockQ5_1*>(src);
    for (int64_t b = 0; b < n / 32; ++b) {
        const float d = load_f16(blocks[b].d), m = load_f16(blocks[b].m);
        const uint32_t high = load_u32(blocks[b].qh);
        for (int64_t j = 0; j < 32; ++j) {
            dst[32 * b + j] = d * static_cast<float>(code_q5(high, blocks[b].qs, j)) + m;
        }
    }
}

// d = (max - min) / 31, m = min; the codes use the unrounded ones. A minimum of zero is stored without a sign.
static inline void from_float_q5_1(const float* src, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockQ5_1*>(dst);
    for (int64_t b = 0; b < n / 32; ++b) {
        const float* x = src + 32 * b;
        const Range range = range_of(x, 32);
        const float d = (range.max - range.min) / 31;
        const float inverse = finite_reciprocal(d);
        store_f16(blocks[b].d, d);
        store_f16(blocks[b].m, inverse == 0 && d != 0 ? 0.0f : range.min + 0.0f);
        uint8_t q[32];
        store_steps(x, range.min, inverse, 0.5f, 31, q);
        store_codes_q5(q, blocks[b].qh, blocks[b].qs);
    }
}

static inline void from_weighted_q5_1(const float* src, const float* importance, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockQ5_1*>(dst);
    fit_affine_blocks(src, importance, n, 31, [blocks](int64_t b, float d, float m, const int32_t* q) {
        store_f16(blocks[b].d, d);
        store_f16(blocks[b].m, m);
        uint8_t codes[32];
        for (int64_t j = 0; j < 32; ++j) {
            codes[j] = static_cast<uint8_t>(q[j]);
        }
        store_codes_q5(codes, blocks[b].qh, blocks[b].qs);
    });
}

}  // namespace delta
