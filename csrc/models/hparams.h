// The numbers of a model, read from GGUF keys. Nothing here has a default that would change mathematics.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gguf/gguf.h"
#include "graph/ops.h"

namespace delta {

struct Hparams {
    std::string architecture;         // "kimi-linear", "kimi-k3"
    int32_t n_layer = 0;
    int32_t n_embd = 0;
    int32_t n_vocab = 0;
    int32_t n_head = 0;               // of KDA and of MLA layers
    int32_t n_ctx_train = 0;
    float eps = 0;                    // of all RMS norms but the two LoRA norms
    std::vector<bool> is_mla;         // [n_layer]; else KDA

    int32_t d_conv = 0;               // KDA: taps of the short convolution
    int32_t kda_head_dim = 0;
    GateParams gate;

    int32_t q_lora = 0;               // MLA: 0 = one plain query projection
    int32_t kv_lora = 0;              // C
    int32_t rope = 0;                 // R, not rotated
    int32_t nope = 0;                 // N
    int32_t v_head_dim = 0;

    int32_t n_ff = 0;                 // dense layers
    int32_t n_dense = 0;              // leading dense layers
    int32_t n_expert = 0;
    int32_t n_expert_used = 0;
    int32_t n_ff_expert = 0;
    int32_t n_shared = 0;
    int32_t latent = 0;               // width the routed experts work in; n_embd without latent experts
    bool has_latent = false;
    float route_scale = 1;
    bool route_normalise = false;
    Activation activation;

    int32_t attn_res_block = 0;       // 0: plain residuals

    int32_t n_mla() const;
    int32_t n_kda() const { return n_layer - n_mla(); }
};

// Throws Error(FORMAT) naming the key, what was expected and what was found.
Hparams read_hparams(const GgufSet& file, const std::string& architecture);

}  // namespace delta
