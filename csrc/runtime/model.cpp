#include "runtime/model.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "base/checksum.h"
#include "base/error.h"
#include "base/placement.h"

namespace delta {
namespace {

constexpr uint32_t kDefaultCtx = 4096;
constexpr uint32_t kDefaultBatch = 512;
constexpr uint32_t kDefaultOutputs = 16;
constexpr uint32_t kDefaultCheckpointEvery = 512;
constexpr uint64_t kDefaultCheckpoints = 8;               // per session
constexpr uint64_t kDefaultCheckpointBytes = 1ULL << 30;  // at most

// Tokens that end a turn in one of the chat formats, whatever the file's eos says.
constexpr std::array<std::string_view, 4> kStopNames = {"[EOS]", "[EOT]", "<|im_end|>", "<|end_of_msg|>"};

void resolve_params(delta_model_params& p, const Hparams& h) {
    const auto n_ctx_train = static_cast<uint32_t>(h.n_ctx_train);
    p.n_ctx = p.n_ctx == 0 ? std::min(n_ctx_train, kDefaultCtx) : p.n_ctx;
    if (p.n_ctx > n_ctx_train) {
        throw Error(DELTA_ARG, format("n_ctx is %u, but the model was made for at most %u positions", p.n_ctx, n_ctx_train));
    }
    p.n_sessions = p.n_sessions == 0 ? 1 : p.n_sessions;
    if (p.n_sessions > (1U << 16)) {
        throw Error(DELTA_ARG, format("n_sessions is %u, expected at most %u", p.n_sessions, 1U << 16));
    }
    p.n_batch = p.n_batch == 0 ? std::max(kDefaultBatch, p.n_sessions) : p.n_batch;
    if (p.n_batch > (1U << 20)) {
        throw Error(DELTA_ARG, format("n_batch is %u, expected at most %u", p.n_batch, 1U << 20));
    }
    p.n_outputs = p.n_outputs == 0 ? std::max(kDefaultOutputs, p.n_sessions) : p.n_outputs;
    p.n_outputs = std::min(p.n_outputs, p.n_batch);
    if (p.activations > DELTA_AUTO) {
        throw Error(DELTA_ARG, format("activations is %u, expected 0 (exact), 1 (fine), 2 (fast) or 3 (auto)", p.activations));
    }
    p.checkpoint_every = p.checkpoint_every == 0 ? kDefaultCheckpointEvery : p.checkpoint_every;
}

// The type of the latent cache, whose rows have `width` values.
const TypeInfo* cache_type(uint32_t id, int32_t width) {
    const TypeInfo* type = find_type(id);
    const std::string_view name = type != nullptr ? type->name : "";
    if (name != "F32" && name != "F16" && name != "BF16" && name != "Q8_0") {
        throw Error(DELTA_ARG, format("cache_type is %u, expected 0 (F32), 1 (F16), 8 (Q8_0) or 30 (BF16)", id));
    }
    if (width % type->block != 0) {
        throw Error(DELTA_UNSUPPORTED, format("cache_type is %u (%s), which takes whole blocks of %d values, but a latent of this model has %d",
                                              id, type->name, type->block, width));
    }
    return type;
}

uint32_t count_checkpoints(const delta_model_params& p, size_t checkpoint_bytes) {
    if (checkpoint_bytes == 0) {
        return 0;
    }
    uint64_t budget = p.checkpoint_bytes;
    if (budget == UINT64_MAX) {
        budget = std::min<uint64_t>(kDefaultCheckpoints * p.n_sessions * checkpoint_bytes, kDefaultCheckpointBytes);
    }
    return static_cast<uint32_t>(std::min<uint64_t>(budget / checkpoint_bytes, UINT32_MAX));
}

int32_t special_token(const GgufSet& file, const char* key, int32_t n_vocab) {
    if (!file.has(key)) {
        return -1;
    }
    const int64_t id = file.integer(key);
    if (id < 0 || id >= n_vocab) {
        throw Error(DELTA_FORMAT, format("%s: key %s is %lld, expected 0 to %d", file.path().c_str(), key,
                                         static_cast<long long>(id), n_vocab - 1));
    }
    return static_cast<int32_t>(id);
}

}  // namespace

uint64_t fingerprint_of(const GgufSet& file, std::span<const std::string_view> prefixes) {
    constexpr uint64_t kSample = 256;
    Checksum sum;
    for (const GgufValue& v : file.values()) {
        if (std::any_of(prefixes.begin(), prefixes.end(), [&](std::string_view prefix) { return v.key.starts_with(prefix); })) {
            sum.update(v.key.data(), v.key.size());
            sum.update(v.data, v.n_bytes);
        }
    }
    for (const GgufTensor& t : file.tensors()) {
        sum.update(t.name.data(), t.name.size());
        const std::array<int64_t, 4> shape = {t.type->id, t.mats, t.rows, t.cols};
        sum.update(shape.data(), sizeof shape);
        const uint64_t n = std::min(t.n_bytes, kSample);
        sum.update(t.data, n);
        sum.update(t.data + t.n_bytes - n, n);
    }
    return sum.digest();
}

std::unique_ptr<Model> Model::open(const std::string& path, const delta_model_params& params, bool allocate) {
    auto m = std::make_unique<Model>();
    m->params = params;
    m->device_kind = params.device != nullptr ? params.device : "cpu";
    m->params.device = nullptr;
    m->params.progress = nullptr;
    m->params.progress_user = nullptr;
    m->run_options.poison = params.poison != 0;

    const auto count = [](uint32_t n) { return static_cast<int32_t>(std::min<uint32_t>(n, INT32_MAX)); };
    const BackendOptions options{count(params.n_threads), count(params.n_threads_batch), params.pin_threads != 0, params.interleave_memory != 0,
                                 static_cast<delta_activations>(std::min<uint32_t>(params.activations, DELTA_AUTO))};
    std::optional<InterleavedMemory> interleaved;  // for what this function allocates
    if (options.interleave_memory) {
        interleaved.emplace();
    }
    if (m->device_kind == "cpu") {
        m->backend = make_cpu_backend(options);
    } else if (m->device_kind == "ref") {
        m->backend = make_ref_backend(options);
    } else {
        throw Error(DELTA_ARG, format("device is '%s', expected cpu or ref", m->device_kind.c_str()));
    }

    m->file = GgufSet::open(path);
    m->bound = build_model(*m->file);
    const Hparams& h = m->bound.hparams;
    resolve_params(m->params, h);
    m->params.n_threads = static_cast<uint32_t>(m->backend->n_threads());
    m->layout = m->bound.state;
    m->layout.n_ctx = static_cast<int32_t>(m->params.n_ctx);
    m->layout.cache_type = cache_type(m->params.cache_type, m->layout.latent_width);
    m->layout.value_type = m->backend->value_type();
    m->n_checkpoints = count_checkpoints(m->params, m->layout.recurrent_bytes());

    m->token_bos = special_token(*m->file, "tokenizer.ggml.bos_token_id", h.n_vocab);
    m->token_eos = special_token(*m->file, "tokenizer.ggml.eos_token_id", h.n_vocab);
    m->token_pad = special_token(*m->file, "tokenizer.ggml.padding_token_id", h.n_vocab);
    if (m->token_eos >= 0) {
        m->stop_tokens.push_back(m->token_eos);
    }
    m->file->each_string("tokenizer.ggml.tokens", [&](uint64_t id, std::string_view text) {
        if (std::find(kStopNames.begin(), kStopNames.end(), text) != kStopNames.end()) {
            m->stop_tokens.push_back(static_cast<int32_t>(id));
        }
    });
    std::sort(m->stop_tokens.begin(), m->stop_tokens.end());

    m->plan = plan_arena(m->bound.graph, m->layout.value_type, static_cast<int32_t>(m->params.n_batch), static_cast<int32_t>(m->params.n_outputs));
    for (const Op& op : m->bound.graph.ops) {
        m->backend->check_op(op);
    }
    m->workspace_bytes =
        m->backend->plan_workspace(m->bound.graph, static_cast<int32_t>(m->params.n_batch), static_cast<int32_t>(m->params.n_outputs));
    m->costs.resize(m->bound.graph.ops.size());
    m->weights_private = m->bound.owned_bytes;
    if (allocate) {
        const uint64_t total = m->bound.weights.size();
        uint64_t done = 0;
        for (Weight& w : m->bound.weights) {
            m->weights_private += m->backend->bind_weight(w);
            if (params.progress != nullptr && params.progress(++done, total, params.progress_user) != 0) {
                throw Error(DELTA_CANCELLED, format("%s: opening was cancelled", path.c_str()));
            }
        }
        constexpr std::array<std::string_view, 1> kKeys = {"kimi-"};
        m->fingerprint = fingerprint_of(*m->file, kKeys);
        const size_t n = m->params.n_sessions;
        m->recurrent = m->backend->allocate(n * m->layout.recurrent_bytes(), "recurrent state");
        m->latent = m->backend->allocate(n * m->layout.latent_bytes(), "latent cache");
        m->checkpoint_memory = m->backend->allocate(m->n_checkpoints * m->layout.recurrent_bytes(), "checkpoints");
        m->arena = m->backend->allocate(m->plan.bytes, "activations");
        m->workspace = m->backend->allocate(m->workspace_bytes, "workspace");
        m->logits_memory = m->backend->allocate(n * static_cast<size_t>(h.n_vocab) * sizeof(float), "logits");
    }
    return m;
}

void Model::collect_inputs() {
    input_collector = std::make_unique<InputCollector>(bound.graph, *backend, *file, static_cast<int32_t>(params.n_batch));
    run_options.observer = &input_collector->observer();
}

void Model::run(const Step& step) {
    backend->run(bound.graph, plan, step, arena->data, workspace->data, run_options);
    if (layout.value_type == ValueType::F64) {
        narrow_logits(step.n_rows(RowKind::Outputs));
    }
}

void Model::narrow_logits(int32_t n_rows) {
    // In place: a float never reaches a double that is still to be read.
    uint8_t* at = arena->data + plan.offset[static_cast<size_t>(bound.graph.result.id)];
    const size_t n = static_cast<size_t>(n_rows) * static_cast<size_t>(bound.graph.result.cols);
    for (size_t i = 0; i < n; ++i) {
        double wide = 0;
        std::memcpy(&wide, at + i * sizeof wide, sizeof wide);
        const auto narrow = static_cast<float>(wide);
        std::memcpy(at + i * sizeof narrow, &narrow, sizeof narrow);
    }
}

const float* Model::logits() const {
    return reinterpret_cast<const float*>(arena->data + plan.offset[static_cast<size_t>(bound.graph.result.id)]);
}

StateMemory Model::state_memory() const {
    StateMemory memory;
    memory.layout = &layout;
    memory.recurrent = recurrent->data;
    memory.latent = latent->data;
    return memory;
}

void Model::fill_info(delta_model_info& info) const {
    const Hparams& h = bound.hparams;
    std::snprintf(info.architecture, sizeof info.architecture, "%s", h.architecture.c_str());
    info.n_layer = static_cast<uint32_t>(h.n_layer);
    info.n_layer_kda = static_cast<uint32_t>(h.n_kda());
    info.n_layer_mla = static_cast<uint32_t>(h.n_mla());
    info.n_embd = static_cast<uint32_t>(h.n_embd);
    info.n_vocab = static_cast<uint32_t>(h.n_vocab);
    info.n_head = static_cast<uint32_t>(h.n_head);
    info.n_expert = static_cast<uint32_t>(h.n_expert);
    info.n_expert_used = static_cast<uint32_t>(h.n_expert_used);
    info.n_ctx_train = static_cast<uint32_t>(h.n_ctx_train);
    info.n_ctx = params.n_ctx;
    info.n_batch = params.n_batch;
    info.n_outputs = params.n_outputs;
    info.n_sessions = params.n_sessions;
    info.n_threads = params.n_threads;
    info.activations = params.activations;
    info.cache_type = params.cache_type;
    info.token_bos = token_bos;
    info.token_eos = token_eos;
    info.token_pad = token_pad;
    info.n_params = bound.n_params;
    info.n_params_active = bound.n_params_active;
    info.weight_bytes = bound.weight_bytes;
    info.weight_bytes_active = bound.weight_bytes_active;
    info.checkpoint_size = layout.recurrent_bytes();
    info.n_checkpoints = n_checkpoints;
}

void Model::fill_memory(delta_memory& memory) const {
    memory.weights_mapped = bound.weight_bytes;
    memory.weights_private = weights_private;
    memory.state = params.n_sessions * (layout.recurrent_bytes() + layout.latent_bytes());
    memory.checkpoints = n_checkpoints * layout.recurrent_bytes();
    memory.arena = plan.bytes;
    memory.workspace = workspace_bytes;
    memory.logits = uint64_t{params.n_sessions} * static_cast<uint64_t>(bound.hparams.n_vocab) * sizeof(float);
    memory.total_private =
        memory.weights_private + memory.state + memory.checkpoints + memory.arena + memory.workspace + memory.logits;
}

void Model::set_profile(bool on) {
    if (on) {
        std::fill(costs.begin(), costs.end(), OpCost{});
    }
    run_options.costs = on ? &costs : nullptr;
}

bool Model::is_stop(int32_t token) const { return std::binary_search(stop_tokens.begin(), stop_tokens.end(), token); }

}  // namespace delta
