// moe_route and moe_experts.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/ops.h"
#include "cpu/product.h"

namespace delta {
namespace {

constexpr int32_t kExpertRows = 64;    // inputs of one expert at a time
constexpr int64_t kInnerChunk = 32;  // rows of gate and up of one item; a multiple of kInputBlock, so that its results can be rounded
constexpr int64_t kDownChunk = 32;   // rows of down of one item

struct RouteScratch {
    float* score;  // [n_expert]
    float* best;   // [n_used]
};

RouteScratch route_scratch(Workspace& space, int64_t n_expert, int32_t n_used) {
    return {space.take<float>(static_cast<size_t>(n_expert)), space.take<float>(static_cast<size_t>(n_used))};
}

size_t route_scratch_bytes(const Op& op) {
    Workspace space;
    route_scratch(space, op.in[0].cols, op.get<RouteParams>().n_used);
    return space.used();
}

}  // namespace

void cpu_moe_route(CpuBackend& self, const FloatCall& c) {
    const RouteParams& p = c.op->get<RouteParams>();
    const int64_t n_expert = c.op->in[0].cols;
    const float* bias = c.op->w[0] != nullptr ? reinterpret_cast<const float*>(c.op->w[0]->data) : nullptr;
    const size_t scratch_bytes = route_scratch_bytes(*c.op);
    self.parallel(c.n_rows, 16 * n_expert, [&](int64_t begin, int64_t end, int32_t thread) {
        Workspace space(static_cast<uint8_t*>(c.workspace) + static_cast<size_t>(thread) * scratch_bytes);
        const RouteScratch s = route_scratch(space, n_expert, p.n_used);
        for (int64_t r = begin; r < end; ++r) {
            float* id = c.out + r * 2 * p.n_used;
            float* weight = id + p.n_used;
            self.kernels.sigmoid(c.in[0] + r * n_expert, n_expert, s.score);
            // Insertion into the sorted list of the best so far; only a strictly larger value passes an earlier one, so ties stay
            // in the order of ids. NaN passes nothing: the list is filled with valid ids, and the weights are made NaN below.
            int32_t n = 0;
            bool bad = false;
            for (int64_t e = 0; e < n_expert; ++e) {
                const float choice = bias != nullptr ? s.score[e] + bias[e] : s.score[e];
                bad = bad || std::isnan(choice);
                if (n == p.n_used && !(choice > s.best[n - 1])) {
                    continue;
                }
                int32_t at = n < p.n_used ? n++ : n - 1;
                for (; at > 0 && choice > s.best[at - 1]; --at) {
                    s.best[at] = s.best[at - 1];
                    id[at] = id[at - 1];
                }
                s.best[at] = choice;
                id[at] = static_cast<float>(e);
            }
            double sum = 0;
            for (int32_t i = 0; i < p.n_used; ++i) {
                sum += s.score[static_cast<int64_t>(id[i])];
            }
            const double norm = p.normalise && p.n_used > 1 ? sum + 1e-20 : 1.0;
            for (int32_t i = 0; i < p.n_used; ++i) {
                weight[i] = bad ? NAN : static_cast<float>(s.score[static_cast<int64_t>(id[i])] / norm * p.scale);
            }
        }
    });
}

size_t cpu_moe_route_workspace(const CpuBackend& self, const Op& op) {
    return route_scratch_bytes(op) * static_cast<size_t>(self.n_threads());
}

namespace {

// A place is one chosen expert of one row: row * n_used + index in its route.
struct ExpertScratch {
    int32_t* begin;   // [n_expert + 1] first entry of an expert in `places`
    int32_t* active;  // [n_expert] experts that some row chose, ascending
    int32_t* places;  // [n_places] sorted by expert
    uint8_t* gate_input;
    uint8_t* up_input;
    uint8_t* hidden;  // [n_places] rows of X values, float32 or rounded

    // Of one thread:
    uint8_t* threads;
    size_t thread_bytes;
};

struct ThreadScratch {
    float* gate;       // [kExpertRows, kInnerChunk]
    float* up;         // [kExpertRows, kInnerChunk]
    float* down;       // [n_places, kDownChunk] each place's part of the sum
    const float** terms;  // [n_used]
    float* decoded;       // decoded_floats() of gate, up or down, the most of them
};

ThreadScratch thread_scratch(Workspace& space, size_t n_places, size_t n_used, size_t n_decoded) {
    ThreadScratch s;
    s.gate = space.take<float>(kExpertRows * kInnerChunk);
    s.up = space.take<float>(kExpertRows * kInnerChunk);
    s.down = space.take<float>(n_places * kDownChunk);
    s.terms = space.take<const float*>(n_used);
    s.decoded = space.take<float>(n_decoded);
    return s;
}

struct Experts {
    const Weight& gate;
    const Weight& up;
    const Weight& down;
    const ExpertParams& params;
    CpuInput gate_kind;
    CpuInput up_kind;
    CpuInput hidden_kind;
    size_t hidden_row_bytes;

    Experts(const CpuBackend& self, const Op& op)
        : gate(*op.w[0]), up(*op.w[1]), down(*op.w[2]), params(op.get<ExpertParams>()), gate_kind(self.input_kind(gate)),
          up_kind(self.input_kind(up)), hidden_kind(self.input_kind(down)) {
        hidden_row_bytes =
            !rounds_input(hidden_kind) ? static_cast<size_t>(down.cols) * sizeof(float) : rounded_row_bytes(hidden_kind, down.cols);
    }

    size_t n_decoded() const { return std::max({decoded_floats(gate), decoded_floats(up), decoded_floats(down)}); }

    ExpertScratch scratch(Workspace& space, int32_t n_rows, int32_t n_threads) const {
        const auto n_expert = static_cast<size_t>(gate.mats);
        const auto n_places = static_cast<size_t>(n_rows) * static_cast<size_t>(params.n_used);
        ExpertScratch s;
        s.begin = space.take<int32_t>(n_expert + 1);
        s.active = space.take<int32_t>(n_expert);
        s.places = space.take<int32_t>(n_places);
        s.gate_input = space.take<uint8_t>(static_cast<size_t>(n_rows) * rounded_row_bytes(gate_kind, gate.cols));
        s.up_input = up_kind == gate_kind ? s.gate_input
                                          : space.take<uint8_t>(static_cast<size_t>(n_rows) * rounded_row_bytes(up_kind, up.cols));
        s.hidden = space.take<uint8_t>(n_places * hidden_row_bytes);
        Workspace one;
        thread_scratch(one, n_places, static_cast<size_t>(params.n_used), n_decoded());
        s.thread_bytes = one.used();
        s.threads = space.take<uint8_t>(s.thread_bytes * static_cast<size_t>(n_threads));
        return s;
    }
};

// Sorts the places by expert; returns the number of experts in use.
int32_t group_by_expert(const FloatCall& c, const Experts& x, const ExpertScratch& s) {
    const int32_t n_used = x.params.n_used;
    const auto n_expert = static_cast<int32_t>(x.gate.mats);
    const auto expert = [&](int32_t row, int32_t i) { return static_cast<int32_t>(c.in[1][int64_t{row} * 2 * n_used + i]); };
    std::fill_n(s.begin, n_expert + 1, 0);
    for (int32_t row = 0; row < c.n_rows; ++row) {
        for (int32_t i = 0; i < n_used; ++i) {
            ++s.begin[expert(row, i) + 1];
        }
    }
    int32_t n_active = 0;
    for (int32_t e = 0; e < n_expert; ++e) {
        if (s.begin[e + 1] > 0) {
            s.active[n_active++] = e;
        }
        s.begin[e + 1] += s.begin[e];
    }
    // Filling moves every begin to its end, which is the next begin: shift back afterwards.
    for (int32_t row = 0; row < c.n_rows; ++row) {
        for (int32_t i = 0; i < n_used; ++i) {
            s.places[s.begin[expert(row, i)]++] = row * n_used + i;
        }
    }
    std::memmove(s.begin + 1, s.begin, static_cast<size_t>(n_expert) * sizeof(int32_t));
    s.begin[0] = 0;
    return n_active;
}

}  // namespace

void cpu_moe_experts(CpuBackend& self, const FloatCall& c) {
    const CpuKernels& k = self.kernels;
    const Experts x(self, *c.op);
    const int32_t n_used = x.params.n_used;
    const int64_t width = x.gate.cols;
    const int64_t inner = x.gate.rows;
    const size_t n_places = static_cast<size_t>(c.n_rows) * static_cast<size_t>(n_used);
    Workspace space(c.workspace);
    const ExpertScratch s = x.scratch(space, c.n_rows, self.n_threads());
    const auto mine = [&](int32_t thread) {
        Workspace part(s.threads + static_cast<size_t>(thread) * s.thread_bytes);
        return thread_scratch(part, n_places, static_cast<size_t>(n_used), x.n_decoded());
    };

    const int32_t n_active = group_by_expert(c, x, s);
    const Inputs gate_in = round_inputs(self, x.gate_kind, c.in[0], c.n_rows, width, width, s.gate_input);
    const Inputs up_in =
        x.up_kind == x.gate_kind ? gate_in : round_inputs(self, x.up_kind, c.in[0], c.n_rows, width, width, s.up_input);
    const int64_t rows_per_expert = (static_cast<int64_t>(n_places) + n_active - 1) / n_active;

    // Items are (expert, stretch of its inner width): gate, up and the activation, straight into the form that `down` reads.
    const int64_t inner_chunks = (inner + kInnerChunk - 1) / kInnerChunk;
    self.parallel(n_active * inner_chunks, 2 * kInnerChunk * width * rows_per_expert, [&](int64_t begin, int64_t end, int32_t thread) {
        const ThreadScratch t = mine(thread);
        for (int64_t item = begin; item < end; ++item) {
            const int32_t e = s.active[item / inner_chunks];
            const int64_t first = item % inner_chunks * kInnerChunk;
            const int64_t n = std::min(kInnerChunk, inner - first);
            for (int32_t p = s.begin[e]; p < s.begin[e + 1]; p += kExpertRows) {
                const int32_t n_x = std::min(kExpertRows, s.begin[e + 1] - p);
                const auto row = [&](int64_t j) { return s.places[p + j] / n_used; };
                multiply_rows(k, x.gate, e, first, n, gate_in, n_x, row, [&](int64_t j) { return t.gate + j * kInnerChunk; }, t.decoded);
                multiply_rows(k, x.up, e, first, n, up_in, n_x, row, [&](int64_t j) { return t.up + j * kInnerChunk; }, t.decoded);
                for (int32_t j = 0; j < n_x; ++j) {
                    uint8_t* hidden = s.hidden + static_cast<size_t>(s.places[p + j]) * x.hidden_row_bytes;
                    float* g = t.gate + j * kInnerChunk;
                    float* y = !rounds_input(x.hidden_kind) ? reinterpret_cast<float*>(hidden) + first : g;
                    const Activation& a = x.params.activation;
                    if (a.kind == Activation::Silu) {
                        k.silu_mul(g, t.up + j * kInnerChunk, n, y);
                    } else {
                        k.situ_mul(g, t.up + j * kInnerChunk, n, a.beta, a.linear_beta, y);
                    }
                    if (rounds_input(x.hidden_kind)) {
                        const RoundedRow row = rounded_row(hidden, inner);
                        k.quantize[x.hidden_kind](y, n, {row.q + first, row.scales + first / kInputBlock, row.sums + first / 16,
                                                         row.bytes + first / kInputBlock});
                    }
                }
            }
        }
    });

    // Items are stretches of the output, each for all rows and experts: that way every row adds up its experts in the order of its
    // route, whatever the grouping, and no expert is read twice.
    const Inputs hidden{s.hidden, x.hidden_row_bytes};
    const int64_t down_chunks = (width + kDownChunk - 1) / kDownChunk;
    self.parallel(down_chunks, kDownChunk * inner * static_cast<int64_t>(n_places), [&](int64_t begin, int64_t end, int32_t thread) {
        const ThreadScratch t = mine(thread);
        for (int64_t item = begin; item < end; ++item) {
            const int64_t first = item * kDownChunk;
            const int64_t n = std::min(kDownChunk, width - first);
            for (int32_t i = 0; i < n_active; ++i) {
                const int32_t e = s.active[i];
                multiply_rows(
                    k, x.down, e, first, n, hidden, s.begin[e + 1] - s.begin[e], [&](int64_t j) { return s.places[s.begin[e] + j]; },
                    [&](int64_t j) { return t.down + int64_t{s.places[s.begin[e] + j]} * kDownChunk; }, t.decoded);
            }
            for (int64_t r = 0; r < c.n_rows; ++r) {
                for (int32_t i = 0; i < n_used; ++i) {
                    t.terms[i] = t.down + (r * n_used + i) * kDownChunk;
                }
                k.weighted_sum(t.terms, c.in[1] + r * 2 * n_used + n_used, n_used, n, c.out + r * width + first);
            }
        }
    });
}

size_t cpu_moe_experts_workspace(const CpuBackend& self, const Op& op, int32_t n_rows) {
    Workspace space;
    Experts(self, op).scratch(space, n_rows, self.n_threads());
    return space.used();
}

}  // namespace delta
