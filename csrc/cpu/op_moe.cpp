// moe_route and moe_experts.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/ops.h"
#include "cpu/product.h"

namespace delta {
namespace {

constexpr int64_t kFewPlaces = 64;     // up to here each matrix is read in one go, and the products between are kept
constexpr int64_t kFewChunk = 32;      // its rows of one item then
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

    // With few places:
    float* gate;  // [n_places, X]
    float* up;    // [n_places, X]
    float* down;  // [n_places, E] each place's part of the sum

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
        const size_t n_kept = std::min<size_t>(n_places, kFewPlaces);
        s.gate = space.take<float>(n_kept * static_cast<size_t>(gate.rows));
        s.up = space.take<float>(n_kept * static_cast<size_t>(up.rows));
        s.down = space.take<float>(n_kept * static_cast<size_t>(down.rows));
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

// What both ways below share.
struct ExpertCall {
    CpuBackend& self;
    const FloatCall& c;
    const Experts& x;
    const ExpertScratch& s;
    Inputs gate_in;
    Inputs up_in;
    int32_t n_active;

    int32_t n_used() const { return x.params.n_used; }
    size_t n_places() const { return static_cast<size_t>(c.n_rows) * static_cast<size_t>(n_used()); }
    int64_t width() const { return x.gate.cols; }
    int64_t inner() const { return x.gate.rows; }

    ThreadScratch scratch(int32_t thread) const {
        Workspace part(s.threads + static_cast<size_t>(thread) * s.thread_bytes);
        return thread_scratch(part, n_places(), static_cast<size_t>(n_used()), x.n_decoded());
    }

    // Values first .. first + n - 1 of a place's input of `down`, from those of its gate and up.
    void activate(float* gate, const float* up, int32_t place, int64_t first, int64_t n) const {
        const CpuKernels& k = self.kernels;
        uint8_t* hidden = s.hidden + static_cast<size_t>(place) * x.hidden_row_bytes;
        float* y = !rounds_input(x.hidden_kind) ? reinterpret_cast<float*>(hidden) + first : gate;
        const Activation& a = x.params.activation;
        if (a.kind == Activation::Silu) {
            k.silu_mul(gate, up, n, y);
        } else {
            k.situ_mul(gate, up, n, a.beta, a.linear_beta, y);
        }
        if (rounds_input(x.hidden_kind)) {
            const RoundedRow row = rounded_row(hidden, inner());
            k.quantize[x.hidden_kind](
                y, n, {row.q + first, row.scales + first / kInputBlock, row.sums + first / 16, row.bytes + first / kInputBlock});
        }
    }

    // Values first .. first + n - 1 of a row's sum; part(i) has those of its i-th expert. The order is that of the route, whatever the
    // grouping.
    template <class PartOf>
    void add_up(int64_t row, int64_t first, int64_t n, const float** terms, const PartOf& part) const {
        for (int32_t i = 0; i < n_used(); ++i) {
            terms[i] = part(i);
        }
        const float* weight = c.in[1] + row * 2 * n_used() + n_used();
        self.kernels.weighted_sum(terms, weight, n_used(), n, c.out + row * width() + first);
    }
};

// Few places: time goes by reading weights, so each matrix is read from its first byte to its last by one thread or a few.
void few_places(const ExpertCall& e) {
    CpuBackend& self = e.self;
    const auto multiply = [&](const Weight& w, int32_t active, int64_t first, const Inputs& in, bool by_place, float* out, int32_t thread) {
        const int32_t expert = e.s.active[active];
        const int32_t* places = e.s.places + e.s.begin[expert];
        multiply_rows(
            self.kernels, w, expert, first, std::min(kFewChunk, w.rows - first), in, e.s.begin[expert + 1] - e.s.begin[expert],
            [&](int64_t j) { return by_place ? places[j] : places[j] / e.n_used(); },
            [&](int64_t j) { return out + places[j] * w.rows + first; }, e.scratch(thread).decoded);
    };
    const int64_t inner_chunks = (e.inner() + kFewChunk - 1) / kFewChunk;
    self.parallel(2 * e.n_active * inner_chunks, kFewChunk * e.width(), [&](int64_t begin, int64_t end, int32_t thread) {
        for (int64_t item = begin; item < end; ++item) {
            const auto active = static_cast<int32_t>(item / (2 * inner_chunks));
            const bool is_up = item / inner_chunks % 2 == 1;
            const int64_t first = item % inner_chunks * kFewChunk;
            multiply(is_up ? e.x.up : e.x.gate, active, first, is_up ? e.up_in : e.gate_in, false, is_up ? e.s.up : e.s.gate, thread);
        }
    });
    self.parallel(static_cast<int64_t>(e.n_places()), 16 * e.inner(), [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t p = begin; p < end; ++p) {
            e.activate(e.s.gate + p * e.inner(), e.s.up + p * e.inner(), static_cast<int32_t>(p), 0, e.inner());
        }
    });
    const Inputs hidden{e.s.hidden, e.x.hidden_row_bytes, e.x.hidden_kind};
    const int64_t down_chunks = (e.width() + kFewChunk - 1) / kFewChunk;
    self.parallel(e.n_active * down_chunks, kFewChunk * e.inner(), [&](int64_t begin, int64_t end, int32_t thread) {
        for (int64_t item = begin; item < end; ++item) {
            multiply(e.x.down, static_cast<int32_t>(item / down_chunks), item % down_chunks * kFewChunk, hidden, true, e.s.down, thread);
        }
    });
    self.parallel(e.c.n_rows, e.n_used() * e.width(), [&](int64_t begin, int64_t end, int32_t thread) {
        for (int64_t r = begin; r < end; ++r) {
            e.add_up(r, 0, e.width(), e.scratch(thread).terms, [&](int32_t i) { return e.s.down + (r * e.n_used() + i) * e.width(); });
        }
    });
}

// Many places: time goes by multiplying, so what one item computes stays in the cache.
void many_places(const ExpertCall& e) {
    CpuBackend& self = e.self;
    const CpuKernels& k = self.kernels;
    const Experts& x = e.x;
    const ExpertScratch& s = e.s;
    const int64_t inner = e.inner(), width = e.width();
    const int64_t rows_per_expert = (static_cast<int64_t>(e.n_places()) + e.n_active - 1) / e.n_active;

    // Items are (expert, stretch of its inner width): gate, up and the activation, straight into the form that `down` reads.
    const int64_t inner_chunks = (inner + kInnerChunk - 1) / kInnerChunk;
    self.parallel(e.n_active * inner_chunks, 2 * kInnerChunk * width * rows_per_expert, [&](int64_t begin, int64_t end, int32_t thread) {
        const ThreadScratch t = e.scratch(thread);
        for (int64_t item = begin; item < end; ++item) {
            const int32_t expert = s.active[item / inner_chunks];
            const int64_t first = item % inner_chunks * kInnerChunk;
            const int64_t n = std::min(kInnerChunk, inner - first);
            for (int32_t p = s.begin[expert]; p < s.begin[expert + 1]; p += kExpertRows) {
                const int32_t n_x = std::min(kExpertRows, s.begin[expert + 1] - p);
                const auto row = [&](int64_t j) { return s.places[p + j] / e.n_used(); };
                const auto gate = [&](int64_t j) { return t.gate + j * kInnerChunk; };
                const auto up = [&](int64_t j) { return t.up + j * kInnerChunk; };
                multiply_rows(k, x.gate, expert, first, n, e.gate_in, n_x, row, gate, t.decoded);
                multiply_rows(k, x.up, expert, first, n, e.up_in, n_x, row, up, t.decoded);
                for (int32_t j = 0; j < n_x; ++j) {
                    e.activate(gate(j), up(j), s.places[p + j], first, n);
                }
            }
        }
    });

    // Items are stretches of the output, each for all rows and experts, so that no expert is read twice.
    const Inputs hidden{s.hidden, x.hidden_row_bytes, x.hidden_kind};
    const int64_t down_chunks = (width + kDownChunk - 1) / kDownChunk;
    const int64_t cost = kDownChunk * inner * static_cast<int64_t>(e.n_places());
    self.parallel(down_chunks, cost, [&](int64_t begin, int64_t end, int32_t thread) {
        const ThreadScratch t = e.scratch(thread);
        for (int64_t item = begin; item < end; ++item) {
            const int64_t first = item * kDownChunk;
            const int64_t n = std::min(kDownChunk, width - first);
            for (int32_t i = 0; i < e.n_active; ++i) {
                const int32_t expert = s.active[i];
                const int32_t* places = s.places + s.begin[expert];
                multiply_rows(
                    k, x.down, expert, first, n, hidden, s.begin[expert + 1] - s.begin[expert], [&](int64_t j) { return places[j]; },
                    [&](int64_t j) { return t.down + int64_t{places[j]} * kDownChunk; }, t.decoded);
            }
            for (int64_t r = 0; r < e.c.n_rows; ++r) {
                e.add_up(r, first, n, t.terms, [&](int32_t j) { return t.down + (r * e.n_used() + j) * kDownChunk; });
            }
        }
    });
}

}  // namespace

void cpu_moe_experts(CpuBackend& self, const FloatCall& c) {
    const Experts x(self, *c.op);
    Workspace space(c.workspace);
    const ExpertScratch s = x.scratch(space, c.n_rows, self.n_threads());
    const int32_t n_active = group_by_expert(c, x, s);
    const int64_t width = x.gate.cols;
    const Inputs gate_in = round_inputs(self, x.gate_kind, c.in[0], c.n_rows, width, width, s.gate_input);
    const Inputs up_in =
        x.up_kind == x.gate_kind ? gate_in : round_inputs(self, x.up_kind, c.in[0], c.n_rows, width, width, s.up_input);
    const ExpertCall call{self, c, x, s, gate_in, up_in, n_active};
    if (call.n_places() <= kFewPlaces) {
        few_places(call);
    } else {
        many_places(call);
    }
}

size_t cpu_moe_experts_workspace(const CpuBackend& self, const Op& op, int32_t n_rows) {
    Workspace space;
    Experts(self, op).scratch(space, n_rows, self.n_threads());
    return space.used();
}

}  // namespace delta
