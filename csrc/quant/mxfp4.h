// MXFP4 (OCP Microscaling): 32 four-bit values E2M1 share one power-of-two scale E8M0.
#pragma once

#include <cmath>

#include "quant/block.h"
#include "quant/lanes.h"

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

// floor(log2 m) of a positive number, with the logarithm rounded to float32 first, as other writers of this format do: just below a
// power of two that is one more than the exponent says.
static inline int32_t floor_log2(float m) {
    const uint32_t bits = f32_bits(m);
    if ((bits & 0x7fffff) < 0x7fff00) {
        return static_cast<int32_t>(bits >> 23) - 127;  // too low if m is subnormal
    }
    return static_cast<int32_t>(__builtin_floorf(static_cast<float>(std::log2(static_cast<double>(m)))));
}

// The code nearest to x, of two equally near ones that of smaller magnitude, which is the lower code: a magnitude beyond k of the
// midpoints is the k-th. Zero has no sign.
static inline IntLanes nearest_mxfp4(Lanes x, float scale) {
    const Lanes m = magnitude(x);
    const IntLanes k = (m > 0.5f * scale) + (m > 1.5f * scale) + (m > 2.5f * scale) + (m > 3.5f * scale) + (m > 5 * scale) +
                       (m > 7 * scale) + (m > 10 * scale);  // a true comparison is -1
    return -k | ((x < 0) & (k != 0) & 8);
}

// The largest magnitude m picks the scale floor(log2 m) - 2.
static inline void from_float_mxfp4(const float* src, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockMXFP4*>(dst);
    for (int64_t b = 0; b < n / 32; ++b) {
        const float* x = src + 32 * b;
        const float largest = largest_magnitude(x, 32);
        const int32_t e = largest > 0 ? floor_log2(largest) - 2 + 127 : 0;
        blocks[b].e = static_cast<uint8_t>(e < 0 ? 0 : e);  // below 2^-125 the scale has no code; the smallest one is nearest
        const float scale = e8m0_half_to_f32(blocks[b].e);
        IntLanes q[32 / kLanes];
        for (int k = 0; k < 32 / kLanes; ++k) {
            q[k] = nearest_mxfp4(load_lanes(x + kLanes * k), scale);
        }
        uint8_t codes[32];
        store_bytes(q, codes);
        store_nibbles32(codes, blocks[b].qs);
    }
}

}  // namespace delta
