// TQ1_0: 256 values share one half-precision scale d; value i is d * (q - 1), q = 0, 1, 2, five of them in a byte. The byte is their
// number in base 3, the first digit highest, scaled to 256 / 243 and rounded up: times 3^k it shows digit k above its top bit.
#pragma once

#include "quant/tq2_0.h"

namespace delta {

struct BlockTQ1_0 {
    uint8_t qs[48];  // byte m < 32: values m, 32 + m, ... 128 + m; byte 32 + m: 160 + m, 176 + m, ... 224 + m
    uint8_t qh[4];   // byte m: values 240 + m, 244 + m, 248 + m, 252 + m
    uint8_t d[2];    // f16
};
static_assert(sizeof(BlockTQ1_0) == 54 && alignof(BlockTQ1_0) == 1);

static inline void to_float_tq1_0(const void* src, float* dst, int64_t n) {
    constexpr uint8_t kPowers[5] = {1, 3, 9, 27, 81};
    const auto* blocks = static_cast<const BlockTQ1_0*>(src);
    for (int64_t b = 0; b < n / 256; ++b) {
        const float d = load_f16(blocks[b].d);
        float* y = dst + 256 * b;
        const auto digits = [&](const uint8_t* bytes, int64_t n_bytes, int64_t n_digits) {
            for (int64_t k = 0; k < n_digits; ++k) {
                for (int64_t m = 0; m < n_bytes; ++m) {
                    const auto shifted = static_cast<uint8_t>(bytes[m] * kPowers[k]);
                    *y++ = d * static_cast<float>((shifted * 3 >> 8) - 1);
                }
            }
        };
        digits(blocks[b].qs, 32, 5);
        digits(blocks[b].qs + 32, 16, 5);
        digits(blocks[b].qh, 4, 4);
    }
}

static inline void from_float_tq1_0(const float* src, void* dst, int64_t n) {
    auto* blocks = static_cast<BlockTQ1_0*>(dst);
    for (int64_t b = 0; b < n / 256; ++b) {
        uint8_t codes[256];
        store_f16(blocks[b].d, ternary_codes(src + 256 * b, codes));
        const uint8_t* q = codes;
        const auto pack = [&q](uint8_t* bytes, int64_t n_bytes, int64_t n_digits) {
            for (int64_t m = 0; m < n_bytes; ++m) {
                int32_t number = 0;
                for (int64_t k = 0; k < 5; ++k) {
                    number = 3 * number + (k < n_digits ? q[k * n_bytes + m] : 0);
                }
                bytes[m] = static_cast<uint8_t>((number * 256 + 242) / 243);
            }
            q += n_bytes * n_digits;
        };
        pack(blocks[b].qs, 32, 5);
        pack(blocks[b].qs + 32, 16, 5);
        pack(blocks[b].qh, 4, 4);
    }
}

}  // namespace delta
