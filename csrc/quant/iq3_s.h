// IQ3_S: groups of 32 with a 4-bit scale; 4-value vectors out of 512, a sign bit per value.
#pragma once

#include "quant/iq.h"

namespace delta {

struct BlockIQ3_S {
    uint8_t d[2];        // f16
    uint8_t qs[32][2];   // per part: low eight bits of two vector numbers
    uint8_t qh[8];       // per group: the ninth bits of its eight vector numbers
    uint8_t signs[32];   // per part
    uint8_t scales[4];   // the even groups in the low halves, the odd ones in the high halves
};
static_assert(sizeof(BlockIQ3_S) == 110 && alignof(BlockIQ3_S) == 1);

static inline void to_float_iq3_s(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockIQ3_S*>(src);
    for (int64_t b = 0; b < n / 256; ++b) {
        const float d = load_f16(blocks[b].d);
        for (int64_t part = 0; part < 32; ++part) {
            const int64_t g = part / 4, l = part % 4;
            const float scale = d * static_cast<float>(1 + 2 * (blocks[b].scales[g / 2] >> (4 * (g & 1)) & 15));
            const uint32_t first = kGridIQ3_S[blocks[b].qs[part][0] | (blocks[b].qh[g] >> (2 * l) & 1) << 8];
            const uint32_t second = kGridIQ3_S[blocks[b].qs[part][1] | (blocks[b].qh[g] >> (2 * l + 1) & 1) << 8];
            decode_part44(kLevelsIQ3_S, first, second, blocks[b].signs[part], scale, dst + 256 * b + 8 * part);
        }
    }
}

}  // namespace delta
