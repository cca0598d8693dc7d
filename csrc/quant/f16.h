// F16: IEEE binary16. Rows may start at any address.
#pragma once

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "quant/block.h"

namespace delta {

static inline void to_float_f16(const void* src, float* dst, int64_t n) {
    const auto* bytes = static_cast<const uint8_t*>(src);
    int64_t i = 0;
#ifdef __F16C__  // the processor's conversion, which agrees with half.h
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + 2 * i))));
    }
#endif
    for (; i < n; ++i) {
        dst[i] = load_f16(bytes + 2 * i);
    }
}

static inline void from_float_f16(const float* src, void* dst, int64_t n) {
    auto* bytes = static_cast<uint8_t*>(dst);
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8) {
        const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + 2 * i), half);
    }
#endif
    for (; i < n; ++i) {
        store_f16(bytes + 2 * i, src[i]);
    }
}

}  // namespace delta
