// The C interface to the statistics of inputs: check arguments, call.
#include "api/handles.h"
#include "base/error.h"

using namespace delta;

delta_status delta_model_collect_inputs(delta_model* model) {
    return guard([&] {
        require(model, "model");
        const Computing computing(*model);
        model->model->collect_inputs();
    });
}

size_t delta_model_input_count(const delta_model* model) {
    return model == nullptr || model->model->input_collector == nullptr ? 0 : model->model->input_collector->stats().size();
}

delta_status delta_model_input_stats(delta_model* model, size_t index, delta_input_stats* stats) {
    return guard([&] {
        require(model, "model");
        require(stats, "stats");
        require_size(stats->size, sizeof *stats, "delta_input_stats");
        const Computing computing(*model);
        const size_t count = delta_model_input_count(model);
        if (index >= count) {
            throw Error(DELTA_ARG, format("index is %zu, but statistics of %zu tensors are collected", index, count));
        }
        const InputStats& found = model->model->input_collector->stats()[index];
        *stats = {.size = sizeof *stats,
                  .name = found.name.c_str(),
                  .n_mats = static_cast<uint64_t>(found.mats),
                  .n_cols = static_cast<uint64_t>(found.cols),
                  .sum_squares = found.sum_squares.data(),
                  .n_rows = found.n_rows.data()};
    });
}
