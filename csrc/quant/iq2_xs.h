// IQ2_XS: groups of 32 with two 4-bit scales; 8-value vectors out of 512, signs in 7 bits.
#pragma once

#include "quant/iq.h"

namespace delta {

struct BlockIQ2_XS {
    uint8_t d[2];       // f16
    uint8_t qs[32][2];  // u16 per part: vector number (9 bits), signs (7)
    uint8_t scales[8];  // per group: parts 0 and 1 low, parts 2 and 3 high
};
static_assert(sizeof(BlockIQ2_XS) == 74 && alignof(BlockIQ2_XS) == 1);

static inline void to_float_iq2_xs(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockIQ2_XS*>(src);
    for (int64_t b = 0; b < n / 256; ++b) {
        const float d = load_f16(blocks[b].d);
        for (int64_t part = 0; part < 32; ++part) {
            const uint32_t bits = load_u16(blocks[b].qs[part]);
            const int32_t code = blocks[b].scales[part / 4] >> (part % 4 < 2 ? 0 : 4) & 15;
            const float scale = d * (0.5f + static_cast<float>(code)) * 0.25f;
            decode_part8(kLevelsIQ2, kGridIQ2_XS[bits & 511], even_signs(bits >> 9), scale, dst + 256 * b + 8 * part);
        }
    }
}

}  // namespace delta
