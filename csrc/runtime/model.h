// An opened model: the mapped file, its graph, its device memory. Immutable after opening but for the memory of its slots.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "gguf/gguf.h"
#include "models/hparams.h"
#include "models/registry.h"
#include "runtime/input_stats.h"

namespace delta {

// Identifies the weights well enough to refuse a state saved with others: keys of these prefixes, and the first and last
// bytes of every tensor. Hashing all of a 1.5 TB file would take longer than answering.
uint64_t fingerprint_of(const GgufSet& file, std::span<const std::string_view> prefixes);

struct Model {
    // Opens, checks, plans; with `allocate` also takes memory. Throws Error.
    static std::unique_ptr<Model> open(const std::string& path, const delta_model_params& params, bool allocate);

    std::unique_ptr<GgufSet> file;
    std::unique_ptr<Backend> backend;
    BoundModel bound;                 // hyperparameters, weights, graph
    delta_model_params params;        // with all zeros resolved; the pointers in it are not kept
    std::string device_kind;
    StateLayout layout;
    ArenaPlan plan;
    size_t workspace_bytes = 0;
    size_t weights_private = 0;
    uint64_t fingerprint = 0;         // of architecture, hyperparameters, tensor names, shapes and types, and sampled bytes: for saved states
    std::vector<int32_t> stop_tokens; // ascending
    int32_t token_bos = -1, token_eos = -1, token_pad = -1;
    uint32_t n_checkpoints = 0;       // slots of `checkpoint_memory`

    // Allocated when opened for use.
    std::unique_ptr<Buffer> recurrent;          // [n_sessions][recurrent_bytes]
    std::unique_ptr<Buffer> latent;             // [n_sessions][latent_bytes]
    std::unique_ptr<Buffer> checkpoint_memory;  // [n_checkpoints][recurrent_bytes]
    std::unique_ptr<Buffer> arena;
    std::unique_ptr<Buffer> workspace;
    std::unique_ptr<Buffer> logits_memory;      // [n_sessions][n_vocab] float32: each session's last row

    // One computation at a time: api takes `busy` with an exchange and returns BUSY if it was taken.
    std::atomic<bool> busy{false};
    std::atomic<bool> cancel{false};

    RunOptions run_options;
    std::vector<OpCost> costs;        // of every op: the present or the last profile; for who holds `busy`
    std::unique_ptr<InputCollector> input_collector;  // null until collecting begins
    // From the next step on; what was collected before is dropped.
    void collect_inputs();
    // Runs one step; afterwards logits() are [n_outputs, n_vocab], float32 whatever the device's value type.
    void run(const Step& step);
    const float* logits() const;
    StateMemory state_memory() const;

    void fill_info(delta_model_info& info) const;
    void fill_memory(delta_memory& memory) const;
    bool is_stop(int32_t token) const;
    // Starts a profile from nothing, or ends it.
    void set_profile(bool on);

   private:
    void narrow_logits(int32_t n_rows);  // to float32, where they lie
};

}  // namespace delta
