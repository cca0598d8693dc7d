// NEON with products of matrices of bytes (FEAT_I8MM), and dot products.
//
// An instruction multiplies two inputs with two weight rows, eight columns of each. Inputs are split into a signed upper and an unsigned
// lower byte, value = 256 * high + low; codes of all types fit a signed byte. The integer sums are those of kernels_int.inc, and what
// follows keeps its order, so that no bit of a result tells which way it was made.
#define SIMD_WIDTH 4
#define SIMD_NEON
#include "cpu/kernels.inc"

namespace delta {
namespace {

// Eight weight rows, taken apart: codes in pieces of eight columns, so that two rows are a register.
template <class Type>
struct BytePanel {
    static constexpr int kGroups = kPanelColumns / Type::kGroup;
    alignas(16) int8_t codes[kPanelColumns / 8][kRows8][8];
    alignas(16) float scale[kGroups][kRows8];
    alignas(16) float least[Type::kMinima ? kGroups : 1][kRows8];

    // Columns first .. first + n - 1, whole blocks, of the rows from i on; beyond the last row, the last one again.
    void read(const uint8_t* w, size_t w_stride, int32_t i, int32_t n_w, int64_t first, int64_t n) {
        const uint8_t* rows[kRows8];
        point_at_rows<kRows8>(w, w_stride, i, n_w, rows);
        auto at = static_cast<size_t>(first / Type::kColumns) * Type::kBytes;
        for (int64_t c = 0; c < n; c += Type::kColumns, at += Type::kBytes) {
            for (int g = 0; g < Type::kColumns / 32; ++g) {
                for (int r = 0; r < kRows8; ++r) {
                    const Bytes32 of_row = Type::group(rows[r] + at, g) - Type::kZero;
                    int8_t q[4][8];
                    memcpy(q, &of_row, sizeof q);
                    for (int piece = 0; piece < 4; ++piece) {
                        memcpy(codes[(c + 32 * g) / 8 + piece][r], q[piece], 8);
                    }
                }
            }
            Factors8<Type> factors;
            factors.read(rows, at);
            memcpy(scale[c / Type::kGroup], factors.scale, sizeof factors.scale);
            if constexpr (Type::kMinima) {
                memcpy(least[c / Type::kGroup], factors.least, sizeof factors.least);
            }
        }
    }
};

// The panel's columns, first .. first + n - 1 of the rows, added to what the outputs' rows i .. i + n_rows - 1 hold, for n_x inputs,
// at most two for each of kPairs.
template <class Type, int kPairs>
inline void byte_panel_to_outputs(const BytePanel<Type>& panel, const void* const* x, int32_t n_x, int64_t n_columns, int64_t first,
                                  int64_t n, int32_t i, int32_t n_rows, float* const* out) {
    RoundedInput in[2 * kPairs];
    float acc[2 * kPairs][kRows8] = {};
    for (int j = 0; j < 2 * kPairs; ++j) {
        in[j] = RoundedInput(x[j < n_x ? j : n_x - 1], n_columns);
        if (first > 0 && j < n_x) {
            memcpy(acc[j], out[j] + i, static_cast<size_t>(n_rows) * sizeof(float));
        }
    }
    for (int64_t c = 0; c < n; c += Type::kGroup) {
        int32x4_t high[kPairs][4] = {}, low[kPairs][4] = {};  // input 0 of the pair with rows 2 v and 2 v + 1, then input 1
        for (int64_t k = c; k < c + Type::kGroup; k += 8) {
            int8x16_t w[4];
            memcpy(w, panel.codes[k / 8], sizeof w);
            for (int p = 0; p < kPairs; ++p) {
                const int16x8_t one = vld1q_s16(in[2 * p].q + first + k), two = vld1q_s16(in[2 * p + 1].q + first + k);
                const int8x16_t upper = vuzp2q_s8(vreinterpretq_s8_s16(one), vreinterpretq_s8_s16(two));
                const uint8x16_t lower = vuzp1q_u8(vreinterpretq_u8_s16(one), vreinterpretq_u8_s16(two));
                for (int v = 0; v < 4; ++v) {
                    high[p][v] = vmmlaq_s32(high[p][v], upper, w[v]);
                    low[p][v] = vusmmlaq_s32(low[p][v], lower, w[v]);
                }
            }
        }
        for (int p = 0; p < kPairs; ++p) {
            for (int four = 0; four < 2; ++four) {  // rows 4 * four .. 4 * four + 3
                const auto whole = [&](int v) { return vreinterpretq_s64_s32(vaddq_s32(vshlq_n_s32(high[p][v], 8), low[p][v])); };
                const int64x2_t ahead = whole(2 * four), behind = whole(2 * four + 1);
                const int32x4_t sums[2] = {vreinterpretq_s32_s64(vzip1q_s64(ahead, behind)), vreinterpretq_s32_s64(vzip2q_s64(ahead, behind))};
                const float32x4_t scale = vld1q_f32(panel.scale[c / Type::kGroup] + 4 * four);
                for (int j = 0; j < 2; ++j) {
                    const RoundedInput& of = in[2 * p + j];
                    float* const total = acc[2 * p + j] + 4 * four;
                    const float32x4_t factor = vmulq_n_f32(scale, of.scales[(first + c) / kInputBlock]);
                    float32x4_t sum = vfmaq_f32(vld1q_f32(total), vcvtq_f32_s32(sums[j]), factor);
                    if constexpr (Type::kMinima) {
                        const float32x4_t least = vld1q_f32(panel.least[c / Type::kGroup] + 4 * four);
                        sum = vfmaq_f32(sum, vnegq_f32(least), vdupq_n_f32(of.template sum<Type::kGroup>(first + c)));
                    }
                    vst1q_f32(total, sum);
                }
            }
        }
    }
    for (int j = 0; j < n_x; ++j) {
        memcpy(out[j] + i, acc[j], static_cast<size_t>(n_rows) * sizeof(float));
    }
}

template <class Type>
void dot_i8mm(const uint8_t* w, size_t w_stride, int32_t n_w, const void* const* x, int32_t n_x, int64_t n, float* const* out) {
    static_assert(kPanelColumns % Type::kColumns == 0);
    if (n_x < kPanelFrom) {
        dot_int<Type>(w, w_stride, n_w, x, n_x, n, out);
        return;
    }
    BytePanel<Type> panel;
    for (int32_t i = 0; i < n_w; i += kRows8) {
        const int32_t n_rows = n_w - i < kRows8 ? n_w - i : kRows8;
        for (int64_t c = 0; c < n; c += kPanelColumns) {
            const int64_t len = n - c < kPanelColumns ? n - c : kPanelColumns;
            panel.read(w, w_stride, i, n_w, c, len);
            int32_t j = 0;
            for (; j + 4 <= n_x; j += 4) {
                byte_panel_to_outputs<Type, 2>(panel, x + j, 4, n, c, len, i, n_rows, out + j);
            }
            for (; j < n_x; j += 2) {
                byte_panel_to_outputs<Type, 1>(panel, x + j, n_x - j < 2 ? 1 : 2, n, c, len, i, n_rows, out + j);
            }
        }
    }
}

template <class Type>
void enter_i8mm(CpuKernels& kernels, CpuType type) {
    kernels.dot[type] = kernels.dot_i8[type] = dot_i8mm<Type>;
}

}  // namespace

void kernels_init_neon_i8mm(CpuKernels& kernels) {
    enter_kernels(kernels, "neon_i8mm");
    enter_i8mm<Q4_0Codes>(kernels, kQ4_0);
    enter_i8mm<Q4_1Codes>(kernels, kQ4_1);
    enter_i8mm<Q5_0Codes>(kernels, kQ5_0);
    enter_i8mm<Q5_1Codes>(kernels, kQ5_1);
    enter_i8mm<Q8_0Codes>(kernels, kQ8_0);
    enter_i8mm<Q2_KCodes>(kernels, kQ2_K);
    enter_i8mm<Q3_KCodes>(kernels, kQ3_K);
    enter_i8mm<Q4_KCodes>(kernels, kQ4_K);
    enter_i8mm<Q5_KCodes>(kernels, kQ5_K);
    enter_i8mm<Q6_KCodes>(kernels, kQ6_K);
    enter_i8mm<IQ4_NLCodes>(kernels, kIQ4_NL);
    enter_i8mm<IQ4_XSCodes>(kernels, kIQ4_XS);
    enter_i8mm<MXFP4Codes>(kernels, kMXFP4);
}

}  // namespace delta
