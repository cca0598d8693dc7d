// The ops, their parameters and their shapes. n is the number of rows of the step; all matrices are row-major, of
// the device's value type.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <variant>

#include "graph/value.h"

namespace delta {

enum class OpKind : uint8_t {
#define OP(id, text) id,
#include "graph/ops.def"
#undef OP
    Count
};
const char* op_name(OpKind kind);
// Whether the output of such an op is one of its inputs, changed where it lies.
constexpr bool is_in_place(OpKind kind) {
    return kind == OpKind::BankPush || kind == OpKind::GridPosition || kind == OpKind::GridRope || kind == OpKind::Gelu;
}

struct NoParams {};

// rms_norm      in0 x [n, c], w0 [c] -> x / sqrt(mean(x^2) + eps) * w
// gated_norm    in0 o [n, H * d], in1 r [n, H * d], w0 [d] -> per head: rms_norm(o) * w * sigmoid(r)
// latent_append in0 kv [n, C + R], w0 [C]: writes one cache row per token, [rms_norm(kv[0:C]) * w | kv[C:]]; no output
struct NormParams {
    float eps = 0;
    int32_t mla = -1;  // latent_append: index among the MLA layers
};

// head_linear   in0 x [n, H * stride], w0 H matrices [b, a] -> [n, H * b]; head h reads columns h * stride .. h * stride + a - 1
struct HeadLinearParams {
    int32_t stride = 0;
};

// glu           in0 g [n, c], in1 u [n, c] -> silu: g * sigmoid(g) * u
//               situ: beta * tanh(g / beta) * sigmoid(g) * v, v = linear_beta * tanh(u / linear_beta), or u if linear_beta <= 0
struct Activation {
    enum Kind : uint8_t { Silu, Situ } kind = Silu;
    float beta = 0;
    float linear_beta = 0;
};

// short_conv    in0 x [n, P], w0 [P, K] -> silu(sum_j w[c, j] * x[t - (K - 1) + j, c]); rows before the first token of the step come
//               from the conv state of `stream` (0 q, 1 k, 2 v), which then keeps the last K - 1 rows
struct ConvParams {
    int32_t kda = -1;     // index among the KDA layers
    int32_t stream = 0;
};

// kda_gate      in0 f [n, H * d], w0 a [H] (= -exp(A_log)), w1 dt [H * d] -> log decay g [n, H * d]
//               unbounded: a * softplus(f + dt)      bounded: lower_bound * sigmoid(-a * (f + dt))
struct GateParams {
    bool bounded = false;
    float lower_bound = 0;
};

// kda_scan      in0 q, in1 k, in2 v, in3 g [n, H * d], in4 b [n, H] -> o [n, H * d], S of the sequence updated. Per head and token:
//               q, k <- x / sqrt(sum(x^2) + 1e-6); q <- q / sqrt(d); beta = sigmoid(b)
//               S[v][k] *= exp(g[k]); u = beta * (v - S k); S += u k^T; o = S q
struct ScanParams {
    int32_t kda = -1;
};
inline constexpr double kL2NormEps = 1e-6;  // added to the sum of squares

// mla_attention in0 a [n, H * C] (absorbed queries), in1 q [n, H * stride] whose last R columns per head are the rest of the query
//               -> y [n, H * C]: softmax over all cached rows t' <= t of (<a, c_t'> + <q_r, p_t'>) * scale, weighting the latents c_t'
struct AttentionParams {
    int32_t mla = -1;
    int32_t n_head = 0;
    int32_t latent = 0;  // C
    int32_t rope = 0;    // R
    double scale = 0;    // 1 / sqrt(N + R)
};

// moe_route     in0 scores before the sigmoid [n, E], w0 bias [E] or none -> [n, 2 k]: k expert ids (as floats), then k weights.
//               The k largest sigmoid + bias, ties to the lower id, best first; weights are the plain sigmoids, divided by their
//               sum (+ 1e-20) if `normalise` and k > 1, times scale
struct RouteParams {
    int32_t n_used = 0;  // k
    bool normalise = false;
    float scale = 1;
};

// moe_experts   in0 z [n, L], in1 route [n, 2 k], w0 gate, w1 up: E matrices [X, L], w2 down: E matrices [L, X]
//               -> sum over the chosen e of weight_e * (down_e glu(gate_e z, up_e z)), summed in the order of the route
struct ExpertParams {
    int32_t n_used = 0;
    Activation activation;
};

// bank_push     in0 x [n, E]: writes columns slot * E .. of the bank (in1, [n, n_slots * E]); its output is the bank itself
// bank_mix      in0 bank, in1 x [n, E], w0 score [E] -> softmax over the first `n_slots` entries and x of
//               <e / sqrt(mean(e^2) + eps), score>, weighting the raw entries
struct BankParams {
    int32_t slot = 0;
    int32_t n_slots = 0;
    float eps = 0;
};

// pixels        -> [n, c]: the step's patches
// grid_position in0 x [n, C] in place, w0 table [height * width, C]: adds the table, resized to the grid of the step by linear
//               interpolation in both directions: row y of h reads at max(0, (y + 1/2) * height / h - 1/2), columns alike, clamped at
//               the far border. With several frames, frame f also adds [sin(f w_i), cos(f w_i)], w_i = 10000^(-i / (C / 2)), i < C / 2
struct GridParams {
    int32_t height = 0;
    int32_t width = 0;
};
inline constexpr double kTimeBase = 10000;

// grid_rope     in0 [n, 3 * H * d] in place: queries, keys, values of every head. Per head of the first two: pairs of neighbours (a, b)
//               -> (a cos t - b sin t, a sin t + b cos t); pair i of the first half turns by t = column * base^(-i / (d / 4)), pair i of
//               the second half by the row alike
// image_attention in0 [n, 3 * H * d], the same columns -> [n, H * d]: softmax over all patches of the image of <q, k> / sqrt(d),
//               weighting v
struct ImageAttentionParams {
    int32_t n_head = 0;
    int32_t head_dim = 0;
    double rope_base = 0;
};

// gelu          in0 x in place -> erf: x * Phi(x), Phi(x) = (1 + erf(x / sqrt(2))) / 2
//               tanh: x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2
struct GeluParams {
    enum Kind : uint8_t { Erf, Tanh } kind = Erf;
};

// merge_squares in0 x [n, C] -> [n / (frames * side^2), side^2 * C]: the mean over the frames, then each square of side * side patches
//               side by side, row by row
struct MergeParams {
    int32_t side = 0;
};

// embed         w0 [V, E] -> row of each token; of a token that stands for a feature row, that row
// add           in0 a + in1 b
// linear        in0 x [n, a], w0 [b, a] -> x W^T
// mul_sigmoid   in0 a * sigmoid(in1 b)
// pick_rows     in0 x [n, c] -> the rows the step wants logits for
using OpParams = std::variant<NoParams, NormParams, HeadLinearParams, Activation, ConvParams, GateParams, ScanParams,
                              AttentionParams, RouteParams, ExpertParams, BankParams, GridParams, ImageAttentionParams, GeluParams, MergeParams>;

inline constexpr int kMaxInputs = 5;
inline constexpr int kMaxWeights = 3;

struct Op {
    OpKind kind;
    int32_t layer = -1;               // -1 outside the layers
    std::string name;                 // "blk.3.attn_q", for messages, profiles and observers
    const char* part = "";            // of the model, as Recorder::Part names it, for profiles
    int32_t group = 0;                // ops with the same number follow one another, and none reads what another writes
    std::array<Value, kMaxInputs> in;
    std::array<const Weight*, kMaxWeights> w{};
    Value out;                        // id -1: none
    OpParams params;

    template <class T>
    const T& get() const {
        return std::get<T>(params);
    }
};

}  // namespace delta
