#include "graph/graph.h"

#include <algorithm>

#include "base/error.h"

namespace delta {

const char* op_name(OpKind kind) {
    switch (kind) {
#define OP(id, text) \
    case OpKind::id: \
        return text;
#include "graph/ops.def"
#undef OP
        case OpKind::Count:
            break;
    }
    return "?";
}

namespace {

std::string base_name(const Weight& w) {
    const size_t dot = w.name.rfind('.');
    return dot == std::string::npos || w.name.compare(dot, std::string::npos, ".weight") != 0 ? w.name : w.name.substr(0, dot);
}

std::string shape(const Weight& w) {
    return format("%s %s [%lld, %lld, %lld]", w.name.c_str(), w.type->name, static_cast<long long>(w.mats),
                  static_cast<long long>(w.rows), static_cast<long long>(w.cols));
}

bool is_vector(const Weight& w, int64_t n) { return w.mats == 1 && w.rows == 1 && w.cols == n; }

// Small ops that stand side by side in a model: projections of one input, and convolutions, each with a state of its own.
bool may_be_grouped(OpKind kind) { return kind == OpKind::Linear || kind == OpKind::HeadLinear || kind == OpKind::ShortConv; }

// The group of an op that comes after `ops`.
int32_t group_after(const std::vector<Op>& ops, const Op& op) {
    if (ops.empty()) {
        return 0;
    }
    const Op& last = ops.back();
    bool joins = may_be_grouped(op.kind) && may_be_grouped(last.kind) && op.out.rows == last.out.rows;
    for (auto before = ops.rbegin(); joins && before != ops.rend() && before->group == last.group; ++before) {
        joins = std::none_of(op.in.begin(), op.in.end(), [&](const Value& v) { return v.id >= 0 && v.id == before->out.id; });
    }
    return joins ? last.group : last.group + 1;
}

}  // namespace

void Recorder::check(bool ok, OpKind kind, const std::string& name, const std::string& what) const {
    if (!ok) {
        throw Error(DELTA_FORMAT, format("%s (%s): %s", name.c_str(), op_name(kind), what.c_str()));
    }
}

Value Recorder::append(OpKind kind, const std::string& name, std::initializer_list<Value> in,
                       std::initializer_list<const Weight*> w, RowKind rows, int64_t cols, OpParams params) {
    Op op;
    op.kind = kind;
    op.layer = layer_;
    op.name = name;
    op.part = part_;
    op.params = std::move(params);
    size_t i = 0;
    for (const Value& v : in) {
        check(v.id >= 0 && v.id < static_cast<int32_t>(graph_.values.size()), kind, name, "reads a value that was never made");
        // Two ops lead from one kind of rows to another.
        check(kind == OpKind::PickRows || kind == OpKind::MergeSquares || v.rows == rows, kind, name, "mixes rows of different kinds");
        op.in[i++] = v;
    }
    i = 0;
    for (const Weight* weight : w) {
        op.w[i++] = weight;
    }
    if (cols > 0) {
        check(cols <= INT32_MAX, kind, name, format("%lld columns are too many", static_cast<long long>(cols)));
        op.out = Value{static_cast<int32_t>(graph_.values.size()), rows, static_cast<int32_t>(cols)};
        graph_.values.push_back(op.out);
    }
    op.group = group_after(graph_.ops, op);
    graph_.ops.push_back(std::move(op));
    return graph_.ops.back().out;
}

Value Recorder::embed(const Weight& table) {
    check(table.mats == 1, OpKind::Embed, base_name(table), "expected one matrix, found " + shape(table));
    return append(OpKind::Embed, base_name(table), {}, {&table}, RowKind::Tokens, table.cols, NoParams{});
}

Value Recorder::rms_norm(Value x, const Weight& w, float eps) {
    check(is_vector(w, x.cols), OpKind::RmsNorm, base_name(w), format("expected %d values, found %s", x.cols, shape(w).c_str()));
    return append(OpKind::RmsNorm, base_name(w), {x}, {&w}, x.rows, x.cols, NormParams{.eps = eps});
}

Value Recorder::add(Value a, Value b) {
    const std::string name = format("blk.%d.add", layer_);
    check(a.cols == b.cols, OpKind::Add, name, format("%d and %d columns", a.cols, b.cols));
    return append(OpKind::Add, name, {a, b}, {}, a.rows, a.cols, NoParams{});
}

Value Recorder::linear(Value x, const Weight& w) {
    check(w.mats == 1 && w.cols == x.cols, OpKind::Linear, base_name(w),
          format("input has %d columns, weight is %s", x.cols, shape(w).c_str()));
    return append(OpKind::Linear, base_name(w), {x}, {&w}, x.rows, w.rows, NoParams{});
}

Value Recorder::head_linear(Value x, const Weight& w, int32_t stride) {
    check(stride >= w.cols && x.cols == w.mats * stride, OpKind::HeadLinear, base_name(w),
          format("input has %d columns, %d per head, weight is %s", x.cols, stride, shape(w).c_str()));
    return append(OpKind::HeadLinear, base_name(w), {x}, {&w}, x.rows, w.mats * w.rows, HeadLinearParams{stride});
}

Value Recorder::glu(Value gate, Value up, const Activation& activation) {
    const std::string name = format("blk.%d.glu", layer_);
    check(gate.cols == up.cols, OpKind::Glu, name, format("%d and %d columns", gate.cols, up.cols));
    check(activation.kind == Activation::Silu || activation.beta > 0, OpKind::Glu, name, "situ needs a positive beta");
    return append(OpKind::Glu, name, {gate, up}, {}, gate.rows, gate.cols, activation);
}

Value Recorder::short_conv(Value x, const Weight& w, int32_t kda, int32_t stream) {
    check(w.mats == 1 && w.rows == x.cols && w.cols >= 2, OpKind::ShortConv, base_name(w),
          format("input has %d channels, weight is %s", x.cols, shape(w).c_str()));
    return append(OpKind::ShortConv, base_name(w), {x}, {&w}, x.rows, x.cols, ConvParams{kda, stream});
}

Value Recorder::kda_gate(Value f, const Weight& a, const Weight& dt, const GateParams& params) {
    check(a.mats == 1 && a.rows == 1 && f.cols % a.cols == 0, OpKind::KdaGate, base_name(a),
          format("%d columns do not divide into the heads of %s", f.cols, shape(a).c_str()));
    check(is_vector(dt, f.cols), OpKind::KdaGate, base_name(dt), format("expected %d values, found %s", f.cols, shape(dt).c_str()));
    return append(OpKind::KdaGate, base_name(a), {f}, {&a, &dt}, f.rows, f.cols, params);
}

Value Recorder::kda_scan(Value q, Value k, Value v, Value g, Value beta, int32_t head_dim, int32_t kda) {
    const std::string name = format("blk.%d.kda_scan", layer_);
    check(q.cols == k.cols && q.cols == v.cols && q.cols == g.cols && q.cols == beta.cols * head_dim, OpKind::KdaScan, name,
          format("q %d, k %d, v %d, g %d columns, %d heads of %d", q.cols, k.cols, v.cols, g.cols, beta.cols, head_dim));
    return append(OpKind::KdaScan, name, {q, k, v, g, beta}, {}, q.rows, q.cols, ScanParams{kda});
}

Value Recorder::gated_norm(Value o, Value r, const Weight& w, float eps) {
    check(w.mats == 1 && w.rows == 1 && o.cols % w.cols == 0 && o.cols == r.cols, OpKind::GatedNorm, base_name(w),
          format("output has %d, gate %d columns, weight is %s", o.cols, r.cols, shape(w).c_str()));
    return append(OpKind::GatedNorm, base_name(w), {o, r}, {&w}, o.rows, o.cols, NormParams{.eps = eps});
}

void Recorder::latent_append(Value kv, const Weight& w, float eps, int32_t mla) {
    check(w.mats == 1 && w.rows == 1 && w.cols < kv.cols, OpKind::LatentAppend, base_name(w),
          format("input has %d columns, weight is %s", kv.cols, shape(w).c_str()));
    append(OpKind::LatentAppend, base_name(w), {kv}, {&w}, kv.rows, 0, NormParams{.eps = eps, .mla = mla});
}

Value Recorder::mla_attention(Value absorbed, Value q, const AttentionParams& params) {
    const std::string name = format("blk.%d.mla_attention", layer_);
    check(absorbed.cols == int64_t{params.n_head} * params.latent && q.cols % params.n_head == 0 &&
              q.cols / params.n_head >= params.rope,
          OpKind::MlaAttention, name,
          format("absorbed queries have %d, queries %d columns, for %d heads, latent %d, rope %d", absorbed.cols, q.cols,
                 params.n_head, params.latent, params.rope));
    return append(OpKind::MlaAttention, name, {absorbed, q}, {}, absorbed.rows, absorbed.cols, params);
}

Value Recorder::mul_sigmoid(Value a, Value b) {
    const std::string name = format("blk.%d.mul_sigmoid", layer_);
    check(a.cols == b.cols, OpKind::MulSigmoid, name, format("%d and %d columns", a.cols, b.cols));
    return append(OpKind::MulSigmoid, name, {a, b}, {}, a.rows, a.cols, NoParams{});
}

Value Recorder::moe_route(Value scores, const Weight* bias, const RouteParams& params) {
    const std::string name = format("blk.%d.moe_route", layer_);
    check(bias == nullptr || is_vector(*bias, scores.cols), OpKind::MoeRoute, name,
          format("%d experts, bias is %s", scores.cols, bias != nullptr ? shape(*bias).c_str() : "absent"));
    check(params.n_used >= 1 && params.n_used <= scores.cols, OpKind::MoeRoute, name,
          format("%d experts per token of %d", params.n_used, scores.cols));
    return append(OpKind::MoeRoute, name, {scores}, {bias}, scores.rows, 2 * int64_t{params.n_used}, params);
}

Value Recorder::moe_experts(Value z, Value route, const Weight& gate, const Weight& up, const Weight& down,
                            const ExpertParams& params) {
    check(gate.cols == z.cols && up.cols == z.cols && gate.rows == up.rows && down.cols == gate.rows && down.rows == z.cols &&
              gate.mats == up.mats && gate.mats == down.mats && route.cols == 2 * params.n_used,
          OpKind::MoeExperts, base_name(gate),
          format("input has %d columns, route %d, weights are %s, %s, %s", z.cols, route.cols, shape(gate).c_str(),
                 shape(up).c_str(), shape(down).c_str()));
    return append(OpKind::MoeExperts, base_name(gate), {z, route}, {&gate, &up, &down}, z.rows, z.cols, params);
}

Value Recorder::bank(int32_t n_embd, int32_t n_slots, RowKind rows) {
    check(int64_t{n_embd} * n_slots <= INT32_MAX, OpKind::BankPush, "bank", format("%d slots of %d are too wide", n_slots, n_embd));
    const Value v{static_cast<int32_t>(graph_.values.size()), rows, n_embd * n_slots};
    graph_.values.push_back(v);
    return v;
}

void Recorder::bank_push(Value bank, Value x, int32_t slot) {
    const std::string name = format("blk.%d.bank_push", layer_);
    check((slot + 1) * int64_t{x.cols} <= bank.cols, OpKind::BankPush, name,
          format("slot %d of width %d in a bank of %d columns", slot, x.cols, bank.cols));
    append(OpKind::BankPush, name, {x, bank}, {}, x.rows, 0, BankParams{.slot = slot});
    graph_.ops.back().out = bank;
}

Value Recorder::bank_mix(Value bank, int32_t n_slots, Value x, const Weight& score, float eps) {
    check(is_vector(score, x.cols) && n_slots >= 1 && int64_t{n_slots} * x.cols <= bank.cols, OpKind::BankMix, base_name(score),
          format("%d entries of width %d in a bank of %d columns, score is %s", n_slots, x.cols, bank.cols, shape(score).c_str()));
    return append(OpKind::BankMix, base_name(score), {bank, x}, {&score}, x.rows, x.cols, BankParams{.n_slots = n_slots, .eps = eps});
}

Value Recorder::pick_rows(Value x) {
    return append(OpKind::PickRows, "pick_rows", {x}, {}, RowKind::Outputs, x.cols, NoParams{});
}

void Recorder::append_in_place(OpKind kind, const std::string& name, Value x, std::initializer_list<const Weight*> w, OpParams params) {
    append(kind, name, {x}, w, x.rows, 0, std::move(params));
    graph_.ops.back().out = x;
}

Value Recorder::pixels(int32_t cols) { return append(OpKind::Pixels, "pixels", {}, {}, RowKind::Patches, cols, NoParams{}); }

void Recorder::grid_position(Value x, const Weight& table, const GridParams& params) {
    check(table.mats == 1 && table.cols == x.cols && params.height > 0 && params.width > 0 && table.rows == int64_t{params.height} * params.width &&
              x.cols % 2 == 0,
          OpKind::GridPosition, base_name(table),
          format("input has %d columns, grid %d x %d, table is %s", x.cols, params.height, params.width, shape(table).c_str()));
    append_in_place(OpKind::GridPosition, base_name(table), x, {&table}, params);
}

void Recorder::grid_rope(Value qkv, const ImageAttentionParams& params) {
    const std::string name = format("blk.%d.grid_rope", layer_);
    check(qkv.cols == 3 * int64_t{params.n_head} * params.head_dim && params.head_dim % 4 == 0 && params.rope_base > 0, OpKind::GridRope, name,
          format("%d columns for %d heads of %d, which four must divide", qkv.cols, params.n_head, params.head_dim));
    append_in_place(OpKind::GridRope, name, qkv, {}, params);
}

Value Recorder::image_attention(Value qkv, const ImageAttentionParams& params) {
    const std::string name = format("blk.%d.image_attention", layer_);
    check(params.n_head > 0 && params.head_dim > 0 && qkv.cols == 3 * int64_t{params.n_head} * params.head_dim, OpKind::ImageAttention, name,
          format("%d columns for %d heads of %d", qkv.cols, params.n_head, params.head_dim));
    return append(OpKind::ImageAttention, name, {qkv}, {}, qkv.rows, qkv.cols / 3, params);
}

void Recorder::gelu(Value x, GeluParams params) { append_in_place(OpKind::Gelu, format("blk.%d.gelu", layer_), x, {}, params); }

Value Recorder::merge_squares(Value x, int32_t side) {
    check(x.rows == RowKind::Patches && side > 0, OpKind::MergeSquares, "merge_squares", format("squares of side %d of rows that are no patches", side));
    return append(OpKind::MergeSquares, "merge_squares", {x}, {}, RowKind::Squares, int64_t{side} * side * x.cols, MergeParams{side});
}

}  // namespace delta
