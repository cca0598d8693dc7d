// IQ4_NL: 32 values share one half-precision scale d; value j is d times one of 16 unevenly spaced values.
#pragma once

#include "quant/block.h"
#include "quant/fit_blocks.h"

namespace delta {

struct BlockIQ4_NL {
    uint8_t d[2];    // f16
    uint8_t qs[16];  // nibble32
};
static_assert(sizeof(BlockIQ4_NL) == 18 && alignof(BlockIQ4_NL) == 1);

static constexpr int8_t kIQ4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static inline void to_float_iq4_nl(const void* src, float* dst, int64_t n) {
    const auto* blocks = static_cast<const BlockIQ4_NL*>(src);
    for (int64_t b = 0; b < n / 32; ++b) {
        const float d = load_f16(blocks[b].d);
        for (int64_t j = 0; j < 32; ++j) {
            dst[32 * b + j] = d * static_cast<float>(kIQ4Values[nibble32(blocks[b].qs, j)]);
        }
    }
}

namespace {

// The 16 values as codes for the search of fit.h (IQ4_NL, IQ4_XS).
struct IQ4Codes {
    float lowest() const { return kIQ4Values[0]; }
    Lanes nearest(Lanes x) const {
        Lanes value = splat(kIQ4Values[0]);
        for (int k = 1; k < 16; ++k) {
            const float beyond = 0.5f * static_cast<float>(kIQ4Values[k - 1] + kIQ4Values[k]);
            value = select(x > splat(beyond), splat(kIQ4Values[k]), value);
        }
        return value;
    }
};

// From a value to its code.
struct IQ4Index {
    uint8_t of_value[256] = {};  // at value + 128
    constexpr IQ4Index() {
        for (uint8_t k = 0; k < 16; ++k) {
            of_value[kIQ4Values[k] + 128] = k;
        }
    }
};
constexpr IQ4Index kIQ4Index;

inline uint8_t iq4_index(int32_t value) { return kIQ4Index.of_value[value + 128]; }

}  // namespace

static inline void from_weighted_iq4_nl(const float* src, const float* importance, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockIQ4_NL*>(dst);
    fit_scaled_blocks(IQ4Codes{}, src, importance, n, 6, 2.0f, [blocks](int64_t b, float d, const int32_t* q) {
        store_f16(blocks[b].d, d);
        uint8_t codes[32];
        for (int64_t j = 0; j < 32; ++j) {
            codes[j] = iq4_index(q[j]);
        }
        store_nibbles32(codes, blocks[b].qs);
    });
}

static inline void from_float_iq4_nl(const float* src, void* dst, int64_t n) { from_weighted_iq4_nl(src, nullptr, dst, n); }

}  // namespace delta
