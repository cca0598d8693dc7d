#include "runtime/vision.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "base/error.h"

namespace delta {
namespace {

// Preprocessing keeps to its limits before it pads each side to whole squares.
int64_t largest_image(const VisionHparams& h) {
    return h.patch_limit + 2 * int64_t{h.merge} * h.side_limit + int64_t{h.merge} * h.merge;
}

void check_partner(const std::string& path, const VisionHparams& h, const Model& model) {
    const Hparams& text = model.bound.hparams;
    if (text.architecture != kVisionPartner) {
        throw Error(DELTA_ARG, format("%s is the vision tower of a %.*s model; the model is %s", path.c_str(), static_cast<int>(kVisionPartner.size()),
                                      kVisionPartner.data(), text.architecture.c_str()));
    }
    if (text.n_embd != h.projection_dim) {
        throw Error(DELTA_ARG, format("%s projects to rows of %d values, and the model's embeddings have %d: they do not belong together",
                                      path.c_str(), h.projection_dim, text.n_embd));
    }
}

void reserve(Backend& backend, std::unique_ptr<Buffer>& buffer, size_t bytes, const char* what) {
    if (buffer == nullptr || buffer->bytes < bytes) {
        buffer.reset();  // first: both would not fit where the new one alone does
        buffer = backend.allocate(bytes, what);
    }
}

}  // namespace

std::unique_ptr<Vision> Vision::open(const std::string& path, Model& model, const delta_vision_params& params) {
    std::unique_ptr<Vision> v(new Vision(model));
    v->file_ = GgufSet::open(path);
    v->bound_ = build_moonvit(*v->file_);
    check_partner(path, v->bound_.hparams, model);
    v->costs_.resize(v->bound_.graph.ops.size());
    const int64_t most = largest_image(v->bound_.hparams);
    if (params.max_patches > static_cast<uint64_t>(most)) {
        throw Error(DELTA_ARG, format("max_patches is %u; %s admits at most %lld", params.max_patches, path.c_str(), static_cast<long long>(most)));
    }
    v->max_patches_ = static_cast<int32_t>(params.max_patches == 0 ? most : params.max_patches);
    for (const Op& op : v->bound_.graph.ops) {
        model.backend->check_op(op);
    }
    for (Weight& w : v->bound_.weights) {
        model.backend->bind_weight(w);
    }
    constexpr std::array<std::string_view, 2> kKeys = {"clip.", "deltallama.vision."};
    v->fingerprint_ = fingerprint_of(*v->file_, kKeys);
    const int32_t square = v->bound_.hparams.merge * v->bound_.hparams.merge;
    const Needs needs = v->needs(v->max_patches_, std::max(v->max_patches_ / square, 1));
    v->bytes_most_ = needs.plan.bytes + needs.workspace_bytes;
    return v;
}

Vision::Needs Vision::needs(int32_t n_patches, int32_t n_squares) const {
    Needs needs;
    needs.plan = plan_arena(bound_.graph, model_.backend->value_type(), n_patches, n_squares);
    needs.workspace_bytes = model_.backend->plan_workspace(bound_.graph, n_patches, n_squares);
    return needs;
}

ImageGrid Vision::check_grid(uint32_t frames, uint32_t height, uint32_t width) const {
    const VisionHparams& h = bound_.hparams;
    if (frames < 1 || frames > static_cast<uint32_t>(h.max_frames)) {
        throw Error(DELTA_ARG, format("an image of %u frames, expected 1 to %d", frames, h.max_frames));
    }
    const auto merge = static_cast<uint32_t>(h.merge);
    if (height == 0 || width == 0 || height % merge != 0 || width % merge != 0) {
        throw Error(DELTA_ARG, format("a grid of %u x %u patches, expected whole squares of %u x %u", height, width, merge, merge));
    }
    // Every factor is below 2^32; compared by division, nothing overflows.
    const auto most = static_cast<uint64_t>(max_patches_);
    if (uint64_t{height} * width > most / frames) {
        throw Error(DELTA_ARG, format("%u frames of %u x %u patches are more than the %d that this tower takes (max_patches)", frames, height, width,
                                      max_patches_));
    }
    return {static_cast<int32_t>(frames), static_cast<int32_t>(height), static_cast<int32_t>(width)};
}

void Vision::encode(const float* pixels, const ImageGrid& grid, std::span<float> features, Progress progress) {
    const VisionHparams& h = bound_.hparams;
    Step step;
    step.pixels = pixels;
    step.image = grid;
    step.square = h.merge;
    const int32_t n_squares = step.n_rows(RowKind::Squares);
    const size_t n_values = static_cast<size_t>(n_squares) * static_cast<size_t>(h.projection_dim);
    if (features.size() < n_values) {
        throw Error(DELTA_ARG, format("features has room for %zu values, %d rows of %d need %zu", features.size(), n_squares, h.projection_dim, n_values));
    }

    const Needs needs = this->needs(grid.n_patches(), n_squares);
    reserve(*model_.backend, arena_, needs.plan.bytes, "activations of an image");
    reserve(*model_.backend, workspace_, needs.workspace_bytes, "workspace of an image");
    bytes_now_.store(arena_->bytes + workspace_->bytes);

    const size_t n_ops = bound_.graph.ops.size();
    bool complete = true;
    const std::function<bool(size_t)> proceed = [&](size_t index) {
        complete = !model_.cancel.load() && (progress.fn == nullptr || progress.fn(index, n_ops, progress.user) == 0);
        return complete;
    };
    RunOptions options;
    options.poison = model_.run_options.poison;
    options.proceed = &proceed;
    options.costs = &costs_;
    std::fill(costs_.begin(), costs_.end(), OpCost{});
    model_.backend->run(bound_.graph, needs.plan, step, arena_->data, workspace_->data, options);
    if (!complete) {
        throw Error(DELTA_CANCELLED, "cancelled while an image was encoded");
    }

    const uint8_t* result = arena_->data + needs.plan.offset[static_cast<size_t>(bound_.graph.result.id)];
    const bool wide = model_.backend->value_type() == ValueType::F64;
    const auto value = [&](size_t i) {
        return wide ? static_cast<float>(reinterpret_cast<const double*>(result)[i]) : reinterpret_cast<const float*>(result)[i];
    };
    for (size_t i = 0; i < n_values; ++i) {
        if (!std::isfinite(value(i))) {
            throw Error(DELTA_NUMERIC, format("value %zu of feature row %zu is %g", i % static_cast<size_t>(h.projection_dim),
                                              i / static_cast<size_t>(h.projection_dim), static_cast<double>(value(i))));
        }
    }
    for (size_t i = 0; i < n_values; ++i) {
        features[i] = value(i);
    }
}

delta_vision_info Vision::info() const {
    const VisionHparams& h = bound_.hparams;
    const auto count = [](int32_t n) { return static_cast<uint32_t>(n); };
    delta_vision_info info{};
    info.size = sizeof info;
    info.n_layer = count(h.n_layer);
    info.n_embd = count(h.n_embd);
    info.n_ff = count(h.n_ff);
    info.n_head = count(h.n_head);
    info.head_dim = count(h.head_dim);
    info.projection_dim = count(h.projection_dim);
    info.patch_size = count(h.patch_size);
    info.merge = count(h.merge);
    info.grid_height = count(h.grid.height);
    info.grid_width = count(h.grid.width);
    info.max_frames = count(h.max_frames);
    info.patch_limit = count(h.patch_limit);
    info.side_limit = count(h.side_limit);
    info.max_patches = count(max_patches_);
    std::copy(h.mean.begin(), h.mean.end(), info.image_mean);
    std::copy(h.std.begin(), h.std.end(), info.image_std);
    info.n_params = bound_.n_params;
    info.weight_bytes = bound_.weight_bytes;
    info.bytes_now = bytes_now_.load();
    info.bytes_most = bytes_most_;
    info.fingerprint = fingerprint_;
    return info;
}

}  // namespace delta
