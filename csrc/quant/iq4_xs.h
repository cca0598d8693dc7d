// IQ4_XS: 256 values in 8 groups of 32; value i of group g is d * (scale[g] - 32) times one of the 16 values of IQ4_NL, scales of 6 bits.
#pragma once

#include "quant/fit_super.h"
#include "quant/iq4_nl.h"

namespace delta {

struct BlockIQ4_XS {
    uint8_t d[2];         // f16
    uint8_t scales_h[2];  // u16: high two bits of scale g at bit 2 g
    uint8_t scales_l[4];  // low four: the even groups in the low halves, the odd ones in the high halves
    uint8_t qs[128];      // nibble32 per group
};
static_assert(sizeof(BlockIQ4_XS) == 136 && alignof(BlockIQ4_XS) == 1);

static inline void to_float_iq4_xs(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockIQ4_XS*>(src);
    for (int64_t b = 0; b < n / 256; ++b) {
        const float d = load_f16(blocks[b].d);
        const uint32_t high = load_u16(blocks[b].scales_h);
        for (int64_t g = 0; g < 8; ++g) {
            const int32_t low = blocks[b].scales_l[g / 2] >> (4 * (g & 1)) & 15;
            const float step = d * static_cast<float>((low | static_cast<int32_t>(high >> (2 * g) & 3) << 4) - 32);
            for (int64_t j = 0; j < 32; ++j) {
                dst[256 * b + 32 * g + j] = step * static_cast<float>(kIQ4Values[nibble32(blocks[b].qs + 16 * g, j)]);
            }
        }
    }
}

static inline void from_weighted_iq4_xs(const float* src, const float* importance, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockIQ4_XS*>(dst);
    for (int64_t b = 0; b < n / 256; ++b) {
        SuperBlock<32> block;
        block.load(src + 256 * b, importance == nullptr ? nullptr : importance + 256 * b);
        const auto fit = fit_scaled_super<32>(IQ4Codes{}, block, -32, 31, 6, 2.0f);
        int32_t scales[8], q[256];
        store_scales<32>(fit.scales, scales);
        store_codes<32>(block, q);
        store_f16(blocks[b].d, fit.d);
        uint32_t high = 0;
        for (int64_t g = 0; g < 8; ++g) {
            high |= static_cast<uint32_t>((scales[g] + 32) >> 4) << (2 * g);
        }
        store_u16(blocks[b].scales_h, static_cast<uint16_t>(high));
        for (int64_t k = 0; k < 4; ++k) {
            blocks[b].scales_l[k] = static_cast<uint8_t>(((scales[2 * k] + 32) & 15) | ((scales[2 * k + 1] + 32) & 15) << 4);
        }
        uint8_t codes[256];
        for (int64_t i = 0; i < 256; ++i) {
            codes[i] = iq4_index(q[i]);
        }
        for (int64_t g = 0; g < 8; ++g) {
            store_nibbles32(codes + 32 * g, blocks[b].qs + 16 * g);
        }
    }
}

static inline void from_float_iq4_xs(const float* src, void* dst, int64_t n) { from_weighted_iq4_xs(src, nullptr, dst, n); }

}  // namespace delta
