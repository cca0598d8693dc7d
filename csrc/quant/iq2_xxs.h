// IQ2_XXS: groups of 32 with a 4-bit scale; 8-value vectors out of 256, signs in 7 bits.
#pragma once

#include "quant/iq.h"

namespace delta {

struct BlockIQ2_XXS {
    uint8_t d[2];      // f16
    uint8_t qs[8][8];  // per group: four vector numbers, then a u32 of four times 7 sign bits and the scale on top
};
static_assert(sizeof(BlockIQ2_XXS) == 66 && alignof(BlockIQ2_XXS) == 1);

static inline void to_float_iq2_xxs(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockIQ2_XXS*>(src);
    for (int64_t b = 0; b < n / 256; ++b) {
        const float d = load_f16(blocks[b].d);
        for (int64_t g = 0; g < 8; ++g) {
            const uint32_t bits = load_u32(blocks[b].qs[g] + 4);
            const float scale = d * (0.5f + static_cast<float>(bits >> 28)) * 0.25f;
            for (int64_t l = 0; l < 4; ++l) {
                const uint32_t entry = kGridIQ2_XXS[blocks[b].qs[g][l]];
                decode_part8(kLevelsIQ2, entry, even_signs(bits >> (7 * l)), scale, dst + 256 * b + 32 * g + 8 * l);
            }
        }
    }
}

}  // namespace delta
