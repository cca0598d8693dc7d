// IQ2_S: groups of 32 with two 4-bit scales; 8-value vectors out of 1024, a sign bit per value.
#pragma once

#include "quant/iq.h"

namespace delta {

struct BlockIQ2_S {
    uint8_t d[2];       // f16
    uint8_t qs[32];     // per part: low eight bits of the vector number
    uint8_t signs[32];  // per part
    uint8_t qh[8];      // per group: high two bits of the four vector numbers
    uint8_t scales[8];  // per group: parts 0 and 1 low, parts 2 and 3 high
};
static_assert(sizeof(BlockIQ2_S) == 82 && alignof(BlockIQ2_S) == 1);

static inline void to_float_iq2_s(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockIQ2_S*>(src);
    for (int64_t b = 0; b < n / 256; ++b) {
        const float d = load_f16(blocks[b].d);
        for (int64_t part = 0; part < 32; ++part) {
            const int64_t g = part / 4, l = part % 4;
            const int32_t number = blocks[b].qs[part] | (blocks[b].qh[g] >> (2 * l) & 3) << 8;
            const float scale = d * (0.5f + static_cast<float>(blocks[b].scales[g] >> (l < 2 ? 0 : 4) & 15)) * 0.25f;
            decode_part8(kLevelsIQ2, kGridIQ2_S[number], blocks[b].signs[part], scale, dst + 256 * b + 8 * part);
        }
    }
}

}  // namespace delta
