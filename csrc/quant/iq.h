// What the IQ types share: codebooks of short vectors (iq_grids.inc) and signs. A group of 32 values is four parts of 8; a part is one
// vector of 8 magnitudes or two of 4, and a sign per value.
#pragma once

#include "quant/block.h"

namespace delta {

#include "quant/iq_grids.inc"

static constexpr float kLevelsIQ1[4] = {-1, 0, 1, 0};  // two bits; the fourth is not used
static constexpr float kLevelsIQ2[4] = {8, 25, 43, 0};
static constexpr float kLevelsIQ3_XXS[8] = {4, 12, 20, 28, 36, 44, 52, 62};
static constexpr float kLevelsIQ3_S[8] = {1, 3, 5, 7, 9, 11, 13, 15};

// Value j of an entry of a codebook.
static inline float level8(const float* levels, uint32_t entry, int64_t j) { return levels[entry >> (2 * j) & 3]; }
static inline float level4(const float* levels, uint32_t entry, int64_t j) { return levels[entry >> (3 * j) & 7]; }

static inline float with_sign(float value, uint32_t signs, int64_t j) { return signs >> j & 1 ? -value : value; }

// Signs stored in 7 bits: the eighth makes the number of minus signs even.
static inline uint32_t even_signs(uint32_t seven) {
    constexpr uint32_t kOdd = 0x6996;  // bit i: whether i of four bits has an odd number of them
    seven &= 127;
    return seven | (kOdd >> ((seven ^ seven >> 4) & 15) & 1) << 7;
}

// A part of 8: scale * magnitude * sign.
static inline void decode_part8(const float* levels, uint32_t entry, uint32_t signs, float scale, float* dst) {
    for (int64_t j = 0; j < 8; ++j) {
        dst[j] = with_sign(scale * level8(levels, entry, j), signs, j);
    }
}

static inline void decode_part44(const float* levels, uint32_t first, uint32_t second, uint32_t signs, float scale, float* dst) {
    for (int64_t j = 0; j < 8; ++j) {
        dst[j] = with_sign(scale * level4(levels, j < 4 ? first : second, j % 4), signs, j);
    }
}

}  // namespace delta
