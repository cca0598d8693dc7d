// Floats side by side, as many as the processor's vectors hold, on the compiler's vector extensions. Where sums matter, lane g belongs to
// group g of a block: the sum over a group runs in one lane, in order, and comes out the same at every width.
#pragma once

#ifdef __SSE2__
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace delta {
namespace {

#ifdef __AVX2__
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;  // wider vectors than the processor's would be taken apart
#endif
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));

inline Lanes splat(float value) { return value - Lanes{}; }
inline Lanes select(IntLanes mask, Lanes yes, Lanes no) { return mask ? yes : no; }
// a < b ? a : b and a > b ? a : b, as one instruction where there is one.
inline Lanes min(Lanes a, Lanes b) {
#if defined(__AVX2__)
    return _mm256_min_ps(a, b);
#elif defined(__SSE2__)
    return _mm_min_ps(a, b);
#else
    return select(a < b, a, b);
#endif
}

inline Lanes max(Lanes a, Lanes b) {
#if defined(__AVX2__)
    return _mm256_max_ps(a, b);
#elif defined(__SSE2__)
    return _mm_max_ps(a, b);
#else
    return select(a > b, a, b);
#endif
}

inline Lanes clamp(Lanes x, float low, float high) { return min(max(x, splat(low)), splat(high)); }
inline Lanes magnitude(Lanes x) { return (Lanes)((IntLanes)x & 0x7fffffff); }

// To the nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction.
inline Lanes round_even(Lanes x) { return (x + 12582912.0f) - 12582912.0f; }

// To the nearest integer, ties away from zero, for |x| < 2^31.
inline IntLanes round_away(Lanes x) {
    const IntLanes whole = __builtin_convertvector(x, IntLanes);
    const Lanes rest = x - __builtin_convertvector(whole, Lanes);
    return whole - (rest >= 0.5f) + (rest <= -0.5f);  // a true comparison is -1
}

inline Lanes load_lanes(const float* src) {
    Lanes x;
    std::memcpy(&x, src, sizeof x);
    return x;
}

// 32 integers that fit a signed byte, as bytes. By hand: compilers take them apart one by one.
inline void store_bytes(const IntLanes* values, void* dst) {
#if defined(__AVX2__)
    const auto* v = reinterpret_cast<const __m256i*>(values);
    const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));  // within halves
    const __m256i bytes = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(static_cast<__m256i*>(dst), bytes);
#elif defined(__SSE2__)
    const auto* v = reinterpret_cast<const __m128i*>(values);
    auto* out = static_cast<__m128i*>(dst);
    _mm_storeu_si128(out, _mm_packs_epi16(_mm_packs_epi32(v[0], v[1]), _mm_packs_epi32(v[2], v[3])));
    _mm_storeu_si128(out + 1, _mm_packs_epi16(_mm_packs_epi32(v[4], v[5]), _mm_packs_epi32(v[6], v[7])));
#else
    for (int i = 0; i < 32; ++i) {
        static_cast<int8_t*>(dst)[i] = static_cast<int8_t>(values[i / kLanes][i % kLanes]);
    }
#endif
}

// The codes of 32 values: the whole part of (x - low) * inverse + offset, `highest` at most.
inline void store_steps(const float* x, float low, float inverse, float offset, int32_t highest, uint8_t* codes) {
    IntLanes q[32 / kLanes];
    for (int k = 0; k < 32 / kLanes; ++k) {
        const IntLanes whole = __builtin_convertvector((load_lanes(x + kLanes * k) - low) * inverse + offset, IntLanes);
        q[k] = whole < highest ? whole : highest - IntLanes{};
    }
    store_bytes(q, codes);
}

// a / b, and 0 where b is 0.
inline Lanes ratio(Lanes a, Lanes b) { return select(b != 0, a / select(b != 0, b, splat(1)), Lanes{}); }

// The sum of n vectors, lane by lane in order.
inline float sum(const Lanes* x, int n) {
    float total = 0;
    for (int i = 0; i < n * kLanes; ++i) {
        total += x[i / kLanes][i % kLanes];
    }
    return total;
}

// n groups of N consecutive values to lanes: x[j][g] = src[g * N + j]. Missing groups are zeros.
template <int N>
inline void load_groups(const float* src, int64_t n, Lanes* x) {
    alignas(sizeof(Lanes)) float values[N][kLanes] = {};
    for (int64_t g = 0; g < n; ++g) {
        for (int j = 0; j < N; ++j) {
            values[j][g] = src[g * N + j];
        }
    }
    std::memcpy(x, values, sizeof values);
}

// The way back, as integers.
template <int N>
inline void store_groups(const Lanes* q, int32_t* dst) {
    for (int j = 0; j < N; ++j) {
        const IntLanes whole = __builtin_convertvector(q[j], IntLanes);
        for (int g = 0; g < kLanes; ++g) {
            dst[g * N + j] = whole[g];
        }
    }
}

}  // namespace
}  // namespace delta
