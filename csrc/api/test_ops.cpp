// delta_test_op: one op, alone, on a device, between guard rows.
#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <string>
#include <vector>

#include "api/handles.h"
#include "backend/backend.h"
#include "base/error.h"
#include "include/deltallama_test.h"

namespace delta {
namespace {

std::unique_ptr<Backend> make_backend(const delta_test_case& t) {
    const BackendOptions options{.n_threads = static_cast<int32_t>(t.n_threads), .activations = static_cast<delta_activations>(t.activations)};
    const std::string device = t.device;
    if (device == "ref") {
        return make_ref_backend(options);
    }
    if (device == "cpu") {
        return make_cpu_backend(options);
    }
    throw Error(DELTA_ARG, "unknown device " + device);
}

struct OpTest {
    const delta_test_case& t;
    std::unique_ptr<Backend> backend;
    std::deque<Weight> weights;
    const Weight* w[3] = {};
    Graph graph;
    Value in[kMaxInputs];

    explicit OpTest(const delta_test_case& test) : t(test), backend(make_backend(test)) {
        Recorder rec(graph);
        for (int i = 0; i < kMaxInputs; ++i) {
            if (t.inputs[i] != nullptr) {
                in[i] = rec.bank(t.input_cols[i], 1, t.image[0] > 0 ? RowKind::Patches : RowKind::Tokens);
            }
        }
        for (int i = 0; i < kMaxWeights; ++i) {
            const delta_test_weight& src = t.weights[i];
            if (src.name != nullptr) {
                Weight weight;
                weight.name = src.name;
                weight.type = find_type(src.type);
                if (weight.type == nullptr) {
                    throw Error(DELTA_ARG, format("unknown type %u", src.type));
                }
                weight.mats = src.mats;
                weight.rows = src.rows;
                weight.cols = src.cols;
                weight.mat_stride = static_cast<size_t>(src.rows) * weight.row_bytes();
                weight.data = static_cast<const uint8_t*>(src.data);
                weights.push_back(weight);
                backend->bind_weight(weights.back());
                w[i] = &weights.back();
            }
        }
        record(rec);
    }

    void record(Recorder& rec) {
        const std::string op = t.op;
        const double* p = t.params;
        const auto i32 = [&](int i) { return static_cast<int32_t>(p[i]); };
        const auto f32 = [&](int i) { return static_cast<float>(p[i]); };
        const auto activation = [&](int i) {
            return Activation{i32(i) == 0 ? Activation::Silu : Activation::Situ, f32(i + 1), f32(i + 2)};
        };
        if (op == "embed") {
            rec.embed(*w[0]);
        } else if (op == "rms_norm") {
            rec.rms_norm(in[0], *w[0], f32(0));
        } else if (op == "add") {
            rec.add(in[0], in[1]);
        } else if (op == "linear") {
            rec.linear(in[0], *w[0]);
        } else if (op == "head_linear") {
            rec.head_linear(in[0], *w[0], i32(0));
        } else if (op == "glu") {
            rec.glu(in[0], in[1], activation(0));
        } else if (op == "short_conv") {
            rec.short_conv(in[0], *w[0], 0, i32(0));
        } else if (op == "kda_gate") {
            rec.kda_gate(in[0], *w[0], *w[1], GateParams{p[0] != 0, f32(1)});
        } else if (op == "kda_scan") {
            rec.kda_scan(in[0], in[1], in[2], in[3], in[4], t.head_dim, 0);
        } else if (op == "gated_norm") {
            rec.gated_norm(in[0], in[1], *w[0], f32(0));
        } else if (op == "latent_append") {
            rec.latent_append(in[0], *w[0], f32(0), 0);
        } else if (op == "mla_attention") {
            rec.mla_attention(in[0], in[1], AttentionParams{0, i32(0), i32(1), i32(2), p[3]});
        } else if (op == "mul_sigmoid") {
            rec.mul_sigmoid(in[0], in[1]);
        } else if (op == "moe_route") {
            rec.moe_route(in[0], w[0], RouteParams{i32(0), p[1] != 0, f32(2)});
        } else if (op == "moe_experts") {
            rec.moe_experts(in[0], in[1], *w[0], *w[1], *w[2], ExpertParams{i32(0), activation(1)});
        } else if (op == "bank_push") {
            rec.bank_push(in[1], in[0], i32(0));
        } else if (op == "bank_mix") {
            rec.bank_mix(in[0], i32(0), in[1], *w[0], f32(1));
        } else if (op == "pick_rows") {
            rec.pick_rows(in[0]);
        } else if (op == "pixels") {
            rec.pixels(t.out_cols);
        } else if (op == "grid_position") {
            rec.grid_position(in[0], *w[0], GridParams{i32(0), i32(1)});
        } else if (op == "grid_rope") {
            rec.grid_rope(in[0], ImageAttentionParams{i32(0), i32(1), p[2]});
        } else if (op == "image_attention") {
            rec.image_attention(in[0], ImageAttentionParams{i32(0), i32(1), p[2]});
        } else if (op == "gelu") {
            rec.gelu(in[0], GeluParams{i32(0) == 0 ? GeluParams::Erf : GeluParams::Tanh});
        } else if (op == "merge_squares") {
            rec.merge_squares(in[0], i32(0));
        } else {
            throw Error(DELTA_ARG, "unknown op " + op);
        }
        graph.result = graph.ops[0].out.id >= 0 ? graph.ops[0].out : in[0];
        backend->check_op(graph.ops[0]);
    }

    void run() {
        const Op& op = graph.ops[0];
        const bool has_out = op.out.id >= 0;
        if ((has_out ? op.out.cols : 0) != t.out_cols) {
            throw Error(DELTA_ARG, format("output has %d columns, expected %d", op.out.cols, t.out_cols));
        }
        StateLayout layout;
        layout.n_kda = t.n_head > 0 ? 1 : 0;
        layout.n_mla = t.n_ctx > 0 ? 1 : 0;
        layout.conv_rows = t.conv_rows;
        layout.n_head = t.n_head;
        layout.head_dim = t.head_dim;
        layout.latent_width = t.latent_width;
        layout.n_ctx = t.n_ctx;
        layout.cache_type = find_type(t.cache_type);
        layout.value_type = backend->value_type();

        std::vector<int32_t> zeros(static_cast<size_t>(t.n_rows), 0);
        std::vector<SeqRows> seqs;
        for (int32_t i = 0; i < t.n_seqs; ++i) {
            const int32_t* s = t.seqs + 4 * i;
            seqs.push_back({s[0], s[1], s[2], s[3]});
        }
        std::vector<const float*> features;
        for (int32_t i = 0; t.features != nullptr && i < t.n_rows; ++i) {
            features.push_back(t.features + int64_t{i} * t.out_cols);
        }
        Step step;
        step.features = features;
        step.image = {t.image[0], t.image[1], t.image[2]};
        step.pixels = t.pixels;
        step.square = op.kind == OpKind::MergeSquares ? op.get<MergeParams>().side : 1;
        step.tokens = {t.tokens != nullptr ? t.tokens : zeros.data(), static_cast<size_t>(t.n_rows)};
        step.seqs = seqs;
        step.output_rows = {t.output_rows, static_cast<size_t>(t.n_output_rows)};
        if (layout.value_type == ValueType::F64) {
            run_typed<double>(op, layout, step);
        } else {
            run_typed<float>(op, layout, step);
        }
    }

    template <class T>
    void run_typed(const Op& op, const StateLayout& layout, Step& step) {
        constexpr T kNan = std::numeric_limits<T>::quiet_NaN();
        const size_t n_state = t.recurrent == nullptr ? 0 : static_cast<size_t>(t.n_slots) * layout.recurrent_bytes() / sizeof(T);
        std::vector<T> recurrent(t.recurrent, t.recurrent + n_state);
        step.state = {&layout, reinterpret_cast<uint8_t*>(recurrent.data()), static_cast<uint8_t*>(t.latent)};

        // One row more than the step has: what lies behind a matrix must stay NaN.
        const int32_t n_results = op.kind == OpKind::MergeSquares ? step.n_rows(RowKind::Squares) : t.n_output_rows;
        const ArenaPlan plan = plan_arena(graph, layout.value_type, t.n_rows + 1, n_results + 1);
        std::vector<T> arena(plan.bytes / sizeof(T), kNan);
        const auto at = [&](const Value& v) { return arena.data() + plan.offset[static_cast<size_t>(v.id)] / sizeof(T); };
        const auto n_values = [&](int i) { return int64_t{t.n_rows} * in[i].cols; };
        for (int i = 0; i < kMaxInputs; ++i) {
            if (t.inputs[i] != nullptr) {
                std::copy_n(t.inputs[i], n_values(i), at(in[i]));
            }
        }
        const size_t workspace_bytes = backend->workspace_bytes(op, t.n_rows);
        std::vector<T> workspace(workspace_bytes / sizeof(T) + 65, kNan);
        void* aligned = workspace.data();
        size_t space = workspace.size() * sizeof(T);
        aligned = std::align(64, workspace_bytes, aligned, space);
        backend->run(graph, plan, step, reinterpret_cast<uint8_t*>(arena.data()), static_cast<uint8_t*>(aligned), RunOptions{});

        for (const Value& v : graph.values) {
            const int64_t n = int64_t{step.n_rows(v.rows)} * v.cols;
            for (int64_t i = n; i < n + v.cols; ++i) {
                if (!std::isnan(at(v)[i])) {
                    throw Error(DELTA_DEVICE, format("%s wrote behind row %d of value %d", t.op, step.n_rows(v.rows), v.id));
                }
            }
        }
        for (int i = 0; i < kMaxInputs; ++i) {
            const auto same = [](double given, T now) { return static_cast<T>(given) == now || (std::isnan(given) && std::isnan(now)); };
            if (t.inputs[i] != nullptr && in[i].id != op.out.id && !std::equal(t.inputs[i], t.inputs[i] + n_values(i), at(in[i]), same)) {
                throw Error(DELTA_DEVICE, format("%s changed its input %d", t.op, i));
            }
        }
        std::copy_n(recurrent.data(), n_state, t.recurrent);
        if (op.out.id >= 0) {
            std::copy_n(at(op.out), int64_t{step.n_rows(op.out.rows)} * op.out.cols, t.out);
        }
    }
};

}  // namespace
}  // namespace delta

extern "C" delta_status delta_test_op(const delta_test_case* test) {
    return delta::guard([&] {
        if (test->size != sizeof(delta_test_case)) {
            throw delta::Error(DELTA_ABI, "size of delta_test_case");
        }
        delta::OpTest(*test).run();
    });
}

extern "C" delta_status delta_test_observe(delta_model* model, delta_test_observer fn, void* user) {
    return delta::guard([&] {
        // The observer outlives this call: it belongs to the process, as tests observe one model at a time.
        static delta::Observer observer;
        if (fn == nullptr) {
            model->model->run_options.observer = nullptr;
            return;
        }
        observer = [fn, user](const delta::Op& op, const double* data, int32_t rows, int32_t cols) {
            fn(delta::op_name(op.kind), op.name.c_str(), op.layer, data, rows, cols, user);
        };
        model->model->run_options.observer = &observer;
    });
}
