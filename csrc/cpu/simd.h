// Vectors of SIMD_WIDTH floats (4, 8 or 16) on the compiler's vector extensions, and the functions of one variable that kernels
// need. Included once by each ISA file, after SIMD_WIDTH is defined; everything has internal linkage.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(SIMD_NEON)  // not what the compiler may use anyway: the portable kernels stay what their source says
#include <arm_neon.h>
#endif

namespace delta {
namespace {

constexpr int kWidth = SIMD_WIDTH;

typedef float Vec __attribute__((vector_size(4 * SIMD_WIDTH)));
typedef int32_t IVec __attribute__((vector_size(4 * SIMD_WIDTH)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * SIMD_WIDTH)));  // float16 or bfloat16
typedef int8_t ByteVec __attribute__((vector_size(SIMD_WIDTH)));
// As many float64 lanes take two vectors of the same size; FloatHalf are the float32 lanes of one of them.
typedef double DoubleHalf __attribute__((vector_size(4 * SIMD_WIDTH)));
typedef float FloatHalf __attribute__((vector_size(2 * SIMD_WIDTH)));
struct DoubleVec {
    DoubleHalf low, high;
};

// Reinterprets bits.
template <class To, class From>
inline To bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

inline Vec splat(float x) { return x - Vec{}; }

#if defined(SIMD_NEON)
// Two registers as one vector of twice their size, and the way back.
template <class V>
struct Two {
    V low, high;
};
template <class To, class V>
inline To join(V low, V high) {
    return bits<To>(Two<V>{low, high});
}
template <class V, class From>
inline Two<V> parts_of(From x) {
    return bits<Two<V>>(x);
}
#endif

template <class V = Vec>
inline V load(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

// The first n lanes; the others are zero, or left alone.
inline Vec load_part(const float* p, int64_t n) {
    Vec v = {};
    memcpy(&v, p, static_cast<size_t>(n) * sizeof(float));
    return v;
}
inline void store_part(float* p, Vec v, int64_t n) { memcpy(p, &v, static_cast<size_t>(n) * sizeof(float)); }

// The same where there are mostly n >= kWidth lanes to go.
inline Vec load_up_to(const float* p, int64_t n) { return n >= kWidth ? load(p) : load_part(p, n); }
inline void store_up_to(float* p, Vec v, int64_t n) {
    if (n >= kWidth) {
        store(p, v);
    } else {
        store_part(p, v, n);
    }
}

// a * b + c; rounded once where the ISA has such an instruction. Written out, because contraction is off: it would be up to the
// compiler whether two copies of a loop round alike.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__FMA__) && SIMD_WIDTH == 8
    return bits<Vec>(_mm256_fmadd_ps(bits<__m256>(a), bits<__m256>(b), bits<__m256>(c)));
#elif defined(__AVX512F__) && SIMD_WIDTH == 16
    return bits<Vec>(_mm512_fmadd_ps(bits<__m512>(a), bits<__m512>(b), bits<__m512>(c)));
#elif defined(SIMD_NEON)
    return bits<Vec>(vfmaq_f32(bits<float32x4_t>(c), bits<float32x4_t>(a), bits<float32x4_t>(b)));
#else
    return a * b + c;
#endif
}

inline DoubleVec operator+(DoubleVec a, DoubleVec b) { return {a.low + b.low, a.high + b.high}; }

inline DoubleVec load(const double* p) { return {load<DoubleHalf>(p), load<DoubleHalf>(p + kWidth / 2)}; }

#if SIMD_WIDTH == 4
#define LOW_LANES 0, 1
#define HIGH_LANES 2, 3
#elif SIMD_WIDTH == 8
#define LOW_LANES 0, 1, 2, 3
#define HIGH_LANES 4, 5, 6, 7
#else
#define LOW_LANES 0, 1, 2, 3, 4, 5, 6, 7
#define HIGH_LANES 8, 9, 10, 11, 12, 13, 14, 15
#endif

inline DoubleVec to_double(Vec x) {
    return {__builtin_convertvector(__builtin_shufflevector(x, x, LOW_LANES), DoubleHalf),
            __builtin_convertvector(__builtin_shufflevector(x, x, HIGH_LANES), DoubleHalf)};
}

inline DoubleHalf fma(DoubleHalf a, DoubleHalf b, DoubleHalf c) {
#if defined(__FMA__) && SIMD_WIDTH == 8
    return bits<DoubleHalf>(_mm256_fmadd_pd(bits<__m256d>(a), bits<__m256d>(b), bits<__m256d>(c)));
#elif defined(__AVX512F__) && SIMD_WIDTH == 16
    return bits<DoubleHalf>(_mm512_fmadd_pd(bits<__m512d>(a), bits<__m512d>(b), bits<__m512d>(c)));
#elif defined(SIMD_NEON)
    return bits<DoubleHalf>(vfmaq_f64(bits<float64x2_t>(c), bits<float64x2_t>(a), bits<float64x2_t>(b)));
#else
    return a * b + c;
#endif
}
inline DoubleVec fma(DoubleVec a, DoubleVec b, DoubleVec c) { return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)}; }

// Halves added pairwise, always in this order.
template <class V>
inline auto sum_lanes(V v) {
    constexpr int kLanes = sizeof(V) / sizeof(v[0]);
    static_assert(kLanes == 2 || kLanes == 4 || kLanes == 8);
    if constexpr (kLanes == 2) {
        return v[0] + v[1];
    } else if constexpr (kLanes == 4) {
        return (v[0] + v[2]) + (v[1] + v[3]);
    } else {
        return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
    }
}
inline float sum(Vec v) {
    return sum_lanes(__builtin_shufflevector(v, v, LOW_LANES) + __builtin_shufflevector(v, v, HIGH_LANES));
}
inline double sum(DoubleHalf v) { return sum_lanes(v); }
inline double sum(DoubleVec v) { return sum_lanes(v.low + v.high); }

// Of two numbers; b if either is NaN.
template <class V>
inline V larger(V a, V b) {
    return a > b ? a : b;
}

// The largest lane of a vector without NaN.
template <class V>
inline float max_lane(V v) {
    if constexpr (sizeof(V) == 64) {
        return max_lane(larger(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                               __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15)));
    } else if constexpr (sizeof(V) == 32) {
        return max_lane(larger(__builtin_shufflevector(v, v, 0, 1, 2, 3), __builtin_shufflevector(v, v, 4, 5, 6, 7)));
    } else {
        const V pairs = larger(v, __builtin_shufflevector(v, v, 2, 3, 0, 1));
        return pairs[0] > pairs[1] ? pairs[0] : pairs[1];
    }
}

inline Vec magnitude(Vec x) { return bits<Vec>(bits<IVec>(x) & INT32_MAX); }

inline float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#elif defined(SIMD_NEON)
    return static_cast<float>(bits<__fp16>(h));
#else
    const uint32_t magnitude_bits = (h & 0x7fffU) << 13;
    // Scaling by 2^112 moves the exponent and normalises subnormals; infinity and NaN keep their all-ones exponent.
    const float scaled = (h & 0x7c00U) == 0x7c00U ? bits<float>(magnitude_bits | 0x7f800000U) : bits<float>(magnitude_bits) * 0x1p112F;
    return bits<float>(bits<uint32_t>(scaled) | (h & 0x8000U) << 16);
#endif
}

inline Vec half_to_float(HalfVec h) {
#if defined(__F16C__) && SIMD_WIDTH == 8
    return bits<Vec>(_mm256_cvtph_ps(bits<__m128i>(h)));
#elif defined(__AVX512F__) && SIMD_WIDTH == 16
    return bits<Vec>(_mm512_cvtph_ps(bits<__m256i>(h)));
#elif defined(SIMD_NEON)
    return bits<Vec>(vcvt_f32_f16(bits<float16x4_t>(h)));
#else
    const IVec wide = __builtin_convertvector(h, IVec);
    const IVec magnitude_bits = (wide & 0x7fff) << 13;
    const IVec special = (wide & 0x7c00) == 0x7c00;
    const IVec scaled = bits<IVec>(bits<Vec>(magnitude_bits) * 0x1p112F);
    return bits<Vec>((special ? magnitude_bits | 0x7f800000 : scaled) | (wide & 0x8000) << 16);
#endif
}

inline Vec bf16_to_float(HalfVec h) { return bits<Vec>(__builtin_convertvector(h, IVec) << 16); }

// Nearest integer, ties to even, for |x| < 2^22.
inline IVec round_to_int(Vec x) {
    const Vec shifted = x + 0x1.8p23F;
    return bits<IVec>(shifted) - bits<IVec>(splat(0x1.8p23F));
}

// e^x within 1 ulp, 0 and infinity at the ends, NaN for NaN.
inline Vec exp(Vec x) {
    // Comparisons are written so that NaN passes through.
    x = x > 89.0F ? splat(89.0F) : x;
    x = x < -105.0F ? splat(-105.0F) : x;
    const Vec n = (x * 0x1.715476p0F + 0x1.8p23F) - 0x1.8p23F;
    // x - n ln 2 in two parts; the first has 9 bits to spare, so n times it is exact.
    const Vec r = fma(n, splat(-0x1.7f7d1cp-20F), fma(n, splat(-0x1.62e4p-1F), x));
    Vec p = splat(1.0F / 5040);
    p = fma(p, r, splat(1.0F / 720));
    p = fma(p, r, splat(1.0F / 120));
    p = fma(p, r, splat(1.0F / 24));
    p = fma(p, r, splat(1.0F / 6));
    p = fma(p, r, splat(0.5F));
    p = fma(p * r, r, r) + 1.0F;
    // 2^n in two steps: n reaches 128 and -151, beyond the exponents of a float.
    const IVec ni = round_to_int(n);
    const IVec half = ni >> 1;
    return p * bits<Vec>((half + 127) << 23) * bits<Vec>((ni - half + 127) << 23);
}

// 1 / (1 + e^-x), and for negative x e^x / (1 + e^x), which stays exact to the smallest results.
inline Vec sigmoid(Vec x) {
    const Vec e = exp(-magnitude(x));
    return (x < 0.0F ? e : splat(1.0F)) / (1.0F + e);
}

inline Vec tanh(Vec x) {
    const Vec t = magnitude(x);
    const Vec z = t * t;
    // Near 0 a convergent of Lambert's continued fraction x / (1 + z / (3 + z / (5 + ...))): relative error below 1e-8 here.
    const Vec small = t * fma(z + 105.0F, z, splat(945.0F)) / fma(fma(splat(15.0F), z, splat(420.0F)), z, splat(945.0F));
    const Vec large = 1.0F - 2.0F / (exp(2.0F * t) + 1.0F);
    const Vec y = t < 0.625F ? small : large;
    return x < 0.0F ? -y : y;
}

// log(1 + e^x) = max(x, 0) + log1p(y), y = e^-|x|; log1p(y) = 2 artanh(s), s = y / (2 + y) <= 1/3, as its power series.
inline Vec softplus(Vec x) {
    const Vec y = exp(-magnitude(x));
    const Vec s = y / (2.0F + y);
    const Vec z = s * s;
    Vec p = splat(1.0F / 15);
    p = fma(p, z, splat(1.0F / 13));
    p = fma(p, z, splat(1.0F / 11));
    p = fma(p, z, splat(1.0F / 9));
    p = fma(p, z, splat(1.0F / 7));
    p = fma(p, z, splat(1.0F / 5));
    p = fma(p, z, splat(1.0F / 3));
    p = 2.0F * fma(p * z, s, s);
    return (x > 0.0F ? x : Vec{}) + p;
}

}  // namespace
}  // namespace delta
