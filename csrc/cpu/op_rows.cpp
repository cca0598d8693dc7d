// Ops that treat each row, or each value, by itself.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/ops.h"
#include "cpu/rows.h"

namespace delta {
namespace {

constexpr int64_t kStretch = 1024;  // values of one item of an elementwise op
constexpr int64_t kSlow = 16;       // an exponential, in multiplications

// f(first, n) over stretches of the whole output.
template <class F>
void elementwise(CpuBackend& self, const FloatCall& c, int64_t cost, const F& f) {
    const int64_t n = int64_t{c.n_rows} * c.op->out.cols;
    self.parallel((n + kStretch - 1) / kStretch, kStretch * cost, [&](int64_t begin, int64_t end, int32_t) {
        const int64_t first = begin * kStretch;
        f(first, std::min(end * kStretch, n) - first);
    });
}

}  // namespace

void cpu_embed(CpuBackend& self, const FloatCall& c) {
    const Weight& w = *c.op->w[0];
    each_row(self, c.n_rows, w.cols, [&](int64_t r) {
        const int32_t token = c.step->tokens[static_cast<size_t>(r)];
        if (is_feature(token)) {
            std::memcpy(c.out + r * w.cols, c.step->features[static_cast<size_t>(feature_token(token))], static_cast<size_t>(w.cols) * sizeof(float));
        } else {
            w.type->to_float(w.row(0, token), c.out + r * w.cols, w.cols);
        }
    });
}

void cpu_rms_norm(CpuBackend& self, const FloatCall& c) {
    const int64_t n = c.op->out.cols;
    const float eps = c.op->get<NormParams>().eps;
    each_row(self, c.n_rows, 2 * n, [&](int64_t r) {
        self.kernels.rms_norm(c.in[0] + r * n, vector(*c.op->w[0]), n, eps, c.out + r * n);
    });
}

void cpu_gated_norm(CpuBackend& self, const FloatCall& c) {
    const int64_t n = c.op->w[0]->cols;
    const float eps = c.op->get<NormParams>().eps;
    each_row(self, c.n_rows * (c.op->out.cols / n), kSlow * n, [&](int64_t i) {
        self.kernels.gated_norm(c.in[0] + i * n, c.in[1] + i * n, vector(*c.op->w[0]), n, eps, c.out + i * n);
    });
}

void cpu_add(CpuBackend& self, const FloatCall& c) {
    elementwise(self, c, 1, [&](int64_t i, int64_t n) { self.kernels.add(c.in[0] + i, c.in[1] + i, n, c.out + i); });
}

void cpu_mul_sigmoid(CpuBackend& self, const FloatCall& c) {
    elementwise(self, c, kSlow, [&](int64_t i, int64_t n) { self.kernels.mul_sigmoid(c.in[0] + i, c.in[1] + i, n, c.out + i); });
}

void cpu_glu(CpuBackend& self, const FloatCall& c) {
    const CpuKernels& k = self.kernels;
    const Activation& a = c.op->get<Activation>();
    elementwise(self, c, 4 * kSlow, [&](int64_t i, int64_t n) {
        if (a.kind == Activation::Silu) {
            k.silu_mul(c.in[0] + i, c.in[1] + i, n, c.out + i);
        } else {
            k.situ_mul(c.in[0] + i, c.in[1] + i, n, a.beta, a.linear_beta, c.out + i);
        }
    });
}

void cpu_bank_push(CpuBackend& self, const FloatCall& c) {
    const int64_t n = c.op->in[0].cols;
    const int64_t width = c.op->out.cols;
    const int64_t at = c.op->get<BankParams>().slot * n;
    each_row(self, c.n_rows, n, [&](int64_t r) {
        std::memcpy(c.out + r * width + at, c.in[0] + r * n, static_cast<size_t>(n) * sizeof(float));
    });
}

namespace {

// One thread's candidates of one row.
struct MixScratch {
    const float** entry;  // [n_entries]
    double* score;        // [n_entries]
    float* weight;        // [n_entries]

    MixScratch(Workspace& space, int32_t n_entries)
        : entry(space.take<const float*>(static_cast<size_t>(n_entries))),
          score(space.take<double>(static_cast<size_t>(n_entries))),
          weight(space.take<float>(static_cast<size_t>(n_entries))) {}
};

MixScratch mix_scratch(void* workspace, int32_t thread, int32_t n_entries) {
    Workspace one;
    MixScratch(one, n_entries);
    Workspace mine(static_cast<uint8_t*>(workspace) + static_cast<size_t>(thread) * one.used());
    return {mine, n_entries};
}

}  // namespace

void cpu_bank_mix(CpuBackend& self, const FloatCall& c) {
    const CpuKernels& k = self.kernels;
    const BankParams& p = c.op->get<BankParams>();
    const int64_t n = c.op->out.cols;
    const int64_t width = c.op->in[0].cols;
    const int32_t n_entries = p.n_slots + 1;
    self.parallel(c.n_rows, 3 * n * n_entries, [&](int64_t begin, int64_t end, int32_t thread) {
        const MixScratch s = mix_scratch(c.workspace, thread, n_entries);
        for (int64_t r = begin; r < end; ++r) {
            double best = -INFINITY;
            for (int32_t e = 0; e < n_entries; ++e) {
                s.entry[e] = e < p.n_slots ? c.in[0] + r * width + e * n : c.in[1] + r * n;
                s.score[e] = k.rms_dot(s.entry[e], vector(*c.op->w[0]), n, p.eps);
                best = s.score[e] > best ? s.score[e] : best;
            }
            double sum = 0;
            for (int32_t e = 0; e < n_entries; ++e) {
                s.score[e] = std::exp(s.score[e] - best);
                sum += s.score[e];
            }
            for (int32_t e = 0; e < n_entries; ++e) {
                s.weight[e] = static_cast<float>(s.score[e] / sum);
            }
            k.weighted_sum(s.entry, s.weight, n_entries, n, c.out + r * n);
        }
    });
}

size_t cpu_bank_mix_workspace(const CpuBackend& self, const Op& op) {
    Workspace space;
    MixScratch(space, op.get<BankParams>().n_slots + 1);
    return space.used() * static_cast<size_t>(self.n_threads());
}

void cpu_pick_rows(CpuBackend& self, const FloatCall& c) {
    const int64_t n = c.op->out.cols;
    each_row(self, c.n_rows, n, [&](int64_t r) {
        std::memcpy(c.out + r * n, c.in[0] + c.step->output_rows[static_cast<size_t>(r)] * n, static_cast<size_t>(n) * sizeof(float));
    });
}

}  // namespace delta
