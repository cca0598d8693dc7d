// The C interface to measurements: what each op costs, and how fast memory is.
#include <algorithm>
#include <cstdio>

#include "api/handles.h"
#include "runtime/bandwidth.h"

using namespace delta;

namespace {

void fill_profile(const Op& op, const OpCost& cost, delta_op_profile& profile) {
    std::snprintf(profile.kind, sizeof profile.kind, "%s", op_name(op.kind));
    std::snprintf(profile.part, sizeof profile.part, "%s", op.part);
    std::snprintf(profile.name, sizeof profile.name, "%s", op.name.c_str());
    profile.layer = op.layer;
    profile.n_runs = cost.n_runs;
    profile.n_rows = cost.n_rows;
    profile.ns = cost.ns;
    profile.weight_bytes = cost.weight_bytes;
    profile.state_bytes = cost.state_bytes;
}

}  // namespace

size_t delta_model_op_count(const delta_model* model) { return model == nullptr ? 0 : model->model->bound.graph.ops.size(); }

delta_status delta_model_profile(delta_model* model, uint32_t on) {
    return guard([&] {
        require(model, "model");
        const Computing computing(*model);
        model->model->set_profile(on != 0);
    });
}

delta_status delta_model_profile_get(delta_model* model, size_t index, delta_op_profile* profile) {
    return guard([&] {
        require(model, "model");
        require(profile, "profile");
        require_size(profile->size, sizeof *profile, "delta_op_profile");
        const Computing computing(*model);
        const Model& m = *model->model;
        if (index >= m.costs.size()) {
            throw Error(DELTA_ARG, format("op %zu is not in 0..%zu", index, m.costs.size() - 1));
        }
        fill_profile(m.bound.graph.ops[index], m.costs[index], *profile);
    });
}

size_t delta_vision_op_count(const delta_vision* vision) { return vision == nullptr ? 0 : vision->vision->graph().ops.size(); }

delta_status delta_vision_profile_get(delta_vision* vision, size_t index, delta_op_profile* profile) {
    return guard([&] {
        require(vision, "vision");
        require(profile, "profile");
        require_size(profile->size, sizeof *profile, "delta_op_profile");
        const Computing computing(*vision->model);
        const Graph& graph = vision->vision->graph();
        if (index >= graph.ops.size()) {
            throw Error(DELTA_ARG, format("op %zu is not in 0..%zu", index, graph.ops.size() - 1));
        }
        fill_profile(graph.ops[index], vision->vision->costs()[index], *profile);
    });
}

delta_status delta_model_read_bandwidth(delta_model* model, uint32_t n_threads, double* bytes_per_second) {
    return guard([&] {
        require(model, "model");
        require(bytes_per_second, "bytes_per_second");
        const Computing computing(*model);
        *bytes_per_second = measure_read_bandwidth(*model->model->file, static_cast<int32_t>(std::min<uint32_t>(n_threads, INT32_MAX)));
    });
}
