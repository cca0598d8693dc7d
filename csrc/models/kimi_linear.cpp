// Kimi-Linear: plain pre-norm residuals around KDA or MLA and a feed-forward block.
#include "models/models.h"

namespace delta {

void build_kimi_linear(Builder& b) {
    const int64_t n_embd = b.h.n_embd;
    Value x = b.rec.embed(b.bind.get("token_embd.weight", 1, b.h.n_vocab, n_embd));
    for (int32_t i = 0; i < b.h.n_layer; ++i) {
        b.rec.enter_layer(i);
        const Value a = b.rec.rms_norm(x, b.bind.vector(b.tensor(i, "attn_norm.weight"), n_embd), b.h.eps);
        x = b.rec.add(x, attention_block(b, i, a));
        const Value f = b.rec.rms_norm(x, b.bind.vector(b.tensor(i, "ffn_norm.weight"), n_embd), b.h.eps);
        x = b.rec.add(x, ffn_block(b, i, f));
    }
    b.rec.enter_layer(-1);
    x = b.rec.rms_norm(b.rec.pick_rows(x), b.bind.vector("output_norm.weight", n_embd), b.h.eps);
    b.rec.finish(b.rec.linear(x, b.bind.get("output.weight", 1, b.h.n_vocab, n_embd)));
}

}  // namespace delta
