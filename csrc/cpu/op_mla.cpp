// latent_append and mla_attention.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/ops.h"

namespace delta {
namespace {

size_t append_scratch_bytes(const Op& op) {
    Workspace space;
    space.take<float>(static_cast<size_t>(op.in[0].cols));
    return space.used();
}

// The sequence that a row of the step belongs to.
const SeqRows& sequence_of(const Step& step, int64_t row) {
    const auto after = std::upper_bound(step.seqs.begin(), step.seqs.end(), row,
                                        [](int64_t r, const SeqRows& seq) { return r < seq.first_row; });
    return *(after - 1);
}

}  // namespace

void cpu_latent_append(CpuBackend& self, const FloatCall& c) {
    const NormParams& p = c.op->get<NormParams>();
    const StateLayout& layout = *c.step->state.layout;
    const int64_t latent = c.op->w[0]->cols;
    const int64_t width = c.op->in[0].cols;
    const size_t scratch_bytes = append_scratch_bytes(*c.op);
    self.parallel(c.n_rows, 8 * width, [&](int64_t begin, int64_t end, int32_t thread) {
        auto* row = reinterpret_cast<float*>(static_cast<uint8_t*>(c.workspace) + static_cast<size_t>(thread) * scratch_bytes);
        for (int64_t r = begin; r < end; ++r) {
            const SeqRows& seq = sequence_of(*c.step, r);
            const float* kv = c.in[0] + r * width;
            self.kernels.rms_norm(kv, reinterpret_cast<const float*>(c.op->w[0]->data), latent, p.eps, row);
            std::memcpy(row + latent, kv + latent, static_cast<size_t>(width - latent) * sizeof(float));
            const auto position = static_cast<size_t>(seq.position + r - seq.first_row);
            layout.cache_type->from_float(row, c.step->state.latents(seq.slot, p.mla) + position * layout.latent_row_bytes(), width);
        }
    });
}

size_t cpu_latent_append_workspace(const CpuBackend& self, const Op& op) {
    return append_scratch_bytes(op) * static_cast<size_t>(self.n_threads());
}

namespace {

struct AttendScratch {
    float* keys;     // [kKeyBlock, pad]
    float* queries;  // [kMaxDotRows, pad]
    float* y;        // [kMaxDotRows, pad]
    float* best;     // [kMaxDotRows]
    float* sum;      // [kMaxDotRows]
    float* scores;   // [kMaxDotRows, kKeyBlock]
};

AttendScratch attend_scratch(Workspace& space, const AttentionParams& p) {
    const auto pad = static_cast<size_t>(pad_to_lanes(p.latent + p.rope));
    AttendScratch s;
    s.keys = space.take<float>(kKeyBlock * pad);
    s.queries = space.take<float>(kMaxDotRows * pad);
    s.y = space.take<float>(kMaxDotRows * pad);
    s.best = space.take<float>(kMaxDotRows);
    s.sum = space.take<float>(kMaxDotRows);
    s.scores = space.take<float>(static_cast<size_t>(kMaxDotRows) * kKeyBlock);
    return s;
}

size_t attend_scratch_bytes(const Op& op) {
    Workspace space;
    attend_scratch(space, op.get<AttentionParams>());
    return space.used();
}

}  // namespace

void cpu_mla_attention(CpuBackend& self, const FloatCall& c) {
    const AttentionParams& p = c.op->get<AttentionParams>();
    const StateLayout& layout = *c.step->state.layout;
    const auto widen = self.kernels.widen[cpu_type(*layout.cache_type)];
    const int64_t width = p.latent + p.rope;
    const int32_t pad = pad_to_lanes(static_cast<int32_t>(width));
    const int64_t q_stride = c.op->in[1].cols / p.n_head;
    const size_t scratch_bytes = attend_scratch_bytes(*c.op);

    // Items are (row, group of heads). A group decodes each cached row once for all its heads; groups shrink only as far as the
    // threads need work. Blocks of keys lie at multiples of kKeyBlock positions, so that neither group nor company of a row matters.
    const int64_t fair = int64_t{c.n_rows} * p.n_head / (int64_t{2} * self.n_threads());
    const auto group = static_cast<int32_t>(std::clamp<int64_t>(fair, std::min(4, p.n_head), kMaxDotRows));
    const int64_t n_groups = (p.n_head + group - 1) / group;
    const SeqRows& last = c.step->seqs.back();
    const int64_t cost = (last.position + last.n_rows) * group * width;
    self.parallel(c.n_rows * n_groups, cost, [&](int64_t begin, int64_t end, int32_t thread) {
        Workspace space(static_cast<uint8_t*>(c.workspace) + static_cast<size_t>(thread) * scratch_bytes);
        const AttendScratch s = attend_scratch(space, p);
        for (int64_t item = begin; item < end; ++item) {
            const int64_t row = item / n_groups;
            const int64_t first = item % n_groups * group;
            AttendCall call{s.keys, s.queries, s.y, s.best, s.sum, s.scores, 0, 0, p.latent, pad, static_cast<float>(p.scale)};
            call.n_heads = static_cast<int32_t>(std::min<int64_t>(group, p.n_head - first));
            for (int32_t i = 0; i < call.n_heads; ++i) {
                float* query = s.queries + int64_t{i} * pad;
                const int64_t h = row * p.n_head + first + i;
                std::memcpy(query, c.in[0] + h * p.latent, static_cast<size_t>(p.latent) * sizeof(float));
                std::memcpy(query + p.latent, c.in[1] + (h + 1) * q_stride - p.rope, static_cast<size_t>(p.rope) * sizeof(float));
                std::fill(query + width, query + pad, 0.0F);
                std::fill_n(s.y + int64_t{i} * pad, pad, 0.0F);
                s.best[i] = -INFINITY;
                s.sum[i] = 0;
            }
            for (int32_t i = 0; i < kKeyBlock; ++i) {
                std::fill(s.keys + int64_t{i} * pad + width, s.keys + int64_t{i + 1} * pad, 0.0F);
            }
            const SeqRows& seq = sequence_of(*c.step, row);
            const uint8_t* cache = c.step->state.latents(seq.slot, p.mla);
            const int64_t visible = seq.position + (row - seq.first_row) + 1;
            for (int64_t t = 0; t < visible; t += kKeyBlock) {
                call.n_keys = static_cast<int32_t>(std::min<int64_t>(kKeyBlock, visible - t));
                for (int32_t i = 0; i < call.n_keys; ++i) {
                    widen(cache + static_cast<size_t>(t + i) * layout.latent_row_bytes(), s.keys + int64_t{i} * pad, width);
                }
                self.kernels.attend(call);
            }
            for (int32_t i = 0; i < call.n_heads; ++i) {
                const float* y = s.y + int64_t{i} * pad;
                float* out = c.out + (row * p.n_head + first + i) * p.latent;
                for (int32_t x = 0; x < p.latent; ++x) {
                    out[x] = y[x] / s.sum[i];
                }
            }
        }
    });
}

size_t cpu_mla_attention_workspace(const CpuBackend& self, const Op& op) {
    return attend_scratch_bytes(op) * static_cast<size_t>(self.n_threads());
}

}  // namespace delta
