// Q8_0: 32 values share one half-precision scale d; value j is d * qs[j].
#pragma once

#include "quant/block.h"
#include "quant/lanes.h"

namespace delta {

struct BlockQ8_0 {
    uint8_t d[2];   // f16
    int8_t qs[32];
};
static_assert(sizeof(BlockQ8_0) == 34 && alignof(BlockQ8_0) == 1);

static inline void to_float_q8_0(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockQ8_0*>(src);
    for (int64_t b = 0; b < n / 32; ++b) {
        const float d = load_f16(blocks[b].d);
        for (int64_t j = 0; j < 32; ++j) {
            dst[32 * b + j] = d * static_cast<float>(blocks[b].qs[j]);
        }
    }
}

// d = max |x| / 127; the codes use the unrounded d: round-half-away(x / d), the division as a product with 1 / d.
static inline void from_float_q8_0(const float* src, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockQ8_0*>(dst);
    for (int64_t b = 0; b < n / 32; ++b) {
        const float* x = src + 32 * b;
        const float d = largest_magnitude(x, 32) / 127.0f;
        const float inverse = finite_reciprocal(d);
        store_f16(blocks[b].d, d);
        IntLanes q[32 / kLanes];
        for (int k = 0; k < 32 / kLanes; ++k) {
            q[k] = round_away(load_lanes(x + kLanes * k) * inverse);
        }
        store_bytes(q, blocks[b].qs);
    }
}

}  // namespace delta
