// IQ1_M: the vectors of IQ1_S with a 3-bit scale per 16 values and a shift of +-1/8 per 8.
#pragma once

#include "quant/iq1_s.h"

namespace delta {

struct BlockIQ1_M {
    uint8_t qs[32];        // per part: low eight bits of the vector number
    uint8_t qh[16];        // per part four bits, the even one low: high three bits of the number, sign of the shift
    uint8_t scales[4][2];  // u16 per two groups: four scales of 3 bits; the top four bits of all four make the f16 d, lowest first
};
static_assert(sizeof(BlockIQ1_M) == 56 && alignof(BlockIQ1_M) == 1);

static inline void to_float_iq1_m(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockIQ1_M*>(src);
    for (int64_t b = 0; b < n / 256; ++b) {
        uint32_t half = 0;
        for (int64_t k = 0; k < 4; ++k) {
            half |= static_cast<uint32_t>(load_u16(blocks[b].scales[k]) >> 12) << (4 * k);
        }
        const float d = f16_to_f32(static_cast<uint16_t>(half));
        for (int64_t part = 0; part < 32; ++part) {
            const int32_t bits = blocks[b].qh[part / 2] >> (4 * (part & 1)) & 15;
            const int32_t code = load_u16(blocks[b].scales[part / 8]) >> (3 * (part / 2 % 4)) & 7;
            const int32_t number = blocks[b].qs[part] | (bits & 7) << 8;
            decode_part_iq1(kGridIQ1_S[number], bits & 8 ? -0.125f : 0.125f, d * static_cast<float>(2 * code + 1), dst + 256 * b + 8 * part);
        }
    }
}

}  // namespace delta
