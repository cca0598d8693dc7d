// IQ1_S: groups of 32 with a 3-bit scale and a common shift of +-1/8; vectors of 8 values -1, 0, 1 out of 2048.
#pragma once

#include "quant/iq.h"

namespace delta {

struct BlockIQ1_S {
    uint8_t d[2];      // f16
    uint8_t qs[32];    // per part: low eight bits of the vector number
    uint8_t qh[8][2];  // u16 per group: four times the high three bits, the scale (3 bits), the sign of the shift
};
static_assert(sizeof(BlockIQ1_S) == 50 && alignof(BlockIQ1_S) == 1);

// A part of 8 (IQ1_S, IQ1_M): scale * (value + shift).
static inline void decode_part_iq1(uint32_t entry, float shift, float scale, float* dst) {
    for (int64_t j = 0; j < 8; ++j) {
        dst[j] = scale * (level8(kLevelsIQ1, entry, j) + shift);
    }
}

static inline void to_float_iq1_s(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockIQ1_S*>(src);
    for (int64_t b = 0; b < n / 256; ++b) {
        const float d = load_f16(blocks[b].d);
        for (int64_t part = 0; part < 32; ++part) {
            const int32_t bits = load_u16(blocks[b].qh[part / 4]);
            const float scale = d * static_cast<float>(2 * (bits >> 12 & 7) + 1);
            const int32_t number = blocks[b].qs[part] | (bits >> (3 * (part % 4)) & 7) << 8;
            decode_part_iq1(kGridIQ1_S[number], bits & 0x8000 ? -0.125f : 0.125f, scale, dst + 256 * b + 8 * part);
        }
    }
}

}  // namespace delta
