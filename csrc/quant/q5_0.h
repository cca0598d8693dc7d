// Q5_0: 32 values share one half-precision scale d; value j is d * (q - 16), q of 5 bits.
#pragma once

#include "quant/block.h"
#include "quant/fit_blocks.h"

namespace delta {

struct BlockQ5_0 {
    uint8_t d[2];    // f16
    uint8_t qh[4];   // u32: bit j is the highest bit of value j
    uint8_t qs[16];  // nibble32
};
static_assert(sizeof(BlockQ5_0) == 22 && alignof(BlockQ5_0) == 1);

// Splits 32 codes of 5 bits (Q5_0, Q5_1).
static inline void store_codes_q5(const uint8_t* q, uint8_t* qh, uint8_t* qs) {
    constexpr uint64_t kFifth = 0x0101010101010101, kGather = 0x0102040810204080;
    uint64_t codes[4];
    std::memcpy(codes, q, sizeof codes);
    for (int k = 0; k < 4; ++k) {
        // The product moves bit 0 of byte i to bit 56 + i; no two of its terms meet.
        qh[k] = static_cast<uint8_t>((codes[k] >> 4 & kFifth) * kGather >> 56);
        codes[k] &= 15 * kFifth;
    }
    uint8_t low[32];
    std::memcpy(low, codes, sizeof low);
    store_nibbles32(low, qs);
}

static inline int32_t code_q5(uint32_t high, const uint8_t* qs, int64_t j) {
    return nibble32(qs, j) | static_cast<int32_t>((high >> j & 1) << 4);
}

static inline void to_float_q5_0(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockQ5_0*>(src);
    for (int64_t b = 0; b < n / 32; ++b) {
        const float d = load_f16(blocks[b].d);
        const uint32_t high = load_u32(blocks[b].qh);
        for (int64_t j = 0; j < 32; ++j) {
            dst[32 * b + j] = d * static_cast<float>(code_q5(high, blocks[b].qs, j) - 16);
        }
    }
}

// The value of largest magnitude becomes code 0, d = -x / 16; the codes use the unrounded d.
static inline void from_float_q5_0(const float* src, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockQ5_0*>(dst);
    for (int64_t b = 0; b < n / 32; ++b) {
        const float* x = src + 32 * b;
        const float d = first_extreme(x, 32) / -16;
        const float inverse = finite_reciprocal(d);
        store_f16(blocks[b].d, inverse == 0 && d != 0 ? -0.0f : d);
        uint8_t q[32];
        store_steps(x, 0, inverse, 16.5f, 31, q);
        store_codes_q5(q, blocks[b].qh, blocks[b].qs);
    }
}

static inline void from_weighted_q5_0(const float* src, const float* importance, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockQ5_0*>(dst);
    fit_scaled_blocks(SignedCodes{16}, src, importance, n, 9, 0.1f, [blocks](int64_t b, float d, const int32_t* q) {
        uint8_t codes[32];
        for (int64_t j = 0; j < 32; ++j) {
            codes[j] = static_cast<uint8_t>(q[j] + 16);
        }
        store_f16(blocks[b].d, d);
        store_codes_q5(codes, blocks[b].qh, blocks[b].qs);
    });
}

}  // namespace delta
