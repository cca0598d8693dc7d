// MXFP4 (OCP Microscaling): 32 four-bit values E2M1 share one power-of-two scale E8M0. Value j is in the low half of qs[j] for
// j < 16, in the high half of qs[j - 16] after that.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/half.h"

namespace delta {

struct BlockMXFP4 {
    uint8_t e;       // the scale is 2^(e - 127); 255 is NaN
    uint8_t qs[16];
};
static_assert(sizeof(BlockMXFP4) == 17 && alignof(BlockMXFP4) == 1);

// Twice the E2M1 values, so that they are integers; the scale is halved in exchange.
static constexpr int8_t kMXFP4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static inline void to_float_mxfp4(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockMXFP4*>(src);
    for (int64_t b = 0; b < n / 32; ++b) {
        const float scale = e8m0_half_to_f32(blocks[b].e);
        for (int64_t j = 0; j < 16; ++j) {
            dst[32 * b + j] = static_cast<float>(kMXFP4Values[blocks[b].qs[j] & 15]) * scale;
            dst[32 * b + j + 16] = static_cast<float>(kMXFP4Values[blocks[b].qs[j] >> 4]) * scale;
        }
    }
}

// The largest magnitude m picks the scale floor(log2 m) - 2; each value takes the nearest code, the lowest of equally near ones.
static inline void from_float_mxfp4(const float* src, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockMXFP4*>(dst);
    for (int64_t b = 0; b < n / 32; ++b) {
        const float* x = src + 32 * b;
        float largest = 0;
        for (int64_t j = 0; j < 32; ++j) {
            largest = std::fabs(x[j]) > largest ? std::fabs(x[j]) : largest;
        }
        int32_t e = 0;
        if (largest > 0) {
            // The logarithm is rounded to float32 before the floor, as other writers of this format do.
            const auto exponent = static_cast<float>(std::log2(static_cast<double>(largest)));
            e = static_cast<int32_t>(std::floor(exponent)) - 2 + 127;
            e = e < 0 ? 0 : e;  // below 2^-125 the scale has no code; the smallest one is nearest
        }
        blocks[b].e = static_cast<uint8_t>(e);
        const float scale = e8m0_half_to_f32(blocks[b].e);
        for (int64_t j = 0; j < 16; ++j) {
            uint8_t code[2] = {};
            for (int half = 0; half < 2; ++half) {
                const float value = x[j + 16 * half];
                float nearest = std::fabs(value);  // to code 0
                for (uint8_t c = 1; c < 16; ++c) {
                    const float distance = std::fabs(static_cast<float>(kMXFP4Values[c]) * scale - value);
                    if (distance < nearest) {
                        nearest = distance;
                        code[half] = c;
                    }
                }
            }
            blocks[b].qs[j] = static_cast<uint8_t>(code[0] | code[1] << 4);
        }
    }
}

}  // namespace delta
