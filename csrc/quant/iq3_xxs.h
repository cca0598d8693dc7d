// IQ3_XXS: groups of 32 with a 4-bit scale; 4-value vectors out of 256, signs in 7 bits.
#pragma once

#include "quant/iq.h"

namespace delta {

struct BlockIQ3_XXS {
    uint8_t d[2];         // f16
    uint8_t qs[32][2];    // per part: two vector numbers
    uint8_t bits[8][4];   // u32 per group: four times 7 sign bits, the scale on top
};
static_assert(sizeof(BlockIQ3_XXS) == 98 && alignof(BlockIQ3_XXS) == 1);

static inline void to_float_iq3_xxs(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockIQ3_XXS*>(src);
    for (int64_t b = 0; b < n / 256; ++b) {
        const float d = load_f16(blocks[b].d);
        for (int64_t part = 0; part < 32; ++part) {
            const uint32_t bits = load_u32(blocks[b].bits[part / 4]);
            const float scale = d * (0.5f + static_cast<float>(bits >> 28)) * 0.5f;
            const uint32_t first = kGridIQ3_XXS[blocks[b].qs[part][0]], second = kGridIQ3_XXS[blocks[b].qs[part][1]];
            decode_part44(kLevelsIQ3_XXS, first, second, even_signs(bits >> (7 * (part % 4))), scale, dst + 256 * b + 8 * part);
        }
    }
}

}  // namespace delta
