// The C interface: check arguments, call; guard (handles.h) translates errors. Nothing else happens here.
#include <algorithm>
#include <cstring>

#include "api/handles.h"
#include "base/error.h"
#include "base/log.h"
#include "runtime/sampler.h"
#include "runtime/save.h"

namespace delta {

namespace {

constexpr const char* kStatusNames[] = {"OK",           "ARG",    "ABI",     "IO",    "FORMAT", "UNSUPPORTED", "MEMORY",
                                        "CONTEXT_FULL", "DEVICE", "NUMERIC", "STATE", "BUSY",   "CANCELLED"};

constexpr const char* kDeviceKinds[] = {"cpu", "ref"};

std::span<const int32_t> token_span(const int32_t* tokens, size_t n_tokens) {
    if (n_tokens > 0) {
        require(tokens, "tokens");
    }
    return {tokens, n_tokens};
}

delta_logits_mode logits_mode(uint32_t mode) {
    if (mode > DELTA_LOGITS_ALL) {
        throw Error(DELTA_ARG, format("logits is %u, expected 0 (none), 1 (last) or 2 (all)", mode));
    }
    return static_cast<delta_logits_mode>(mode);
}

std::unique_ptr<Model> open_model(const char* path, const delta_model_params* params, bool allocate) {
    require(path, "path");
    require(params, "params");
    require_size(params->size, sizeof *params, "delta_model_params");
    return Model::open(path, *params, allocate);
}

void log_opened(const char* path, const Model& model) {
    delta_device_info device{};
    delta_memory memory{};
    model.backend->describe(device);
    model.fill_memory(memory);
    log(LogLevel::Info, "%s: %s on %s (%s), %u threads, %llu bytes of weights mapped, %llu bytes allocated", path,
        model.bound.hparams.architecture.c_str(), device.kind, device.name, model.params.n_threads,
        static_cast<unsigned long long>(memory.weights_mapped), static_cast<unsigned long long>(memory.total_private));
}

std::unique_ptr<Backend> make_backend(const char* kind) {
    const BackendOptions options{.n_threads = 1, .activations = DELTA_AUTO};
    return std::strcmp(kind, "cpu") == 0 ? make_cpu_backend(options) : make_ref_backend(options);
}

}  // namespace

}  // namespace delta

using namespace delta;

// -- library --------------------------------------------------------------------------------------------------------------------

uint32_t delta_abi_version(void) { return DELTA_ABI_VERSION; }

const char* delta_version(void) { return DELTALLAMA_VERSION; }

const char* delta_build_info(void) {
#if defined(__x86_64__)
    constexpr const char* isas = "generic, avx2, avx512";
#elif defined(__aarch64__)
    constexpr const char* isas = "generic, neon, neon_dot, neon_i8mm";
#else
    constexpr const char* isas = "generic";
#endif
    static const std::string text =
        format("compiler %s; kernels %s; build type %s; sanitizers %s", __VERSION__, isas, DELTALLAMA_BUILD_TYPE,
               DELTALLAMA_SANITIZE[0] == '\0' ? "none" : DELTALLAMA_SANITIZE);
    return text.c_str();
}

const char* delta_status_name(delta_status status) {
    const auto index = static_cast<size_t>(status);
    return index < std::size(kStatusNames) ? kStatusNames[index] : "UNKNOWN";
}

const char* delta_last_error(void) { return last_error(); }

void delta_set_log(delta_log_fn fn, void* user) { set_log(fn, user); }

uint32_t delta_device_count(void) { return static_cast<uint32_t>(std::size(kDeviceKinds)); }

delta_status delta_device_info_get(uint32_t index, delta_device_info* info) {
    return guard([&] {
        require(info, "info");
        require_size(info->size, sizeof *info, "delta_device_info");
        if (index >= std::size(kDeviceKinds)) {
            throw Error(DELTA_ARG, format("device %u is not in 0..%zu", index, std::size(kDeviceKinds) - 1));
        }
        delta_device_info found{};
        make_backend(kDeviceKinds[index])->describe(found);
        found.size = sizeof found;
        *info = found;
    });
}

// -- model ----------------------------------------------------------------------------------------------------------------------

void delta_model_params_init(delta_model_params* params) {
    if (params == nullptr) {
        return;
    }
    *params = {};
    params->size = sizeof *params;
    params->activations = DELTA_AUTO;
    params->cache_type = 1;
    params->checkpoint_bytes = UINT64_MAX;
}

delta_status delta_model_open(const char* path, const delta_model_params* params, delta_model** model) {
    return guard([&] {
        require(model, "model");
        auto opened = std::make_unique<delta_model>(open_model(path, params, true));
        log_opened(path, *opened->model);
        *model = opened.release();
    });
}

delta_status delta_model_plan(const char* path, const delta_model_params* params, delta_model_info* info,
                              delta_memory* memory) {
    return guard([&] {
        require(info, "info");
        require(memory, "memory");
        require_size(info->size, sizeof *info, "delta_model_info");
        require_size(memory->size, sizeof *memory, "delta_memory");
        const std::unique_ptr<Model> plan = open_model(path, params, false);
        plan->fill_info(*info);
        plan->fill_memory(*memory);
    });
}

delta_status delta_model_close(delta_model* model) {
    return guard([&] {
        if (model == nullptr) {
            return;
        }
        {
            const std::lock_guard lock(model->mutex);
            if (model->slots.n_used() > 0) {
                throw Error(DELTA_STATE, format("the model still has sessions: %d; free them first", model->slots.n_used()));
            }
            if (model->n_visions > 0) {
                throw Error(DELTA_STATE, format("the model still has vision towers: %d; close them first", model->n_visions));
            }
        }
        delete model;
    });
}

delta_status delta_model_info_get(const delta_model* model, delta_model_info* info) {
    return guard([&] {
        require(model, "model");
        require(info, "info");
        require_size(info->size, sizeof *info, "delta_model_info");
        model->model->fill_info(*info);
    });
}

delta_status delta_model_memory(const delta_model* model, delta_memory* memory) {
    return guard([&] {
        require(model, "model");
        require(memory, "memory");
        require_size(memory->size, sizeof *memory, "delta_memory");
        model->model->fill_memory(*memory);
    });
}

delta_status delta_model_meta(const delta_model* model, const char* key, char* buffer, size_t capacity, size_t* needed) {
    return guard([&] {
        require(model, "model");
        require(key, "key");
        require(needed, "needed");
        const GgufSet& file = *model->model->file;
        const GgufValue* value = file.find(key);
        if (value == nullptr) {
            throw Error(DELTA_ARG, format("%s has no key %s", file.path().c_str(), key));
        }
        const std::string text = file.text(*value);
        if (buffer != nullptr) {
            if (capacity < text.size() + 1) {
                throw Error(DELTA_ARG,
                            format("the value of %s needs %zu bytes, capacity is %zu", key, text.size() + 1, capacity));
            }
            std::memcpy(buffer, text.c_str(), text.size() + 1);
        }
        *needed = text.size() + 1;
    });
}

int delta_model_is_stop(const delta_model* model, int32_t token) {
    return model != nullptr && model->model->is_stop(token) ? 1 : 0;
}

void delta_model_cancel(delta_model* model) {
    if (model != nullptr && model->model->busy.load()) {
        model->model->cancel.store(true);
    }
}

delta_status delta_model_stats(const delta_model* model, delta_stats* stats) {
    return guard([&] {
        require(model, "model");
        require(stats, "stats");
        require_size(stats->size, sizeof *stats, "delta_stats");
        *stats = model->stats();
    });
}

// -- session --------------------------------------------------------------------------------------------------------------------

delta_status delta_session_create(delta_model* model, delta_session** session) {
    return guard([&] {
        require(model, "model");
        require(session, "session");
        *session = new delta_session{model, std::make_unique<Session>(*model)};
    });
}

delta_status delta_session_free(delta_session* session) {
    return guard([&] {
        if (session != nullptr && session->session->computing.load()) {
            throw Error(DELTA_BUSY, "the session computes; it cannot be freed now");
        }
        delete session;
    });
}

delta_status delta_session_sync(delta_session* session, const int32_t* tokens, size_t n_tokens, delta_progress_fn progress,
                                void* user, delta_sync_result* result) {
    return guard([&] {
        require(session, "session");
        if (result != nullptr) {
            require_size(result->size, sizeof *result, "delta_sync_result");
        }
        const std::span<const int32_t> wanted = token_span(tokens, n_tokens);
        const Computing computing(*session);
        const delta_sync_result counts = session->session->sync(wanted, {progress, user});
        if (result != nullptr) {
            *result = counts;
        }
    });
}

delta_status delta_session_sync_pieces(delta_session* session, const delta_piece* pieces, size_t n_pieces, delta_progress_fn progress,
                                       void* user, delta_sync_result* result) {
    return guard([&] {
        require(session, "session");
        if (n_pieces > 0) {
            require(pieces, "pieces");
        }
        if (result != nullptr) {
            require_size(result->size, sizeof *result, "delta_sync_result");
        }
        const Computing computing(*session);
        const delta_sync_result counts = session->session->sync(std::span(pieces, n_pieces), {progress, user});
        if (result != nullptr) {
            *result = counts;
        }
    });
}

delta_status delta_session_eval(delta_session* session, const int32_t* tokens, size_t n_tokens, delta_logits_mode logits) {
    return guard([&] {
        require(session, "session");
        const EvalItem item{session->session.get(), token_span(tokens, n_tokens), logits_mode(static_cast<uint32_t>(logits))};
        const Computing computing(*session);
        eval(*session->model, {&item, 1});
    });
}

delta_status delta_eval_batch(delta_model* model, const delta_batch_item* items, size_t n_items) {
    return guard([&] {
        require(model, "model");
        require(items, "items");
        if (n_items == 0) {
            throw Error(DELTA_ARG, "a batch needs at least one item");
        }
        std::vector<EvalItem> checked;
        std::vector<Session*> sessions;
        for (size_t i = 0; i < n_items; ++i) {
            const delta_batch_item& item = items[i];
            require(item.session, "items[].session");
            if (item.session->model != model) {
                throw Error(DELTA_ARG, format("the session of item %zu belongs to another model", i));
            }
            sessions.push_back(item.session->session.get());
            checked.push_back({sessions.back(), token_span(item.tokens, item.n_tokens), logits_mode(item.logits)});
        }
        const Computing computing(*model, std::move(sessions));
        eval(*model, checked);
    });
}

size_t delta_session_length(const delta_session* session) { return session == nullptr ? 0 : session->session->length(); }

delta_status delta_session_tokens(const delta_session* session, int32_t* tokens, size_t capacity, size_t* n_tokens) {
    return guard([&] {
        require(session, "session");
        require(n_tokens, "n_tokens");
        if (capacity > 0) {
            require(tokens, "tokens");
        }
        const std::vector<int32_t> timeline = session->session->tokens();
        std::copy_n(timeline.begin(), std::min(capacity, timeline.size()), tokens);
        *n_tokens = timeline.size();
    });
}

delta_status delta_session_truncate(delta_session* session, size_t length) {
    return guard([&] {
        require(session, "session");
        const Computing computing(*session);
        session->session->truncate(length);
    });
}

delta_status delta_session_checkpoint(delta_session* session) {
    return guard([&] {
        require(session, "session");
        const Computing computing(*session);
        session->session->checkpoint();
    });
}

delta_status delta_session_fork(delta_session* session, delta_session** fork) {
    return guard([&] {
        require(session, "session");
        require(fork, "fork");
        const Computing computing(*session);
        *fork = new delta_session{session->model, session->session->fork()};
    });
}

delta_status delta_session_logits(delta_session* session, int64_t row, const float** logits, uint32_t* n_vocab) {
    return guard([&] {
        require(session, "session");
        require(logits, "logits");
        require(n_vocab, "n_vocab");
        const std::span<const float> found = session->session->logits(row);
        *logits = found.data();
        *n_vocab = static_cast<uint32_t>(found.size());
    });
}

size_t delta_session_logits_count(const delta_session* session) {
    return session == nullptr ? 0 : session->session->n_logits();
}

delta_status delta_session_top(delta_session* session, int64_t row, delta_top_token* top, uint32_t n) {
    return guard([&] {
        require(session, "session");
        require(top, "top");
        session->session->top(row, {top, n});
    });
}

void delta_sampling_params_init(delta_sampling_params* params) {
    if (params == nullptr) {
        return;
    }
    *params = {};
    params->size = sizeof *params;
    params->temperature = 0.8F;
    params->top_k = 40;
    params->top_p = 0.95F;
    params->min_p = 0.05F;
    params->repetition_penalty = 1;
    params->penalty_last_n = 64;
}

delta_status delta_session_sample(delta_session* session, const delta_sampling_params* params, int32_t* token) {
    return guard([&] {
        require(session, "session");
        require(params, "params");
        require(token, "token");
        require_size(params->size, sizeof *params, "delta_sampling_params");
        *token = session->session->sample(*params);
    });
}

delta_status delta_session_save(delta_session* session, const char* path) {
    return guard([&] {
        require(session, "session");
        require(path, "path");
        const Computing computing(*session);
        save_session(*session->session, path);
    });
}

delta_status delta_session_load(delta_session* session, const char* path) {
    return guard([&] {
        require(session, "session");
        require(path, "path");
        const Computing computing(*session);
        load_session(*session->session, path);
    });
}

delta_status delta_session_stats(const delta_session* session, delta_stats* stats) {
    return guard([&] {
        require(session, "session");
        require(stats, "stats");
        require_size(stats->size, sizeof *stats, "delta_stats");
        *stats = session->session->stats();
    });
}
