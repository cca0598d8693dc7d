// The C interface of vision towers.
#include "api/handles.h"
#include "base/log.h"

using namespace delta;

void delta_vision_params_init(delta_vision_params* params) {
    if (params == nullptr) {
        return;
    }
    *params = {};
    params->size = sizeof *params;
}

delta_status delta_vision_open(const char* path, delta_model* model, const delta_vision_params* params, delta_vision** vision) {
    return guard([&] {
        require(path, "path");
        require(model, "model");
        require(params, "params");
        require(vision, "vision");
        require_size(params->size, sizeof *params, "delta_vision_params");
        auto opened = std::unique_ptr<delta_vision>(new delta_vision{model, Vision::open(path, *model->model, *params)});
        log(LogLevel::Info, "%s: vision tower of %d layers, %llu bytes mapped", path, opened->vision->hparams().n_layer,
            static_cast<unsigned long long>(opened->vision->info().weight_bytes));
        const std::lock_guard lock(model->mutex);
        ++model->n_visions;
        *vision = opened.release();
    });
}

delta_status delta_vision_close(delta_vision* vision) {
    return guard([&] {
        if (vision == nullptr) {
            return;
        }
        if (vision->computing.load()) {
            throw Error(DELTA_BUSY, "the vision tower computes; it cannot be closed now");
        }
        {
            const std::lock_guard lock(vision->model->mutex);
            --vision->model->n_visions;
        }
        delete vision;
    });
}

delta_status delta_vision_info_get(const delta_vision* vision, delta_vision_info* info) {
    return guard([&] {
        require(vision, "vision");
        require(info, "info");
        require_size(info->size, sizeof *info, "delta_vision_info");
        *info = vision->vision->info();
    });
}

delta_status delta_vision_encode(delta_vision* vision, const float* pixels, uint32_t frames, uint32_t height, uint32_t width, float* features,
                                 size_t capacity, delta_progress_fn progress, void* user) {
    return guard([&] {
        require(vision, "vision");
        require(pixels, "pixels");
        require(features, "features");
        const Computing computing(*vision->model);
        vision->computing.store(true);
        struct Done {
            std::atomic<bool>& flag;
            ~Done() { flag.store(false); }
        } const done{vision->computing};
        vision->vision->encode(pixels, vision->vision->check_grid(frames, height, width), {features, capacity}, {progress, user});
    });
}
