// The parts that both architectures are made of. Each function binds its tensors and records its ops.
#pragma once

#include "models/registry.h"

namespace delta {

struct Builder {
    Hparams& h;
    Binder bind;
    Recorder rec;
    int32_t n_kda = 0;  // KDA layers recorded so far
    int32_t n_mla = 0;

    std::string tensor(int32_t layer, const char* name) const { return "blk." + std::to_string(layer) + "." + name; }
};

// x [n, n_embd], already normed -> [n, n_embd].
Value attention_block(Builder& b, int32_t layer, Value x);  // KDA or MLA, as the layer list says
Value ffn_block(Builder& b, int32_t layer, Value x);        // dense or mixture of experts

}  // namespace delta
