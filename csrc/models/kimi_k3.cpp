// Kimi-K3: the residual stream is replaced by attention residuals. A running sum restarts every attn_res_block layers; what it was
// before is kept in a bank, and every block reads a softmax mix of the bank and the running sum.
#include "models/models.h"

namespace delta {

void build_kimi_k3(Builder& b) {
    const int32_t n_embd = b.h.n_embd;
    const int32_t block = b.h.attn_res_block;
    const Value bank = b.rec.bank(n_embd, (b.h.n_layer + block - 1) / block);
    int32_t n_banked = 0;
    Value x = b.rec.embed(b.bind.get("token_embd.weight", 1, b.h.n_vocab, n_embd));
    for (int32_t i = 0; i < b.h.n_layer; ++i) {
        b.rec.enter_layer(i);
        // Layer 0 finds an empty bank; its score vector is in the file all the same.
        const Weight& attn_score = b.bind.vector(b.tensor(i, "attn_res_score.weight"), n_embd);
        const Value a = n_banked == 0 ? x : b.rec.bank_mix(bank, n_banked, x, attn_score, b.h.eps);
        const bool boundary = i % block == 0;
        if (boundary) {
            b.rec.bank_push(bank, x, n_banked++);
        }
        const Value y = attention_block(b, i, b.rec.rms_norm(a, b.bind.vector(b.tensor(i, "attn_norm.weight"), n_embd), b.h.eps));
        x = boundary ? y : b.rec.add(x, y);
        const Value m = b.rec.bank_mix(bank, n_banked, x, b.bind.vector(b.tensor(i, "ffn_res_score.weight"), n_embd), b.h.eps);
        const Value f = b.rec.rms_norm(m, b.bind.vector(b.tensor(i, "ffn_norm.weight"), n_embd), b.h.eps);
        x = b.rec.add(x, ffn_block(b, i, f));
    }
    b.rec.enter_layer(-1);
    x = b.rec.bank_mix(bank, n_banked, x, b.bind.vector("output_res_score.weight", n_embd), b.h.eps);
    x = b.rec.rms_norm(b.rec.pick_rows(x), b.bind.vector("output_norm.weight", n_embd), b.h.eps);
    b.rec.finish(b.rec.linear(x, b.bind.get("output.weight", 1, b.h.n_vocab, n_embd)));
}

}  // namespace delta
