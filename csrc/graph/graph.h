// Records a model as a flat list of ops. A model file calls the member functions as if they computed; each call checks its shapes
// and appends one op. Nothing is computed here. An inconsistency is an Error(FORMAT) naming op, layer and shapes.
#pragma once

#include <string>
#include <vector>

#include "graph/ops.h"

namespace delta {

struct Graph {
    std::vector<Op> ops;
    std::vector<Value> values;  // indexed by id
    Value result;               // logits [outputs, n_vocab], or features [squares, width]
};

class Recorder {
   public:
    explicit Recorder(Graph& graph) : graph_(graph) {}

    // Layer number given to the ops recorded from now on; -1 after the last layer.
    void enter_layer(int32_t layer) {
        layer_ = layer;
        part_ = layer < 0 ? "output" : "residual";
    }

    // The part of the model that ops recorded in its scope belong to: "kda", "experts", ... Outside of any it is "embed" before the
    // first layer, "residual" within layers and "output" after them.
    class Part {
       public:
        Part(Recorder& recorder, const char* name) : recorder_(recorder), outer_(recorder.part_) { recorder.part_ = name; }
        ~Part() { recorder_.part_ = outer_; }
        Part(const Part&) = delete;
        Part& operator=(const Part&) = delete;

       private:
        Recorder& recorder_;
        const char* outer_;
    };

    Value embed(const Weight& table);
    Value rms_norm(Value x, const Weight& w, float eps);
    Value add(Value a, Value b);
    Value linear(Value x, const Weight& w);
    Value head_linear(Value x, const Weight& w, int32_t stride);
    Value glu(Value gate, Value up, const Activation& activation);
    Value short_conv(Value x, const Weight& w, int32_t kda, int32_t stream);
    Value kda_gate(Value f, const Weight& a, const Weight& dt, const GateParams& params);
    Value kda_scan(Value q, Value k, Value v, Value g, Value beta, int32_t head_dim, int32_t kda);
    Value gated_norm(Value o, Value r, const Weight& w, float eps);
    void latent_append(Value kv, const Weight& w, float eps, int32_t mla);
    Value mla_attention(Value absorbed, Value q, const AttentionParams& params);
    Value mul_sigmoid(Value a, Value b);
    Value moe_route(Value scores, const Weight* bias, const RouteParams& params);
    Value moe_experts(Value z, Value route, const Weight& gate, const Weight& up, const Weight& down, const ExpertParams& params);
    // No op: the wide activation that bank_push fills.
    Value bank(int32_t n_embd, int32_t n_slots, RowKind rows = RowKind::Tokens);
    void bank_push(Value bank, Value x, int32_t slot);
    Value bank_mix(Value bank, int32_t n_slots, Value x, const Weight& score, float eps);
    Value pick_rows(Value x);
    // Of a vision tower.
    Value pixels(int32_t cols);
    void grid_position(Value x, const Weight& table, const GridParams& params);
    void grid_rope(Value qkv, const ImageAttentionParams& params);
    Value image_attention(Value qkv, const ImageAttentionParams& params);
    void gelu(Value x, GeluParams params);
    Value merge_squares(Value x, int32_t side);
    void finish(Value result) { graph_.result = result; }

   private:
    void append_in_place(OpKind kind, const std::string& name, Value x, std::initializer_list<const Weight*> w, OpParams params);
    Value append(OpKind kind, const std::string& name, std::initializer_list<Value> in, std::initializer_list<const Weight*> w,
                 RowKind rows, int64_t cols, OpParams params);
    void check(bool ok, OpKind kind, const std::string& name, const std::string& what) const;

    Graph& graph_;
    int32_t layer_ = -1;
    const char* part_ = "embed";
};

}  // namespace delta
