// Reading and writing the fields of a block. Blocks are structs of bytes, because rows may start at any address; fields of two or
// four bytes are little-endian.
//
// Everything in this folder's type headers is `static` or in an unnamed namespace: they are compiled once per instruction set, and the
// linker must never hand one copy to the rest of the program.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/half.h"

namespace delta {

static inline uint16_t load_u16(const uint8_t* p) {
    uint16_t value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

static inline uint32_t load_u32(const uint8_t* p) {
    uint32_t value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

static inline void store_u16(uint8_t* p, uint16_t value) { std::memcpy(p, &value, sizeof value); }
static inline void store_u32(uint8_t* p, uint32_t value) { std::memcpy(p, &value, sizeof value); }

static inline float load_f16(const uint8_t* p) { return f16_to_f32(load_u16(p)); }

static inline void store_f16(uint8_t* p, float value) { store_u16(p, f32_to_f16(value)); }

// A value as its f16 will be read, the largest finite one at most.
static inline float as_f16(float value) {
    value = value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value;
    return f16_to_f32(f32_to_f16(value));
}

// The same for the factor of a super-block, which small integers multiply. Where halves are subnormal, and so as coarse as the factor
// itself, it is rounded away from zero: then the integers still reach the group with the largest scale.
static inline float factor_as_f16(float value) {
    const float magnitude = __builtin_fabsf(value);
    if (magnitude < 0x1p-14f) {
        return __builtin_copysignf(__builtin_ceilf(magnitude * 0x1p24f) * 0x1p-24f, value);
    }
    return as_f16(value);
}

// Four-bit codes of 32 values in 16 bytes: value j < 16 in the low half of byte j, value j + 16 in its high half.
static inline int32_t nibble32(const uint8_t* qs, int64_t j) { return j < 16 ? qs[j] & 15 : qs[j - 16] >> 4; }

// 32 codes of four bits, one per byte, as nibble32 finds them.
static inline void store_nibbles32(const uint8_t* q, uint8_t* qs) {
    uint64_t codes[4];  // eight at a time: no code reaches into the next byte
    std::memcpy(codes, q, sizeof codes);
    const uint64_t packed[2] = {codes[0] | codes[2] << 4, codes[1] | codes[3] << 4};
    std::memcpy(qs, packed, sizeof packed);
}

// 1 / d, and 0 where that is not finite: such a d is zero as an f16, so every code decodes to zero (or to the block's minimum).
static inline float finite_reciprocal(float d) {
    const float inverse = 1.0f / d;
    return (f32_bits(inverse) & 0x7f800000) == 0x7f800000 ? 0.0f : inverse;
}

// max |x| of n values as the bits of a float: integers compare like magnitudes, so that the compiler makes vectors of it, and
// infinity and NaN come out on top.
static inline uint32_t largest_bits(const float* x, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t magnitude = f32_bits(x[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

static inline float largest_magnitude(const float* x, int64_t n) { return f32_from_bits(largest_bits(x, n)); }

// The first value of the largest magnitude, with its sign.
static inline float first_extreme(const float* x, int64_t n) {
    const uint32_t largest = largest_bits(x, n);
    uint32_t positive = 0, negative = 0;
    for (int64_t i = 0; i < n; ++i) {
        positive |= f32_bits(x[i]) == largest;
        negative |= f32_bits(x[i]) == (largest | 0x80000000);
    }
    if (positive & negative) {
        int64_t i = 0;
        while ((f32_bits(x[i]) & 0x7fffffff) != largest) {
            ++i;
        }
        return x[i];
    }
    return f32_from_bits(positive ? largest : largest | 0x80000000);
}

}  // namespace delta
