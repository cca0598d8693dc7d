#include "runtime/input_stats.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "base/error.h"

namespace delta {
namespace {

template <class T>
void store(uint8_t* at, const std::vector<double>& values) {
    std::copy(values.begin(), values.end(), reinterpret_cast<T*>(at));
}

template <class T>
void load(const uint8_t* at, std::vector<double>& values) {
    std::copy_n(reinterpret_cast<const T*>(at), values.size(), values.begin());
}

// The tensor that holds the rows of a weight, if it does so as they are: not for private copies, nor where a matrix of the weight is
// a part of one of the tensor.
const GgufTensor* tensor_of(const Weight& weight, const GgufSet& file) {
    for (const GgufTensor& tensor : file.tensors()) {
        if (weight.data >= tensor.data && weight.data < tensor.data + tensor.n_bytes) {
            return tensor.mats == weight.mats && tensor.cols == weight.cols ? &tensor : nullptr;
        }
    }
    return nullptr;
}

}  // namespace

void InputStats::add(int64_t mat, const double* row) {
    double* sums = sum_squares.data() + mat * cols;
    for (int64_t c = 0; c < cols; ++c) {
        sums[c] += row[c] * row[c];
    }
    n_rows[static_cast<size_t>(mat)] += 1;
}

// h = glu(gate_e z, up_e z) for pairs of a row z and an expert e. The op gives down_e h only, so it is run with other matrices in
// the place of down: ones that select columns of h, L at a time since its output is as wide as z. It is the device's own h.
class InputCollector::HiddenRows {
   public:
    HiddenRows(Backend& backend, int32_t n_batch) : backend_(backend), n_batch_(n_batch) {}

    // Calls `fn(i, h)` for every pair i of row z[i] of [n, L] and expert[i], h of [X].
    template <class Fn>
    void each(const Op& op, const std::vector<double>& z, const std::vector<int32_t>& expert, Fn&& fn) {
        const int64_t n_z = op.w[0]->cols;
        const int64_t n_hidden = op.w[0]->rows;
        const size_t n = expert.size();
        std::vector<double> hidden;
        std::vector<double> part;
        for (size_t first = 0; first < n; first += static_cast<size_t>(n_batch_)) {
            const size_t count = std::min(n - first, static_cast<size_t>(n_batch_));
            const std::vector<double> rows(z.begin() + static_cast<int64_t>(first) * n_z, z.begin() + static_cast<int64_t>(first + count) * n_z);
            std::vector<double> route;
            for (size_t i = first; i < first + count; ++i) {
                route.insert(route.end(), {static_cast<double>(expert[i]), 1.0});
            }
            hidden.resize(count * static_cast<size_t>(n_hidden));
            for (int64_t begin = 0; begin < n_hidden; begin += n_z) {
                run(op, begin, rows, route, count, part);
                for (size_t i = 0; i < count; ++i) {
                    std::copy_n(part.begin() + static_cast<int64_t>(i) * n_z, std::min(n_z, n_hidden - begin),
                                hidden.begin() + static_cast<int64_t>(i) * n_hidden + begin);
                }
            }
            for (size_t i = 0; i < count; ++i) {
                fn(first + i, hidden.data() + i * static_cast<size_t>(n_hidden));
            }
        }
    }

   private:
    // out [count, L]: columns begin .. begin + L - 1 of h, zeros beyond its end.
    void run(const Op& op, int64_t begin, const std::vector<double>& z, const std::vector<double>& route, size_t count,
             std::vector<double>& out) {
        const Weight& select = selector(*op.w[0], begin);
        Graph graph;
        Recorder rec(graph);
        const Value z_value = rec.bank(static_cast<int32_t>(op.w[0]->cols), 1);
        const Value route_value = rec.bank(2, 1);
        const Value result =
            rec.moe_experts(z_value, route_value, *op.w[0], *op.w[1], select, {.n_used = 1, .activation = op.get<ExpertParams>().activation});
        rec.finish(result);
        const ArenaPlan plan = plan_arena(graph, backend_.value_type(), n_batch_, 1);
        reserve(arena_, plan.bytes);
        reserve(workspace_, backend_.workspace_bytes(graph.ops.front(), n_batch_));
        const auto at = [&](const Value& v) { return arena_->data + plan.offset[static_cast<size_t>(v.id)]; };
        const bool wide = backend_.value_type() == ValueType::F64;
        wide ? store<double>(at(z_value), z) : store<float>(at(z_value), z);
        wide ? store<double>(at(route_value), route) : store<float>(at(route_value), route);
        tokens_.assign(count, 0);
        Step step;
        step.tokens = tokens_;
        backend_.run(graph, plan, step, arena_->data, workspace_->data, {});
        out.resize(count * static_cast<size_t>(result.cols));
        wide ? load<double>(at(result), out) : load<float>(at(result), out);
    }

    void reserve(std::unique_ptr<Buffer>& buffer, size_t n_bytes) {
        if (buffer == nullptr || buffer->bytes < n_bytes) {
            buffer = backend_.allocate(std::max<size_t>(n_bytes, 1), "statistics of inputs");
        }
    }

    // One matrix [L, X] for all experts: row r has a one in column begin + r.
    const Weight& selector(const Weight& gate, int64_t begin) {
        Selector& s = selectors_[{gate.cols, gate.rows, gate.mats, begin}];
        if (s.weight.data == nullptr) {
            s.values.assign(static_cast<size_t>(gate.cols * gate.rows), 0.0F);
            for (int64_t r = 0; r < gate.cols && begin + r < gate.rows; ++r) {
                s.values[static_cast<size_t>(r * gate.rows + begin + r)] = 1.0F;
            }
            s.weight.name = "selector";
            s.weight.type = find_type(0);  // F32
            s.weight.mats = gate.mats;
            s.weight.rows = gate.cols;
            s.weight.cols = gate.rows;
            s.weight.mat_stride = 0;
            s.weight.data = reinterpret_cast<const uint8_t*>(s.values.data());
            backend_.bind_weight(s.weight);
        }
        return s.weight;
    }

    struct Selector {
        std::vector<float> values;
        Weight weight;
    };
    Backend& backend_;
    int32_t n_batch_;
    std::map<std::array<int64_t, 4>, Selector> selectors_;
    std::unique_ptr<Buffer> arena_;
    std::unique_ptr<Buffer> workspace_;
    std::vector<int32_t> tokens_;
};

InputCollector::InputCollector(const Graph& graph, Backend& backend, const GgufSet& file, int32_t n_batch)
    : uses_(graph.values.size()), kept_(graph.values.size()), is_kept_(graph.values.size()),
      hidden_rows_(std::make_unique<HiddenRows>(backend, n_batch)) {
    for (const Op& op : graph.ops) {
        if (op.kind == OpKind::Linear || op.kind == OpKind::HeadLinear) {
            const int32_t stride = op.kind == OpKind::HeadLinear ? op.get<HeadLinearParams>().stride : 0;
            const size_t n_before = stats_.size();
            const size_t index = find_or_add(*op.w[0], file);
            if (stats_.size() > n_before) {  // several products with parts of one tensor read the same input
                uses_[static_cast<size_t>(op.in[0].id)].push_back({index, stride});
            }
        } else if (op.kind == OpKind::MoeExperts) {
            experts_[&op] = {find_or_add(*op.w[0], file), find_or_add(*op.w[1], file), find_or_add(*op.w[2], file)};
            is_kept_[static_cast<size_t>(op.in[0].id)] = 1;
            is_kept_[static_cast<size_t>(op.in[1].id)] = 1;
        }
    }
    observer_ = [this](const Op& op, const double* data, int32_t rows, int32_t cols) { observe(op, data, rows, cols); };
}

InputCollector::~InputCollector() = default;

size_t InputCollector::find_or_add(const Weight& weight, const GgufSet& file) {
    const GgufTensor* tensor = tensor_of(weight, file);
    if (tensor == nullptr) {
        return Experts::kNone;
    }
    for (size_t i = 0; i < stats_.size(); ++i) {
        if (stats_[i].name == tensor->name) {
            return i;
        }
    }
    const auto n_mats = static_cast<size_t>(tensor->mats);
    stats_.push_back({std::string(tensor->name), tensor->mats, tensor->cols,
                      std::vector<double>(n_mats * static_cast<size_t>(tensor->cols)), std::vector<uint64_t>(n_mats)});
    return stats_.size() - 1;
}

void InputCollector::observe(const Op& op, const double* data, int32_t rows, int32_t cols) {
    if (op.kind == OpKind::MoeExperts) {
        add_experts(op, experts_.at(&op), rows);
    }
    if (op.out.id < 0) {
        return;
    }
    const auto id = static_cast<size_t>(op.out.id);
    for (const Use& use : uses_[id]) {
        InputStats& stats = stats_[use.index];
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t m = 0; m < stats.mats; ++m) {
                stats.add(m, data + r * cols + m * use.stride);
            }
        }
    }
    if (is_kept_[id] != 0) {
        kept_[id].assign(data, data + int64_t{rows} * cols);
    }
}

void InputCollector::add_experts(const Op& op, const Experts& experts, int32_t n_rows) {
    // Taken away: nobody else reads them, and one layer's are enough to hold.
    const std::vector<double> z = std::move(kept_[static_cast<size_t>(op.in[0].id)]);
    const std::vector<double> route = std::move(kept_[static_cast<size_t>(op.in[1].id)]);
    const int64_t n_used = op.get<ExpertParams>().n_used;
    const int64_t n_z = op.in[0].cols;
    const auto expert_of = [&](int64_t place) {
        return static_cast<int32_t>(route[static_cast<size_t>(place / n_used * 2 * n_used + place % n_used)]);
    };
    // Places (row, choice) by expert, so that the second computation reads every expert once.
    std::vector<int64_t> places(static_cast<size_t>(n_rows * n_used));
    std::iota(places.begin(), places.end(), int64_t{0});
    std::stable_sort(places.begin(), places.end(), [&](int64_t a, int64_t b) { return expert_of(a) < expert_of(b); });

    std::vector<double> inputs;
    std::vector<int32_t> expert;
    inputs.reserve(places.size() * static_cast<size_t>(n_z));
    for (const int64_t place : places) {
        const double* row = z.data() + place / n_used * n_z;
        expert.push_back(expert_of(place));
        inputs.insert(inputs.end(), row, row + n_z);
        for (const size_t index : {experts.gate, experts.up}) {
            if (index != Experts::kNone) {
                stats_[index].add(expert.back(), row);
            }
        }
    }
    if (experts.down != Experts::kNone) {
        hidden_rows_->each(op, inputs, expert, [&](size_t i, const double* h) { stats_[experts.down].add(expert[i], h); });
    }
}

}  // namespace delta
