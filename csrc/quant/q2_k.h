// Q2_K: 256 values in 16 groups of 16; value i of group g is d * scale[g] * q - dmin * min[g], q of 2 bits, scales and minima of 4.
#pragma once

#include "quant/block.h"
#include "quant/fit_super.h"

namespace delta {

struct BlockQ2_K {
    uint8_t scales[16];  // scale low, minimum high
    uint8_t qs[64];      // code_2bit
    uint8_t d[2];        // f16
    uint8_t dmin[2];     // f16
};
static_assert(sizeof(BlockQ2_K) == 84 && alignof(BlockQ2_K) == 1);

// Two-bit codes of 256 values (Q2_K, Q3_K): value 128 h + 32 l + m in bits 2 l of byte 32 h + m.
static inline int32_t code_2bit(const uint8_t* qs, int64_t i) { return qs[i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3; }

static inline void store_codes_2bit(uint8_t* qs, const int32_t* q) {
    for (int64_t k = 0; k < 64; ++k) {
        const int32_t* of = q + k / 32 * 128 + k % 32;
        qs[k] = static_cast<uint8_t>((of[0] & 3) | (of[32] & 3) << 2 | (of[64] & 3) << 4 | (of[96] & 3) << 6);
    }
}

static inline void to_float_q2_k(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockQ2_K*>(src);
    for (int64_t b = 0; b < n / 256; ++b) {
        const float d = load_f16(blocks[b].d), dmin = load_f16(blocks[b].dmin);
        for (int64_t g = 0; g < 16; ++g) {
            const float step = d * static_cast<float>(blocks[b].scales[g] & 15), low = dmin * static_cast<float>(blocks[b].scales[g] >> 4);
            for (int64_t j = 0; j < 16; ++j) {
                dst[256 * b + 16 * g + j] = step * static_cast<float>(code_2bit(blocks[b].qs, 16 * g + j)) - low;
            }
        }
    }
}

static inline void from_weighted_q2_k(const float* src, const float* importance, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockQ2_K*>(dst);
    for (int64_t b = 0; b < n / 256; ++b) {
        SuperBlock<16> block;
        block.load(src + 256 * b, importance == nullptr ? nullptr : importance + 256 * b);
        const auto fit = fit_affine_super<16>(block, 3, 15, 12, 0.15f);
        int32_t scales[16], mins[16], q[256];
        store_scales<16>(fit.scales, scales);
        store_scales<16>(fit.mins, mins);
        store_codes<16>(block, q);
        store_f16(blocks[b].d, fit.d);
        store_f16(blocks[b].dmin, fit.dmin);
        for (int64_t g = 0; g < 16; ++g) {
            blocks[b].scales[g] = static_cast<uint8_t>(scales[g] | mins[g] << 4);
        }
        store_codes_2bit(blocks[b].qs, q);
    }
}

static inline void from_float_q2_k(const float* src, void* dst, int64_t n) { from_weighted_q2_k(src, nullptr, dst, n); }

}  // namespace delta
