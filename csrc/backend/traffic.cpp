#include "backend/traffic.h"

#include <algorithm>

namespace delta {
namespace {

uint64_t matrix_bytes(const Weight& w) { return static_cast<uint64_t>(w.rows) * w.row_bytes(); }

// Different expert ids in `route` [n_rows, 2 * n_used].
template <class T>
uint64_t count_experts(const void* route, int32_t n_rows, int32_t n_used, int64_t n_experts) {
    const auto* ids = static_cast<const T*>(route);
    std::vector<bool> chosen(static_cast<size_t>(n_experts));
    for (int32_t row = 0; row < n_rows; ++row, ids += 2 * n_used) {
        for (int32_t i = 0; i < n_used; ++i) {
            chosen[static_cast<size_t>(ids[i])] = true;
        }
    }
    return static_cast<uint64_t>(std::count(chosen.begin(), chosen.end(), true));
}

uint64_t n_matrices(const OpCall& call, const Weight& w, ValueType type) {
    if (call.op->kind != OpKind::MoeExperts) {
        return static_cast<uint64_t>(w.mats);
    }
    const int32_t n_used = call.op->get<ExpertParams>().n_used;
    return type == ValueType::F64 ? count_experts<double>(call.in[1], call.n_rows, n_used, w.mats)
                                  : count_experts<float>(call.in[1], call.n_rows, n_used, w.mats);
}

}  // namespace

uint64_t weight_bytes_read(const OpCall& call, ValueType type) {
    if (call.op->kind == OpKind::Embed) {
        const auto n_tokens = std::count_if(call.step->tokens.begin(), call.step->tokens.end(), [](int32_t t) { return !is_feature(t); });
        return static_cast<uint64_t>(n_tokens) * call.op->w[0]->row_bytes();
    }
    uint64_t n_bytes = 0;
    for (const Weight* w : call.op->w) {
        n_bytes += w == nullptr ? 0 : n_matrices(call, *w, type) * matrix_bytes(*w);
    }
    return n_bytes;
}

uint64_t state_bytes_moved(const OpCall& call) {
    if (call.step->seqs.empty()) {
        return 0;  // nothing of a vision tower outlives its step
    }
    const StateLayout& layout = *call.step->state.layout;
    const size_t value = value_bytes(layout.value_type);
    uint64_t n_bytes = 0;
    for (const SeqRows& seq : call.step->seqs) {
        switch (call.op->kind) {
            case OpKind::ShortConv:
                n_bytes += 2 * layout.conv_values() * value;
                break;
            case OpKind::KdaScan:
                n_bytes += 2 * layout.scan_values() * value;
                break;
            case OpKind::LatentAppend:
                n_bytes += static_cast<uint64_t>(seq.n_rows) * layout.latent_row_bytes();
                break;
            case OpKind::MlaAttention:
                n_bytes += static_cast<uint64_t>(seq.position + seq.n_rows) * layout.latent_row_bytes();
                break;
            default:
                break;
        }
    }
    return n_bytes;
}

}  // namespace delta
