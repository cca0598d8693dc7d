// The table of CPU kernels. Everything that is compiled per instruction set is reached through it, and only through it.
//
// Included by the ISA files, which may include nothing of the engine but this and simd.h: a shared inline function would be compiled
// once per ISA, and the linker could keep the copy that the running processor cannot execute. Functions here are static.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace delta {

// Encodings of weights that kernels exist for: floating point, then small integers with scales. Other types are decoded first.
enum CpuType {
    kF32, kF16, kBF16,
    kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_NL, kIQ4_XS, kMXFP4,
    kCpuTypes
};
constexpr int kFloatTypes = kQ4_0;  // the first so many

// Encodings of the other factor of a product. Floating-point weights take floats; the integers take int16 of 16 or of 8 bits, in this
// order: n int16; n / 32 float scales, value = scales[i / 32] * q[i]; n / 16 floats, the scale times the sum of 16 integers; n / 32
// InputBytes.
enum CpuInput { kInputF32, kInputI16, kInputI8, kCpuInputs };
static constexpr bool rounds_input(CpuInput kind) { return kind != kInputF32; }

constexpr int32_t kInputBlock = 32;   // values that share a scale

// The same integers once more as bytes, 256 * high + low, and the sums of each half.
struct InputBytes {
    int8_t high[kInputBlock];
    int8_t low[kInputBlock];
    int32_t sums[2];
};
constexpr int32_t kMostInt16 = 127 * 256 + 127;  // so that both bytes fit

// A row of n rounded inputs: what lies where.
struct RoundedRow {
    int16_t* q;
    float* scales;
    float* sums;
    InputBytes* bytes;
};
static inline RoundedRow rounded_row(void* row, int64_t n) {
    RoundedRow r;
    r.q = static_cast<int16_t*>(row);
    r.scales = reinterpret_cast<float*>(r.q + n);
    r.sums = r.scales + n / kInputBlock;
    r.bytes = reinterpret_cast<InputBytes*>(r.sums + n / 16);
    return r;
}
static constexpr size_t kRoundedBlockBytes = kInputBlock * sizeof(int16_t) + 3 * sizeof(float) + sizeof(InputBytes);
constexpr int32_t kKdaChunk = 16;     // tokens per call of kda_scan
constexpr int32_t kKeyBlock = 64;     // cached positions per call of attend
constexpr int32_t kMaxQueries = 32;   // queries per call of attend
constexpr int32_t kImageQueries = 96; // queries per call of image_attend
constexpr int32_t kImageGroup = 6;    // of which that many are computed together

// out[j][i] = <w_i, x_j> for n_w encoded rows, w_stride bytes apart, and n_x inputs of n columns. Every value is
// summed in an order that depends on n alone: neither n_w nor n_x nor the neighbours change a bit of it.
using DotFn = void (*)(const uint8_t* w, size_t w_stride, int32_t n_w, const void* const* x, int32_t n_x, int64_t n,
                       float* const* out);

// Tokens of one KDA head, after kda_prepare. Rows are `pad` floats apart, zero from column d on.
struct KdaRows {
    float* q;      // [n, pad] normalised, times 1 / sqrt(d)
    float* k;      // [n, pad] normalised
    float* decay;  // [n, pad] exp(g)
    float* kq;     // [n] <k, q>
};

// What one head does with a range of its state's rows. `state`, `v` and `o` point at the first row of the range.
struct KdaCall {
    float* state;        // [n_v, d]
    const float* v;      // [n, v_stride]
    float* o;            // [n, v_stride]
    const float* beta;   // [n] after the sigmoid
    int64_t v_stride;
    int32_t n;           // tokens
    int32_t n_v;
    int32_t d;
    int32_t pad;         // pad_to_lanes(d)
    KdaRows rows;
};

// Widest vectors are 16 lanes, so that one padding serves every ISA.
constexpr int32_t kPad = 16;
static constexpr int32_t pad_to_lanes(int32_t n) { return (n + kPad - 1) / kPad * kPad; }

// A block of cached rows met by a tile of queries, all of which see all of it; online softmax. `best` starts at -infinity, `sum` and
// `y` at 0.
struct AttendCall {
    const uint8_t* keys;    // [n_keys, pad] encoded rows: latent, then the rest, then zeros
    size_t key_stride;      // bytes
    const float* queries;   // [n_queries, pad]
    float* y;               // [n_queries, pad] unnormalised
    float* best;            // [n_queries] largest score
    float* sum;             // [n_queries] of the weights
    float* scores;          // [n_queries, kKeyBlock] scratch
    int32_t n_keys;         // at most kKeyBlock
    int32_t n_queries;      // at most kMaxQueries
    int32_t latent;
    int32_t pad;
    float scale;
    const uint8_t* next = nullptr;  // what will be read after this block: memory is asked for it meanwhile
    size_t next_bytes = 0;
};

// What the calls for some of the keys left of one query.
struct AttendPart {
    float* y;               // [latent]
    float* best;            // [1]
    float* sum;             // [1]
};

// A block of the keys of one head of an image met by a tile of queries; online softmax. `best` starts at -infinity, `sum` and `y` at 0.
struct ImageAttendCall {
    const float* keys;      // [d, kKeyBlock]: a column for each key; columns beyond the last key are finite
    const float* values;    // [n_keys, pad]
    const float* queries;   // [n_queries, d]
    float* y;               // [n_queries, pad] unnormalised
    float* best;            // [n_queries] largest score
    float* sum;             // [n_queries] of the weights
    float* scores;          // [n_queries, kKeyBlock] scratch
    int32_t n_keys;         // at most kKeyBlock
    int32_t n_queries;      // a multiple of kImageGroup, at most kImageQueries
    int32_t d;
    int32_t pad;            // pad_to_lanes(d)
    float scale;
};

struct CpuKernels {
    const char* isa;
    int32_t width;       // float lanes
    bool fast_half;      // one instruction decodes a vector of float16
    int32_t float_rows;  // weight rows that many inputs meet at once, in floating point

    DotFn dot[kCpuTypes];                                                                   // inputs as the type takes them
    DotFn dot_i8[kCpuTypes];                                                                // kInputI8: the same bits, faster; null for floats
    double (*wide_dot)(const double* w, const double* x, int64_t n);                        // <w, x>
    void (*widen[kFloatTypes])(const uint8_t* src, float* dst, int64_t n);
    void (*widen_q8_0)(const uint8_t* src, float* dst, int64_t n);                          // n: whole blocks
    // Rounds n values, whole blocks of kInputBlock; null for the float inputs. NaN and infinity make the scale of their block NaN.
    void (*quantize[kCpuInputs])(const float* x, int64_t n, const RoundedRow& to);

    void (*add)(const float* a, const float* b, int64_t n, float* y);
    void (*mul_sigmoid)(const float* a, const float* b, int64_t n, float* y);               // a * sigmoid(b)
    void (*sigmoid)(const float* x, int64_t n, float* y);
    void (*silu_mul)(const float* g, const float* u, int64_t n, float* y);                  // g * sigmoid(g) * u
    // beta * tanh(g / beta) * sigmoid(g) * v, v = linear_beta * tanh(u / linear_beta), or u if linear_beta <= 0
    void (*situ_mul)(const float* g, const float* u, int64_t n, float beta, float linear_beta, float* y);
    void (*rms_norm)(const float* x, const float* w, int64_t n, float eps, float* y);
    void (*gated_norm)(const float* x, const float* gate, const float* w, int64_t n, float eps, float* y);
    double (*rms_dot)(const float* x, const float* w, int64_t n, float eps);                // <x / rms(x), w>
    // sum over i of weight[i] * x[i], added in this order
    void (*weighted_sum)(const float* const* x, const float* weight, int32_t n_x, int64_t n, float* y);
    // silu(sum over j of w[j * w_stride + c] * x[j][c])
    void (*conv)(const float* const* x, const float* w, int64_t w_stride, int32_t taps, int64_t n, float* y);
    void (*gate_softplus)(const float* f, const float* dt, float a, int64_t n, float* g);   // a * softplus(f + dt)
    // lower_bound * sigmoid(-a * (f + dt))
    void (*gate_bounded)(const float* f, const float* dt, float a, float lower_bound, int64_t n, float* g);

    void (*kda_prepare)(const float* q, const float* k, const float* g, int64_t stride, int32_t n, int32_t d, const KdaRows& rows);
    void (*kda_scan)(const KdaCall& call);
    void (*attend[kFloatTypes])(const AttendCall& call);                                    // keys of the type
    void (*attend_merge)(const AttendPart& part, int32_t latent, const AttendPart& into);       // of keys that come after
    void (*image_attend)(const ImageAttendCall& call);
    void (*gelu_tanh)(const float* x, int64_t n, float* y);                                 // the approximation with a tanh
};

void kernels_init_generic(CpuKernels& kernels);
#if defined(__x86_64__)
void kernels_init_avx2(CpuKernels& kernels);
void kernels_init_avx512(CpuKernels& kernels);
#elif defined(__aarch64__)
void kernels_init_neon(CpuKernels& kernels);
void kernels_init_neon_dot(CpuKernels& kernels);
void kernels_init_neon_i8mm(CpuKernels& kernels);
#endif
// In the test library only: kernels.inc at other widths, on whatever the compiler's vector extensions make of them.
void kernels_init_width8(CpuKernels& kernels);
void kernels_init_width16(CpuKernels& kernels);

}  // namespace delta
