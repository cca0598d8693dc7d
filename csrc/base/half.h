// Scalar conversions between float32 and the 16-bit and 8-bit formats of tensor files: round to nearest even, exact subnormals,
// quiet NaNs. They are the definition; kernels may use the processor's instructions, which agree with it.
//
// Everything here is `static`: the files of one instruction set include this too, and the linker must never hand their copy of a
// shared function to the rest of the program.
#pragma once

#include <cstdint>
#include <cstring>

namespace delta {

static inline uint32_t f32_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float f32_from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// IEEE binary16: 1 sign, 5 exponent (bias 15), 10 fraction bits.
static inline float f16_to_f32(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t exponent = (half >> 10) & 31;
    const uint32_t fraction = half & 0x3ff;
    if (exponent == 31) {
        const uint32_t quiet = fraction != 0 ? 0x00400000 : 0;
        return f32_from_bits(sign | 0x7f800000 | quiet | fraction << 13);
    }
    if (exponent == 0) {
        const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
        return f32_from_bits(sign | f32_bits(magnitude));
    }
    return f32_from_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

static inline uint16_t f32_to_f16(float value) {
    const uint32_t bits = f32_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        return static_cast<uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
    }
    if (magnitude >= 0x477ff000) {  // 65520, halfway between the largest half and 2^16
        return static_cast<uint16_t>(sign | 0x7c00);
    }
    if (magnitude < 0x38800000) {  // below 2^-14 halves are multiples of 2^-24: the float addition rounds to one
        const float shifted = f32_from_bits(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (f32_bits(shifted) - 0x3f000000));
    }
    const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

// bfloat16: the upper half of a float32.
static inline float bf16_to_f32(uint16_t value) { return f32_from_bits(static_cast<uint32_t>(value) << 16); }

static inline uint16_t f32_to_bf16(float value) {
    const uint32_t bits = f32_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) {
        return static_cast<uint16_t>((bits >> 16) | 0x40);
    }
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Half of an E8M0 scale, 2^(code - 128): MXFP4 stores twice its values as integers. Code 255 is NaN.
static inline float e8m0_half_to_f32(uint8_t code) {
    if (code == 255) {
        return f32_from_bits(0x7fc00000);
    }
    return f32_from_bits(code < 2 ? 0x00200000u << code : static_cast<uint32_t>(code - 1) << 23);
}

}  // namespace delta
