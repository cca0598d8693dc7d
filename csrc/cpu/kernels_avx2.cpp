// AVX2 with FMA and F16C: the common kernels at 8 lanes, and by hand what vector extensions cannot say, the integer products.
#define SIMD_WIDTH 8
#include "cpu/kernels.inc"

namespace delta {
namespace {
namespace avx2 {  // each has a portable twin of the same name in kernels_dot.inc

inline __m256i load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// 32 codes of 4 bits to int8: the low halves of 16 bytes, then the high halves.
inline __m256i mxfp4_values(const uint8_t* codes) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kMXFP4Values));
    const __m128i low = _mm_and_si128(packed, _mm_set1_epi8(15));
    const __m128i high = _mm_and_si128(_mm_srli_epi16(packed, 4), _mm_set1_epi8(15));
    return _mm256_set_m128i(_mm_shuffle_epi8(table, high), _mm_shuffle_epi8(table, low));
}

// Eight values at q, times d.
inline void store_scaled(float* dst, __m256 d, __m128i q) {
    _mm256_storeu_ps(dst, _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q))));
}

inline void store_block(float* dst, float scale, __m256i q) {
    const __m256 d = _mm256_set1_ps(scale);
    const __m128i low = _mm256_castsi256_si128(q);
    const __m128i high = _mm256_extracti128_si256(q, 1);
    store_scaled(dst, d, low);
    store_scaled(dst + 8, d, _mm_unpackhi_epi64(low, low));
    store_scaled(dst + 16, d, high);
    store_scaled(dst + 24, d, _mm_unpackhi_epi64(high, high));
}

struct Q8_0Row {
    static constexpr int64_t kDirectBytes = 0;
    static void decode(const uint8_t* row, int64_t first, int64_t n, float* dst) {
        const uint8_t* block = row + first / kQuantBlock * kQ8_0Bytes;
        for (int64_t b = 0; b < n; b += kQuantBlock, block += kQ8_0Bytes) {
            store_block(dst + b, half_to_float(load<uint16_t>(block)), load_bytes(block + 2));
        }
    }
};

struct MXFP4Row {
    static constexpr int64_t kDirectBytes = 0;
    static void decode(const uint8_t* row, int64_t first, int64_t n, float* dst) {
        const uint8_t* block = row + first / kQuantBlock * kMXFP4Bytes;
        for (int64_t b = 0; b < n; b += kQuantBlock, block += kMXFP4Bytes) {
            store_block(dst + b, kMXFP4Scales.of[block[0]], mxfp4_values(block + 1));
        }
    }
};

struct Q8_0Block {
    static constexpr int kBytes = kQ8_0Bytes;
    static float scale(const uint8_t* block) { return half_to_float(load<uint16_t>(block)); }
    static __m256i unpack(const uint8_t* block) { return load_bytes(block + 2); }
};

struct MXFP4Block {
    static constexpr int kBytes = kMXFP4Bytes;
    static float scale(const uint8_t* block) { return kMXFP4Scales.of[block[0]]; }
    static __m256i unpack(const uint8_t* block) { return mxfp4_values(block + 1); }
};

// 32 weights, and their products with 32 inputs as eight sums of four. Nothing can overflow: 4 * 128 * 32767 and, in the int16 sums
// of two that the second form makes, 2 * 128 * 127.
template <class Q>
struct Weights;

template <>
struct Weights<int16_t> {
    __m256i low, high;
    explicit Weights(__m256i q)
        : low(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(q))), high(_mm256_cvtepi8_epi16(_mm256_extracti128_si256(q, 1))) {}
    __m256i dot(const int16_t* x) const {
        return _mm256_add_epi32(_mm256_madd_epi16(low, load_bytes(x)), _mm256_madd_epi16(high, load_bytes(x + 16)));
    }
};

template <>
struct Weights<int8_t> {
    __m256i q, size;
    explicit Weights(__m256i weights) : q(weights), size(_mm256_abs_epi8(weights)) {}
    __m256i dot(const int8_t* x) const {
        return _mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8(load_bytes(x), q)), _mm256_set1_epi16(1));
    }
};

constexpr int kIntRows = 8;            // weight rows that meet the inputs while these are in the first-level cache
constexpr int kIntInputs = 4;
constexpr int64_t kIntPanel = 32;      // blocks, an even number

// Even and odd blocks are summed apart: one chain of additions would take longer than reading the weights.
template <class Block, class Q, int kInputs>
inline void panel_int(const uint8_t* block, const Q* const* x, const float* const* scales, int64_t n_blocks, Vec (*acc)[2]) {
    Vec sums[kInputs][2];
    memcpy(sums, acc, sizeof sums);
    const auto add = [&](int64_t b, int parity) __attribute__((always_inline)) {
        const Weights<Q> w(Block::unpack(block + b * Block::kBytes));
        const Vec d = splat(Block::scale(block + b * Block::kBytes));
        for (int j = 0; j < kInputs; ++j) {
            const Vec products = bits<Vec>(_mm256_cvtepi32_ps(w.dot(x[j] + b * kQuantBlock)));
            sums[j][parity] = fma(d * splat(scales[j][b]), products, sums[j][parity]);
        }
    };
    int64_t b = 0;
    for (; b + 2 <= n_blocks; b += 2) {
        add(b, 0);
        add(b + 1, 1);
    }
    if (b < n_blocks) {
        add(b, 0);
    }
    memcpy(acc, sums, sizeof sums);
}

template <class Block, class Q, int kInputs>
void group_int(const uint8_t* w, size_t w_stride, int32_t n_w, const void* const* x, int64_t n, float* const* out) {
    const int64_t n_blocks = n / kQuantBlock;
    // One input fits into the cache whole: then each weight row is read in one go, as the memory likes it.
    const int64_t panel = kInputs == 1 ? n_blocks : kIntPanel;
    for (int32_t i = 0; i < n_w; i += kIntRows) {
        const int32_t rows = n_w - i < kIntRows ? n_w - i : kIntRows;
        Vec acc[kIntRows][kInputs][2] = {};
        for (int64_t b = 0; b < n_blocks; b += panel) {
            const Q* q[kInputs];
            const float* scales[kInputs];
            for (int j = 0; j < kInputs; ++j) {
                q[j] = static_cast<const Q*>(x[j]) + b * kQuantBlock;
                scales[j] = reinterpret_cast<const float*>(static_cast<const Q*>(x[j]) + n) + b;
            }
            for (int32_t r = 0; r < rows; ++r) {
                panel_int<Block, Q, kInputs>(w + static_cast<size_t>(i + r) * w_stride + b * Block::kBytes, q, scales,
                                             n_blocks - b < panel ? n_blocks - b : panel, acc[r]);
            }
        }
        for (int32_t r = 0; r < rows; ++r) {
            for (int j = 0; j < kInputs; ++j) {
                out[j][i + r] = sum(acc[r][j][0] + acc[r][j][1]);
            }
        }
    }
}

template <class Block, class Q>
void dot_int(const uint8_t* w, size_t w_stride, int32_t n_w, const void* const* x, int32_t n_x, int64_t n, float* const* out) {
    int32_t j = 0;
    for (; j + kIntInputs <= n_x; j += kIntInputs) {
        group_int<Block, Q, kIntInputs>(w, w_stride, n_w, x + j, n, out + j);
    }
    for (; j + 2 <= n_x; j += 2) {
        group_int<Block, Q, 2>(w, w_stride, n_w, x + j, n, out + j);
    }
    if (j < n_x) {
        group_int<Block, Q, 1>(w, w_stride, n_w, x + j, n, out + j);
    }
}

}  // namespace avx2
}  // namespace

void kernels_init_avx2(CpuKernels& k) {
    enter_kernels(k, "avx2");
    enter_dot<avx2::Q8_0Row>(k, kQ8_0);
    enter_dot<avx2::MXFP4Row>(k, kMXFP4);
    k.dot[kInputI16][kQ8_0] = avx2::dot_int<avx2::Q8_0Block, int16_t>;
    k.dot[kInputI16][kMXFP4] = avx2::dot_int<avx2::MXFP4Block, int16_t>;
    k.dot[kInputI8][kQ8_0] = avx2::dot_int<avx2::Q8_0Block, int8_t>;
    k.dot[kInputI8][kMXFP4] = avx2::dot_int<avx2::MXFP4Block, int8_t>;
}

}  // namespace delta
