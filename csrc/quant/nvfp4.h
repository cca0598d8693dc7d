// NVFP4: 64 four-bit values E2M1 in four groups of 16, each with a scale of its own (unsigned E4M3).
#pragma once

#include "quant/mxfp4.h"

namespace delta {

struct BlockNVFP4 {
    uint8_t d[4];
    uint8_t qs[32];  // 8 bytes per group: value k < 8 in the low half of byte k, value k + 8 in its high half
};
static_assert(sizeof(BlockNVFP4) == 36 && alignof(BlockNVFP4) == 1);

// Half of an E4M3 scale without sign (the values are stored doubled): 4 exponent bits (bias 7), 3 fraction bits; 0x7f is not a
// number and reads as zero.
static inline float ue4m3_half_to_f32(uint8_t code) {
    const int32_t exponent = code >> 3 & 15, fraction = code & 7;
    if (code == 0x7f) {
        return 0;
    }
    if (exponent == 0) {
        return static_cast<float>(fraction) * 0x1p-10f;
    }
    return f32_from_bits(static_cast<uint32_t>(exponent + 127 - 7 - 1) << 23 | static_cast<uint32_t>(fraction) << 20);
}

static inline void to_float_nvfp4(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockNVFP4*>(src);
    for (int64_t b = 0; b < n / 64; ++b) {
        for (int64_t g = 0; g < 4; ++g) {
            const float scale = ue4m3_half_to_f32(blocks[b].d[g]);
            for (int64_t k = 0; k < 16; ++k) {
                const uint8_t byte = blocks[b].qs[8 * g + k % 8];
                dst[64 * b + 16 * g + k] = scale * static_cast<float>(kMXFP4Values[k < 8 ? byte & 15 : byte >> 4]);
            }
        }
    }
}

}  // namespace delta
