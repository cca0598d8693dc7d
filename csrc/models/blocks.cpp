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
    const auto conv = [&](const Weight& projection, const char* name, int32_t stream) {
        const Weight& kernel = b.bind.get(b.tensor(layer, name), 1, inner, b.h.d_conv, Want::F32);
        return b.rec.short_conv(b.rec.linear(x, projection), kernel, kda, stream);
    };
    const Qkv w = bind_qkv(b, layer, inner);
    const Value q = conv(*w.q, "ssm_conv1d_q.weight", 0);
    const Value k = conv(*w.k, "ssm_conv1d_k.weight", 1);
    const Value v = conv(*w.v, "ssm_conv1d_v.weight", 2);

    const Value f = b.rec.linear(b.rec.linear(x, matrix("ssm_f_a.weight", dim, b.h.n_embd)), matrix("ssm_f_b.weight", inner, dim));
    const Value g = b.rec.kda_gate(f, b.bind.vector(b.tensor(layer, "ssm_a"), b.h.n_head),
                                   b.bind.vector(b.tensor(layer, "ssm_dt.bias"), inner), b.h.gate);
    const Value beta = b.rec.linear(x, matrix("ssm_beta.weight", b.h.n_head, b.h.n_embd));
    const Value o = b.rec.kda_scan(q, k, v, g, beta, b.h.kda_head_dim, kda);

    // Kimi-K3 has one full-rank output gate, Kimi-Linear a low-rank pair.
    const Value r = b.h.architecture == "kimi-k3"
                        ? b.rec.linear(x, matrix("ssm_g.weight", inner, b.h.n_embd))
                        : b.rec.linear(b.rec.linear(x, matrix("ssm_g_a.weight", dim, b.h.n_embd)), matrix("ssm_g_b.weight", inner, dim));
    const Value y = b.rec.gated_norm(o, r, b.bind.vector(b.tensor(layer, "ssm_norm.weight"), dim), b.h.eps);
    return b.rec.linear(y, matrix("attn_output.weight", b.h.n_embd, inner));
}

Value mla_query(Builder& b, int32_t layer, Value x) {
    const int64_t width = int64_t{b.h.n_head} * (b.h.nope + b.h.rope);
    // The low-rank pair is there exactly if the file gives its rank; closure finds files that contradict themselves.
    if (b.h.q_lora == 0) {
        return b.rec.linear(x, b.bind.get(b.tensor(layer, "attn_q.weight"), 1, width, b.h.n_embd));
    }
    const Value low = b.rec.linear(x, b.bind.get(b.tensor(layer, "attn_q_a.weight"), 1, b.h.q_lora, b.h.n_embd));
    const Value normed = b.rec.rms_norm(low, b.bind.vector(b.tensor(layer, "attn_q_a_norm.weight"), b.h.q_lora), kLoraNormEps);
    return b.rec.linear(normed, b.bind.get(b.tensor(layer, "attn_q_b.weight"), 1, width, b.h.q_lora));
}

Value mla_block(Builder& b, int32_t layer, Value x) {
    const int32_t mla = b.n_mla++;
    const int64_t out = int64_t{b.h.n_head} * b.h.v_head_dim;
    const Value q = mla_query(b, layer, x);
    const Value kv = b.rec.linear(x, b.bind.get(b.tensor(layer, "attn_kv_a_mqa.weight"), 1, b.h.kv_lora + b.h.rope, b.h.n_embd));
    b.rec.latent_append(kv, b.bind.vector(b.tensor(layer, "attn_kv_a_norm.weight"), b.h.kv_lora), kLoraNormEps, mla);

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
    if (b.h.architecture == "kimi-k3" && b.bind.has(b.tensor(layer, "attn_gate.weight"))) {
        o = b.rec.mul_sigmoid(o, b.rec.linear(x, b.bind.get(b.tensor(layer, "attn_gate.weight"), 1, out, b.h.n_embd)));
    }
    return b.rec.linear(o, b.bind.get(b.tensor(layer, "attn_output.weight"), 1, b.h.n_embd, out));
}

// down(glu(gate x, up x)) with inner width n_ff; `suffix` is "" for the dense layers and "_shexp" for the shared experts.
Value mlp(Builder& b, int32_t layer, Value x, const std::string& suffix, int64_t n_ff) {
    const auto name = [&](const char* part) { return b.tensor(layer, part) + suffix + ".weight"; };
    const Value gate = b.rec.linear(x, b.bind.get(name("ffn_gate"), 1, n_ff, b.h.n_embd));
    const Value up = b.rec.linear(x, b.bind.get(name("ffn_up"), 1, n_ff, b.h.n_embd));
    return b.rec.linear(b.rec.glu(gate, up, b.h.activation), b.bind.get(name("ffn_down"), 1, b.h.n_embd, n_ff));
}

Value moe_block(Builder& b, int32_t layer, Value x) {
    const auto experts = [&](const char* name, int64_t rows, int64_t cols) -> const Weight& {
        return b.bind.get(b.tensor(layer, name), b.h.n_expert, rows, cols);
    };
    // The router always reads the full width, also where the experts work in a latent space.
    const auto router = [&] {
        const Recorder::Part part(b.rec, "router");
        const Value scores = b.rec.linear(x, b.bind.get(b.tensor(layer, "ffn_gate_inp.weight"), 1, b.h.n_expert, b.h.n_embd, Want::F32));
        return b.rec.moe_route(scores, &b.bind.vector(b.tensor(layer, "exp_probs_b.bias"), b.h.n_expert),
                               {.n_used = b.h.n_expert_used, .normalise = b.h.route_normalise, .scale = b.h.route_scale});
    };
    const Value route = router();
    const Recorder::Part experts_part(b.rec, "experts");
    const Value z = b.h.has_latent ? b.rec.linear(x, b.bind.get(b.tensor(layer, "ffn_routed_down.weight"), 1, b.h.latent, b.h.n_embd)) : x;
    Value y = b.rec.moe_experts(z, route, experts("ffn_gate_exps.weight", b.h.n_ff_expert, b.h.latent),
                                experts("ffn_up_exps.weight", b.h.n_ff_expert, b.h.latent),
                                experts("ffn_down_exps.weight", b.h.latent, b.h.n_ff_expert),
                                {.n_used = b.h.n_expert_used, .activation = b.h.activation});
    if (b.h.has_latent) {
        if (b.bind.has(b.tensor(layer, "ffn_routed_norm.weight"))) {
            y = b.rec.rms_norm(y, b.bind.vector(b.tensor(layer, "ffn_routed_norm.weight"), b.h.latent), b.h.eps);
        }
        y = b.rec.linear(y, b.bind.get(b.tensor(layer, "ffn_routed_up.weight"), 1, b.h.n_embd, b.h.latent));
    }
    if (b.h.n_shared > 0) {
        const Recorder::Part shared_part(b.rec, "shared");
        y = b.rec.add(y, mlp(b, layer, x, "_shexp", int64_t{b.h.n_shared} * b.h.n_ff_expert));
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
    return mlp(b, layer, x, "", b.h.n_ff);
}

}  // namespace delta
