// Q4_K: 256 values in 8 groups of 32; value i of group g is d * scale[g] * q - dmin * min[g], q of 4 bits, scales and minima of 6.
#pragma once

#include "quant/block.h"
#include "quant/fit_super.h"

namespace delta {

struct BlockQ4_K {
    uint8_t d[2];        // f16
    uint8_t dmin[2];     // f16
    uint8_t scales[12];  // scale_min_k
    uint8_t qs[128];     // 32 bytes per pair of groups: the even one in the low halves, the odd one in the high halves
};
static_assert(sizeof(BlockQ4_K) == 144 && alignof(BlockQ4_K) == 1);

// Scale and minimum of group g in the 12 bytes that Q4_K and Q5_K share: bytes 0-3 and 4-7 hold the scales and minima of groups 0-3 in
// their lower six bits; bytes 8-11 the low four bits of groups 4-7, whose high two are in the upper bits of bytes 0-3 and 4-7.
static inline void scale_min_k(const uint8_t* s, int64_t g, int32_t& scale, int32_t& least) {
    if (g < 4) {
        scale = s[g] & 63;
        least = s[g + 4] & 63;
    } else {
        scale = (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
        least = (s[g + 4] >> 4) | (s[g] >> 6) << 4;
    }
}

static inline void store_scales_mins_k(uint8_t* s, const int32_t* scales, const int32_t* mins) {
    for (int64_t g = 0; g < 4; ++g) {
        s[g] = static_cast<uint8_t>(scales[g] | (scales[g + 4] >> 4) << 6);
        s[g + 4] = static_cast<uint8_t>(mins[g] | (mins[g + 4] >> 4) << 6);
        s[g + 8] = static_cast<uint8_t>((scales[g + 4] & 15) | (mins[g + 4] & 15) << 4);
    }
}

static inline void to_float_q4_k(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockQ4_K*>(src);
    for (int64_t b = 0; b < n / 256; ++b) {
        const float d = load_f16(blocks[b].d), dmin = load_f16(blocks[b].dmin);
        for (int64_t g = 0; g < 8; ++g) {
            int32_t scale, least;
            scale_min_k(blocks[b].scales, g, scale, least);
            const float step = d * static_cast<float>(scale), low = dmin * static_cast<float>(least);
            for (int64_t j = 0; j < 32; ++j) {
                const int32_t q = blocks[b].qs[g / 2 * 32 + j] >> (4 * (g & 1)) & 15;
                dst[256 * b + 32 * g + j] = step * static_cast<float>(q) - low;
            }
        }
    }
}

static inline void from_weighted_q4_k(const float* src, const float* importance, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockQ4_K*>(dst);
    for (int64_t b = 0; b < n / 256; ++b) {
        SuperBlock<32> block;
        block.load(src + 256 * b, importance == nullptr ? nullptr : importance + 256 * b);
        const auto fit = fit_affine_super<32>(block, 15, 63, 7, 0.25f);
        int32_t scales[8], mins[8], q[256];
        store_scales<32>(fit.scales, scales);
        store_scales<32>(fit.mins, mins);
        store_codes<32>(block, q);
        store_f16(blocks[b].d, fit.d);
        store_f16(blocks[b].dmin, fit.dmin);
        store_scales_mins_k(blocks[b].scales, scales, mins);
        for (int64_t i = 0; i < 128; ++i) {
            const int32_t* pair = q + i / 32 * 64 + i % 32;
            blocks[b].qs[i] = static_cast<uint8_t>(pair[0] | pair[32] << 4);
        }
    }
}

static inline void from_float_q4_k(const float* src, void* dst, int64_t n) { from_weighted_q4_k(src, nullptr, dst, n); }

}  // namespace delta
