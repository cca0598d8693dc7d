// The only view of a device that the rest of the engine has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/memory.h"
#include "graph/step.h"
#include "include/deltallama.h"

namespace delta {

// Device memory, committed when it is made and freed with its owner.
struct Buffer {
    virtual ~Buffer() = default;
    uint8_t* data = nullptr;
    size_t bytes = 0;
};

// Called after every op with its output, [rows, cols], widened if need be; ops without an output are reported with data null.
using Observer = std::function<void(const Op& op, const double* data, int32_t rows, int32_t cols)>;

// What one op has cost, summed over the steps in which it had rows.
struct OpCost {
    uint64_t n_runs = 0;
    uint64_t n_rows = 0;
    uint64_t ns = 0;
    uint64_t weight_bytes = 0;       // read, each once per step: of routed experts those chosen, of the embedding table the rows
    uint64_t state_bytes = 0;        // of the sequences, read and written: convolution inputs, S, latents
};

struct RunOptions {
    bool poison = false;             // fill every output with NaN before its op
    const Observer* observer = nullptr;
    std::vector<OpCost>* costs = nullptr;  // one per op of the graph: is added to
    const std::function<bool(size_t index)>* proceed = nullptr;  // asked before each op; false ends the run there
};

struct BackendOptions {
    int32_t n_threads = 0;           // 0: physical cores
    int32_t n_threads_batch = 0;     // in steps with more tokens than sequences; 0: as many
    bool pin_threads = false;
    bool interleave_memory = false;
    delta_activations activations = DELTA_AUTO;
};

class Backend {
   public:
    virtual ~Backend() = default;

    virtual void describe(delta_device_info& info) const = 0;
    virtual int32_t n_threads() const = 0;
    // Of everything between ops and of the recurrent state.
    virtual ValueType value_type() const = 0;

    // Committed (every page touched), zeroed. Throws Error(MEMORY) naming `what`.
    virtual std::unique_ptr<Buffer> allocate(size_t bytes, const char* what) = 0;
    // Copies within the device.
    virtual void copy(uint8_t* dst, const uint8_t* src, size_t bytes) = 0;
    virtual void zero(uint8_t* dst, size_t bytes) = 0;

    // Prepares a weight and sets `weight.device`; returns bytes of private memory it took (0: the mapped bytes are used as they are).
    virtual size_t bind_weight(Weight& weight) = 0;
    // Throws Error(UNSUPPORTED) naming op, backend and layer if the op cannot run with these weights.
    virtual void check_op(const Op& op) const = 0;
    // Scratch that running `op` with up to `n_batch` rows needs.
    virtual size_t workspace_bytes(const Op& op, int32_t n_batch) const = 0;
    // The same of the whole list, with row numbers as in plan_arena.
    virtual size_t plan_workspace(const Graph& graph, int32_t n_rows, int32_t n_results) const = 0;

    // Runs the whole list. Memory: `arena` of plan.bytes, `workspace` of plan_workspace.
    virtual void run(const Graph& graph, const ArenaPlan& plan, const Step& step, uint8_t* arena, uint8_t* workspace,
                     const RunOptions& options) = 0;
};

// Null if this build has no device of that kind; `isa` choices come from DELTALLAMA_CPU. Throws Error(UNSUPPORTED) if the wished
// ISA is lacking.
std::unique_ptr<Backend> make_ref_backend(const BackendOptions& options);
std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options);

}  // namespace delta
