// Q5_K: Q4_K with a fifth bit per value.
#pragma once

#include "quant/q4_k.h"

namespace delta {

struct BlockQ5_K {
    uint8_t d[2];        // f16
    uint8_t dmin[2];     // f16
    uint8_t scales[12];  // scale_min_k
    uint8_t qh[32];      // bit g of byte j is the highest bit of value j of group g
    uint8_t qs[128];     // the lower four as in Q4_K
};
static_assert(sizeof(BlockQ5_K) == 176 && alignof(BlockQ5_K) == 1);

static inline void to_float_q5_k(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockQ5_K*>(src);
    for (int64_t b = 0; b < n / 256; ++b) {
        const float d = load_f16(blocks[b].d), dmin = load_f16(blocks[b].dmin);
        for (int64_t g = 0; g < 8; ++g) {
            int32_t scale, least;
            scale_min_k(blocks[b].scales, g, scale, least);
            const float step = d * static_cast<float>(scale), low = dmin * static_cast<float>(least);
            for (int64_t j = 0; j < 32; ++j) {
                const int32_t q = (blocks[b].qs[g / 2 * 32 + j] >> (4 * (g & 1)) & 15) | (blocks[b].qh[j] >> g & 1) << 4;
                dst[256 * b + 32 * g + j] = step * static_cast<float>(q) - low;
            }
        }
    }
}

static inline void from_weighted_q5_k(const float* src, const float* importance, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockQ5_K*>(dst);
    for (int64_t b = 0; b < n / 256; ++b) {
        SuperBlock<32> block;
        block.load(src + 256 * b, importance == nullptr ? nullptr : importance + 256 * b);
        const auto fit = fit_affine_super<32>(block, 31, 63, 7, 0.25f);
        int32_t scales[8], mins[8], q[256];
        store_scales<32>(fit.scales, scales);
        store_scales<32>(fit.mins, mins);
        store_codes<32>(block, q);
        store_f16(blocks[b].d, fit.d);
        store_f16(blocks[b].dmin, fit.dmin);
        store_scales_mins_k(blocks[b].scales, scales, mins);
        for (int64_t i = 0; i < 128; ++i) {
            const int32_t* pair = q + i / 32 * 64 + i % 32;
            blocks[b].qs[i] = static_cast<uint8_t>((pair[0] & 15) | (pair[32] & 15) << 4);
        }
        for (int64_t j = 0; j < 32; ++j) {
            int32_t high = 0;
            for (int64_t g = 0; g < 8; ++g) {
                high |= (q[32 * g + j] >> 4) << g;
            }
            blocks[b].qh[j] = static_cast<uint8_t>(high);
        }
    }
}

static inline void from_float_q5_k(const float* src, void* dst, int64_t n) { from_weighted_q5_k(src, nullptr, dst, n); }

}  // namespace delta
