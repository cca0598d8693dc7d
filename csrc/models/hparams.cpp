#include "models/hparams.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "models/keys.h"

namespace delta {
namespace {

std::vector<bool> read_layer_kinds(const Keys& keys, int32_t n_layer) {
    const char* name = "attention.head_count_kv";
    const GgufValue* value = keys.file().find(keys.key(name));
    if (value != nullptr && !value->is_array) {
        return std::vector<bool>(static_cast<size_t>(n_layer), keys.file().integer(keys.key(name)) != 0);
    }
    const std::vector<int64_t> kinds = keys.file().integers(keys.key(name));
    if (kinds.size() != static_cast<size_t>(n_layer)) {
        keys.fail(name, format("has %zu entries, expected one for each of %d layers", kinds.size(), n_layer));
    }
    std::vector<bool> is_mla;
    for (const int64_t k : kinds) {
        if (k != 0 && k != 1) {
            keys.fail(name, format("has entry %lld; 0 marks a KDA layer, 1 an MLA layer", static_cast<long long>(k)));
        }
        is_mla.push_back(k == 1);
    }
    return is_mla;
}

void read_experts(const Keys& keys, Hparams& h, bool is_k3) {
    h.n_expert = keys.count("expert_count", 1, 1 << 16);
    h.n_expert_used = keys.count("expert_used_count", 1, h.n_expert);
    h.n_ff_expert = keys.count("expert_feed_forward_length");
    h.n_shared = keys.count("expert_shared_count", 0, 1 << 10);
    h.route_scale = keys.positive("expert_weights_scale");
    // The file format of kimi-linear has no such key: its published model normalises.
    h.route_normalise = is_k3 || keys.has("expert_weights_norm") ? keys.flag("expert_weights_norm") : true;
    if (keys.count("expert_gating_func", 0) != 2) {
        keys.fail("expert_gating_func", format("is %d; only 2, sigmoid, is supported", keys.count("expert_gating_func", 0)));
    }
    if (keys.has("expert_group_count") && keys.count("expert_group_count", 0) > 1) {
        keys.fail("expert_group_count", "is above 1; selection limited to groups is not supported");
    }
    const bool latent_tensors = keys.file().find_tensor(format("blk.%d.ffn_routed_down.weight", h.n_dense)) != nullptr;
    h.has_latent = is_k3 && (keys.has("expert_latent_length") || latent_tensors);
    h.latent = h.has_latent ? keys.count("expert_latent_length") : h.n_embd;
}

}  // namespace

int32_t Hparams::n_mla() const { return static_cast<int32_t>(std::count(is_mla.begin(), is_mla.end(), true)); }

Hparams read_hparams(const GgufSet& file, const std::string& architecture) {
    const Keys keys(file, architecture);
    const bool is_k3 = architecture == "kimi-k3";
    Hparams h;
    h.architecture = architecture;
    h.n_layer = keys.count("block_count", 1, 4096);
    h.n_ctx_train = keys.count("context_length", 1, INT32_MAX);
    h.n_embd = keys.count("embedding_length");
    h.n_head = keys.count("attention.head_count", 1, 1 << 14);
    h.eps = keys.positive("attention.layer_norm_rms_epsilon");
    h.is_mla = read_layer_kinds(keys, h.n_layer);

    h.d_conv = keys.count("ssm.conv_kernel", 2, 64);
    h.kda_head_dim = keys.count("kda.head_dim", 1, 1 << 14);
    // A file without the key has the softplus gate: the format has no other way to say so.
    h.gate.bounded = keys.has("kda.gate_lower_bound");
    if (h.gate.bounded) {
        h.gate.lower_bound = keys.real("kda.gate_lower_bound");
        if (!(h.gate.lower_bound < 0)) {
            keys.fail("kda.gate_lower_bound", format("is %g, expected a negative number", double{h.gate.lower_bound}));
        }
    }

    if (h.n_mla() > 0) {
        h.kv_lora = keys.count("attention.kv_lora_rank");
        h.rope = keys.count("rope.dimension_count", 0);
        const int32_t key_length = keys.count("attention.key_length_mla");
        h.nope = key_length - h.rope;
        if (h.nope < 1) {
            keys.fail("attention.key_length_mla", format("is %d, expected more than rope.dimension_count, %d", key_length, h.rope));
        }
        h.v_head_dim = keys.count("attention.value_length_mla");
        h.q_lora = keys.has("attention.q_lora_rank") ? keys.count("attention.q_lora_rank") : 0;
    }

    h.n_dense = keys.count("leading_dense_block_count", 0);
    if (h.n_dense > h.n_layer) {
        keys.fail("leading_dense_block_count", format("is %d, more than the %d layers", h.n_dense, h.n_layer));
    }
    if (h.n_dense > 0) {
        h.n_ff = keys.count("feed_forward_length");
    }
    if (is_k3) {
        h.activation.kind = Activation::Situ;
        h.activation.beta = keys.positive("activation.situ_beta");
        h.activation.linear_beta = keys.real("activation.situ_linear_beta");
        h.attn_res_block = keys.count("attn_res.block_size");
    }
    if (h.n_dense < h.n_layer) {
        read_experts(keys, h, is_k3);
    }

    const GgufValue* tokens = file.find("tokenizer.ggml.tokens");
    if (tokens == nullptr || !tokens->is_array || tokens->type != GgufType::String || tokens->count == 0 || tokens->count > INT32_MAX) {
        throw Error(DELTA_FORMAT, format("%s: key tokenizer.ggml.tokens is missing or no list of strings", file.path().c_str()));
    }
    h.n_vocab = static_cast<int32_t>(tokens->count);
    if (keys.has("vocab_size") && keys.count("vocab_size") != h.n_vocab) {
        keys.fail("vocab_size", format("is %d, but tokenizer.ggml.tokens has %d entries", keys.count("vocab_size"), h.n_vocab));
    }
    return h;
}

}  // namespace delta
