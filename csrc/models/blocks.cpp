#include "models/blocks.h"

#include <cmath>

namespace delta {
namespace {

// The reference implementation builds the two LoRA norms with its class default instead of the model's epsilon.
constexpr float kLoraNormEps = 1e-6F;

struct Qkv {
    const Weight* q;
    const Weight* k;
    const Weight* v;
};

Qkv bind_qkv(Builder& b, int32_t layer, int64_t inner) {
    const std::string fused = b.tensor(layer, "attn_qkv.weight");
    if (b.h.architecture == "kimi-linear" && b.bind.has(fused)) {
        const Weight& whole = b.bind.get(fused, 1, 3 * inner, b.h.n_embd);
        return {&b.bind.rows_of(whole, fused + " (q part)", 0, inner), &b.bind.rows_of(whole, fused + " (k part)", inner, inner),
                &b.bind.rows_of(whole, fused + " (v part)", 2 * inner, inner)};
    }
    const auto get = [&](const char* name) { return &b.bind.get(b.tensor(layer, name), 1, inner, b.h.n_embd); };
    return {get("attn_q.weight"), get("attn_k.weight"), get("attn_v.weight")};
}

Value kda_block(Builder& b, int32_t layer, Value x) {
    const int64_t dim = b.h.kda_head_dim;
    const int64_t inner = b.h.n_head * dim;
    const int32_t kda = b.n_kda++;
    const auto matrix = [&](const char* name, int64_t rows, int64_t cols) -> const Weight& {
        return b.bind.get(b.tensor(layer, name), 1, rows, cols);
    };
    const auto conv = [&](Value projected, const char* name, int32_t stream) {
        return b.rec.short_conv(projected, b.bind.get(b.tensor(layer, name), 1, inner, b.h.d_conv, Want::F32), kda, stream);
    };
    // Ops that do not need each other are recorded one after the other, as a group.
    const Qkv w = bind_qkv(b, layer, inner);
    const Value q_in = b.rec.linear(x, *w.q);
    const Value k_in = b.rec.linear(x, *w.k);
    const Value v_in = b.rec.linear(x, *w.v);
    const Value f_low = b.rec.linear(x, matrix("ssm_f_a.weight", dim, b.h.n_embd));
    // Kimi-K3 has one full-rank output gate, Kimi-Linear a low-rank pair.
    const bool full_gate = b.h.architecture == "kimi-k3";
    const Value r_in = b.rec.linear(x, full_gate ? matrix("ssm_g.weight", inner, b.h.n_embd) : matrix("ssm_g_a.weight", dim, b.h.n_embd));
    const Value beta = b.rec.linear(x, matrix("ssm_beta.weight", b.h.n_head, b.h.n_embd));

    const Value f = b.rec.linear(f_low, matrix("ssm_f_b.weight", inner, dim));
    const Value r = full_gate ? r_in : b.rec.linear(r_in, matrix("ssm_g_b.weight", inner, dim));
    const Value q = conv(q_in, "ssm_conv1d_q.weight", 0);
    const Value k = conv(k_in, "ssm_conv1d_k.weight", 1);
    const Value v = conv(v_in, "ssm_conv1d_v.weight", 2);

    const Value g = b.rec.kda_gate(f, b.bind.vector(b.tensor(layer, "ssm_a"), b.h.n_head),
                                   b.bind.vector(b.tensor(layer, "ssm_dt.bias"), inner), b.h.gate);
    const Value o = b.rec.kda_scan(q, k, v, g, beta, b.h.kda_head_dim, kda);
    const Value y = b.rec.gated_norm(o, r, b.bind.vector(b.tensor(layer, "ssm_norm.weight"), dim), b.h.eps);
    return b.rec.linear(y, matrix("attn_output.weight", b.h.n_embd, inner));
}

Value mla_block(Builder& b, int32_t layer, Value x) {
    const int32_t mla = b.n_mla++;
    const int64_t out = int64_t{b.h.n_head} * b.h.v_head_dim;
    const int64_t width = int64_t{b.h.n_head} * (b.h.nope + b.h.rope);
    const auto matrix = [&](const char* name, int64_t rows, int64_t cols) -> const Weight& {
        return b.bind.get(b.tensor(layer, name), 1, rows, cols);
    };
    // The low-rank pair is there exactly if the file gives its rank; closure finds files that contradict themselves.
    const bool low_rank = b.h.q_lora != 0;
    const bool gated = b.h.architecture == "kimi-k3" && b.bind.has(b.tensor(layer, "attn_gate.weight"));
    const Value q_in = b.rec.linear(x, low_rank ? matrix("attn_q_a.weight", b.h.q_lora, b.h.n_embd) : matrix("attn_q.weight", width, b.h.n_embd));
    const Value kv = b.rec.linear(x, matrix("attn_kv_a_mqa.weight", b.h.kv_lora + b.h.rope, b.h.n_embd));
    const Value gate = gated ? b.rec.linear(x, matrix("attn_gate.weight", out, b.h.n_embd)) : Value{};
    b.rec.latent_append(kv, b.bind.vector(b.tensor(layer, "attn_kv_a_norm.weight"), b.h.kv_lora), kLoraNormEps, mla);
    const Value q = low_rank ? b.rec.linear(b.rec.rms_norm(q_in, b.bind.vector(b.tensor(layer, "attn_q_a_norm.weight"), b.h.q_lora), kLoraNormEps),
                                            matrix("attn_q_b.weight", width, b.h.q_lora))
                             : q_in;

    const Weight* k_b = nullptr;
    const Weight* v_b = nullptr;
    if (b.bind.has(b.tensor(layer, "attn_kv_b.weight"))) {
        const Binder::SplitKvB split =
            b.bind.split_kv_b(b.tensor(layer, "attn_kv_b.weight"), b.h.n_head, b.h.nope, b.h.v_head_dim, b.h.kv_lora);
        k_b = split.k_b;
        v_b = split.v_b;
    } else {
        k_b = &b.bind.get(b.tensor(layer, "attn_k_b.weight"), b.h.n_head, b.h.kv_lora, b.h.nope);
        v_b = &b.bind.get(b.tensor(layer, "attn_v_b.weight"), b.h.n_head, b.h.v_head_dim, b.h.kv_lora);
    }
    AttentionParams params;
    params.mla = mla;
    params.n_head = b.h.n_head;
    params.latent = b.h.kv_lora;
    params.rope = b.h.rope;
    params.scale = 1.0 / std::sqrt(static_cast<double>(b.h.nope + b.h.rope));
    const Value absorbed = b.rec.head_linear(q, *k_b, b.h.nope + b.h.rope);
    const Value mixed = b.rec.mla_attention(absorbed, q, params);
    Value o = b.rec.head_linear(mixed, *v_b, b.h.kv_lora);
    if (gated) {
        o = b.rec.mul_sigmoid(o, gate);
    }
    return b.rec.linear(o, matrix("attn_output.weight", b.h.n_embd, out));
}

// A gated MLP, down(glu(gate x, up x)), in steps, so that other ops may be grouped with its products. `suffix` is "" for the dense layers
// and "_shexp" for the shared experts.
struct Mlp {
    Builder& b;
    int32_t layer;
    std::string suffix;
    int64_t n_ff;
    Value gate{}, up{}, inner{};

    const Weight& matrix(const char* part, int64_t rows, int64_t cols) const {
        return b.bind.get(b.tensor(layer, part) + suffix + ".weight", 1, rows, cols);
    }
    void open(Value x) {
        gate = b.rec.linear(x, matrix("ffn_gate", n_ff, b.h.n_embd));
        up = b.rec.linear(x, matrix("ffn_up", n_ff, b.h.n_embd));
    }
    void activate() { inner = b.rec.glu(gate, up, b.h.activation); }
    Value close() const { return b.rec.linear(inner, matrix("ffn_down", b.h.n_embd, n_ff)); }
};

Value moe_block(Builder& b, int32_t layer, Value x) {
    const auto experts = [&](const char* name, int64_t rows, int64_t cols) -> const Weight& {
        return b.bind.get(b.tensor(layer, name), b.h.n_expert, rows, cols);
    };
    const auto in_part = [&](const char* name, const auto& record) {
        const Recorder::Part part(b.rec, name);
        return record();
    };
    // First all that reads x, as a group. The router always reads the full width, also where the experts work in a latent space.
    const Value scores = in_part("router", [&] {
        return b.rec.linear(x, b.bind.get(b.tensor(layer, "ffn_gate_inp.weight"), 1, b.h.n_expert, b.h.n_embd, Want::F32));
    });
    const Value z = in_part("experts", [&] {
        return b.h.has_latent ? b.rec.linear(x, b.bind.get(b.tensor(layer, "ffn_routed_down.weight"), 1, b.h.latent, b.h.n_embd)) : x;
    });
    const bool has_shared = b.h.n_shared > 0;
    Mlp shared{b, layer, "_shexp", int64_t{b.h.n_shared} * b.h.n_ff_expert};
    if (has_shared) {
        const Recorder::Part part(b.rec, "shared");
        shared.open(x);
        shared.activate();
    }
    const Value route = in_part("router", [&] {
        return b.rec.moe_route(scores, &b.bind.vector(b.tensor(layer, "exp_probs_b.bias"), b.h.n_expert),
                               {.n_used = b.h.n_expert_used, .normalise = b.h.route_normalise, .scale = b.h.route_scale});
    });
    Value y = in_part("experts", [&] {
        const Value sum = b.rec.moe_experts(z, route, experts("ffn_gate_exps.weight", b.h.n_ff_expert, b.h.latent),
                                            experts("ffn_up_exps.weight", b.h.n_ff_expert, b.h.latent),
                                            experts("ffn_down_exps.weight", b.h.latent, b.h.n_ff_expert),
                                            {.n_used = b.h.n_expert_used, .activation = b.h.activation});
        if (!b.h.has_latent) {
            return sum;
        }
        const bool has_norm = b.bind.has(b.tensor(layer, "ffn_routed_norm.weight"));
        const Value normed = has_norm ? b.rec.rms_norm(sum, b.bind.vector(b.tensor(layer, "ffn_routed_norm.weight"), b.h.latent), b.h.eps) : sum;
        return b.rec.linear(normed, b.bind.get(b.tensor(layer, "ffn_routed_up.weight"), 1, b.h.n_embd, b.h.latent));
    });
    if (has_shared) {
        const Recorder::Part part(b.rec, "shared");
        y = b.rec.add(y, shared.close());
    }
    return y;
}

}  // namespace

Value attention_block(Builder& b, int32_t layer, Value x) {
    const bool mla = b.h.is_mla[static_cast<size_t>(layer)];
    const Recorder::Part part(b.rec, mla ? "mla" : "kda");
    return mla ? mla_block(b, layer, x) : kda_block(b, layer, x);
}

Value ffn_block(Builder& b, int32_t layer, Value x) {
    if (layer >= b.h.n_dense) {
        return moe_block(b, layer, x);
    }
    const Recorder::Part part(b.rec, "dense");
    Mlp dense{b, layer, "", b.h.n_ff};
    dense.open(x);
    dense.activate();
    return dense.close();
}

}  // namespace delta
