// Q3_K: 256 values in 16 groups of 16; value i of group g is d * (scale[g] - 32) * (q - 4), q of 3 bits, scales of 6.
#pragma once

#include "quant/q2_k.h"

namespace delta {

struct BlockQ3_K {
    uint8_t hmask[32];   // bit i / 32 of byte i % 32 is the highest bit of value i
    uint8_t qs[64];      // the lower two: code_2bit
    uint8_t scales[12];  // low four bits of groups g and g + 8 in byte g < 8, high two of groups g, g + 4, g + 8, g + 12 in byte 8 + g % 4
    uint8_t d[2];        // f16
};
static_assert(sizeof(BlockQ3_K) == 110 && alignof(BlockQ3_K) == 1);

static inline int32_t scale_q3_k(const uint8_t* s, int64_t g) {
    const int32_t low = g < 8 ? s[g] & 15 : s[g - 8] >> 4, high = s[8 + g % 4] >> (2 * (g / 4)) & 3;
    return (low | high << 4) - 32;
}

static inline void to_float_q3_k(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockQ3_K*>(src);
    for (int64_t b = 0; b < n / 256; ++b) {
        const float d = load_f16(blocks[b].d);
        for (int64_t g = 0; g < 16; ++g) {
            const float step = d * static_cast<float>(scale_q3_k(blocks[b].scales, g));
            for (int64_t i = 16 * g; i < 16 * g + 16; ++i) {
                const int32_t high = blocks[b].hmask[i % 32] >> (i / 32) & 1;
                dst[256 * b + i] = step * static_cast<float>(code_2bit(blocks[b].qs, i) + 4 * high - 4);
            }
        }
    }
}

static inline void from_weighted_q3_k(const float* src, const float* importance, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockQ3_K*>(dst);
    for (int64_t b = 0; b < n / 256; ++b) {
        SuperBlock<16> block;
        block.load(src + 256 * b, importance == nullptr ? nullptr : importance + 256 * b);
        const auto fit = fit_scaled_super<16>(SignedCodes{4}, block, -32, 31, 5, 0.18f);
        int32_t scales[16], q[256];
        store_scales<16>(fit.scales, scales);
        store_codes<16>(block, q);
        BlockQ3_K& out = blocks[b];
        out = {};
        store_f16(out.d, fit.d);
        for (int64_t g = 0; g < 16; ++g) {
            const int32_t scale = scales[g] + 32;
            out.scales[g % 8] = static_cast<uint8_t>(out.scales[g % 8] | (scale & 15) << (g < 8 ? 0 : 4));
            out.scales[8 + g % 4] = static_cast<uint8_t>(out.scales[8 + g % 4] | (scale >> 4) << (2 * (g / 4)));
        }
        for (int64_t i = 0; i < 256; ++i) {
            q[i] += 4;
            out.hmask[i % 32] = static_cast<uint8_t>(out.hmask[i % 32] | (q[i] >> 2) << (i / 32));
        }
        store_codes_2bit(out.qs, q);
    }
}

static inline void from_float_q3_k(const float* src, void* dst, int64_t n) { from_weighted_q3_k(src, nullptr, dst, n); }

}  // namespace delta
