// Q6_K: 256 values in 16 groups of 16; value i of group g is d * scale[g] * (q - 32), q of 6 bits, scales of 8.
#pragma once

#include "quant/block.h"
#include "quant/fit_super.h"

namespace delta {

struct BlockQ6_K {
    uint8_t ql[128];    // value 128 h + 32 a + m: low four bits in byte 64 h + 32 (a & 1) + m, the lower half if a < 2
    uint8_t qh[64];     // its high two in bits 2 a of byte 32 h + m
    int8_t scales[16];
    uint8_t d[2];       // f16
};
static_assert(sizeof(BlockQ6_K) == 210 && alignof(BlockQ6_K) == 1);

static inline void to_float_q6_k(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockQ6_K*>(src);
    for (int64_t b = 0; b < n / 256; ++b) {
        const float d = load_f16(blocks[b].d);
        for (int64_t g = 0; g < 16; ++g) {
            const float step = d * static_cast<float>(blocks[b].scales[g]);
            const int64_t h = g / 8, a = g / 2 % 4;
            const uint8_t* low = blocks[b].ql + 64 * h + 32 * (a & 1) + 16 * (g & 1);
            const uint8_t* high = blocks[b].qh + 32 * h + 16 * (g & 1);
            for (int64_t j = 0; j < 16; ++j) {
                const int32_t q = (low[j] >> (a < 2 ? 0 : 4) & 15) | (high[j] >> (2 * a) & 3) << 4;
                dst[256 * b + 16 * g + j] = step * static_cast<float>(q - 32);
            }
        }
    }
}

static inline void from_weighted_q6_k(const float* src, const float* importance, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockQ6_K*>(dst);
    for (int64_t b = 0; b < n / 256; ++b) {
        SuperBlock<16> block;
        block.load(src + 256 * b, importance == nullptr ? nullptr : importance + 256 * b);
        const auto fit = fit_scaled_super<16>(SignedCodes{32}, block, -128, 127, 5, 0.18f);
        int32_t scales[16], q[256];
        store_scales<16>(fit.scales, scales);
        store_codes<16>(block, q);
        store_f16(blocks[b].d, fit.d);
        for (int64_t g = 0; g < 16; ++g) {
            blocks[b].scales[g] = static_cast<int8_t>(scales[g]);
        }
        for (int64_t k = 0; k < 64; ++k) {
            const int64_t h = k / 32, m = k % 32;
            int32_t code[4];
            for (int64_t a = 0; a < 4; ++a) {
                code[a] = q[128 * h + 32 * a + m] + 32;
            }
            blocks[b].ql[64 * h + m] = static_cast<uint8_t>((code[0] & 15) | (code[2] & 15) << 4);
            blocks[b].ql[64 * h + 32 + m] = static_cast<uint8_t>((code[1] & 15) | (code[3] & 15) << 4);
            blocks[b].qh[k] = static_cast<uint8_t>(code[0] >> 4 | code[1] >> 4 << 2 | code[2] >> 4 << 4 | code[3] >> 4 << 6);
        }
    }
}

static inline void from_float_q6_k(const float* src, void* dst, int64_t n) { from_weighted_q6_k(src, nullptr, dst, n); }

}  // namespace delta
