// The architectures this engine runs, and what building one gives.
#pragma once

#include "gguf/gguf.h"
#include "graph/graph.h"
#include "models/binder.h"
#include "models/hparams.h"

namespace delta {

struct BoundModel : BoundWeights {
    Hparams hparams;
    Graph graph;
    StateLayout state;                              // n_ctx and cache_type are the runtime's to set
    uint64_t n_params = 0, n_params_active = 0;
    uint64_t weight_bytes = 0, weight_bytes_active = 0;
};

// Reads keys, binds every tensor by name, shape and type, records the graph and checks closure: nothing missing, nothing left over.
// Throws Error (FORMAT, UNSUPPORTED) naming key or tensor, expected and found.
BoundModel build_model(const GgufSet& file);

}  // namespace delta
