// MXFP4 (OCP Microscaling): 32 four-bit values E2M1 share one power-of-two scale E8M0.
#pragma once

#include <cmath>

#include "quant/block.h"

namespace delta {

struct BlockMXFP4 {
    uint8_t e;       // the scale is 2^(e - 127); 255 is NaN
    uint8_t qs[16];  // nibble32
};
static_assert(sizeof(BlockMXFP4) == 17 && alignof(BlockMXFP4) == 1);

// Twice the E2M1 values, so that they are integers; the scale is halved in exchange.
static constexpr int8_t kMXFP4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static inline void to_float_mxfp4(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockMXFP4*>(src);
    for (int64_t b = 0; b < n / 32; ++b) {
        const float scale = e8m0_half_to_f32(blocks[b].e);
        for (int64_t j = 0; j < 32; ++j) {
            dst[32 * b + j] = static_cast<float>(kMXFP4Values[nibble32(blocks[b].qs, j)]) * scale;
        }
    }
}

// The code nearest to x, of two equally near ones that of smaller magnitude, which is the lower code: a magnitude beyond k of the
// midpoints is the k-th. Zero has no sign.
static inline int32_t nearest_mxfp4(float x, float scale) {
    const float magnitude = f32_from_bits(f32_bits(x) & 0x7fffffff);
    const int32_t k = (magnitude > 0.5f * scale) + (magnitude > 1.5f * scale) + (magnitude > 2.5f * scale) + (magnitude > 3.5f * scale) +
                      (magnitude > 5 * scale) + (magnitude > 7 * scale) + (magnitude > 10 * scale);
    return k | (x < 0 && k != 0 ? 8 : 0);
}

// The largest magnitude m picks the scale floor(log2 m) - 2.
static inline void from_float_mxfp4(const float* src, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockMXFP4*>(dst);
    for (int64_t b = 0; b < n / 32; ++b) {
        const float* x = src + 32 * b;
        const float largest = largest_magnitude(x, 32);
        int32_t e = 0;
        if (largest > 0) {
            // The logarithm is rounded to float32 before the floor, as other writers of this format do.
            const auto exponent = static_cast<float>(std::log2(static_cast<double>(largest)));
            e = static_cast<int32_t>(__builtin_floorf(exponent)) - 2 + 127;
            e = e < 0 ? 0 : e;  // below 2^-125 the scale has no code; the smallest one is nearest
        }
        blocks[b].e = static_cast<uint8_t>(e);
        const float scale = e8m0_half_to_f32(blocks[b].e);
        int32_t q[32];
        for (int64_t j = 0; j < 32; ++j) {
            q[j] = nearest_mxfp4(x[j], scale);
        }
        for (int64_t j = 0; j < 16; ++j) {
            blocks[b].qs[j] = static_cast<uint8_t>(q[j] | q[j + 16] << 4);
        }
    }
}

}  // namespace delta
