// MoonViT-3d and its projector: the tower of an mmproj file. Keys and tensors: docs/vision.md.
#pragma once

#include <array>
#include <string>

#include "gguf/gguf.h"
#include "graph/graph.h"
#include "models/binder.h"

namespace delta {

struct VisionHparams {
    int32_t n_layer = 0;
    int32_t n_embd = 0;
    int32_t n_ff = 0;
    int32_t n_head = 0;
    int32_t head_dim = 0;        // n_head * head_dim need not be n_embd
    int32_t projection_dim = 0;  // width of the text model
    int32_t patch_size = 0;
    int32_t merge = 0;           // side of a square of patches that becomes one row
    GridParams grid;             // of the learned positions
    int32_t max_frames = 0;
    int32_t patch_limit = 0;     // preprocessing keeps to these before it pads
    int32_t side_limit = 0;
    std::array<float, 3> mean{}, std{};
    float eps = 0;               // of the norms of the tower
    float projector_eps = 0;
    double rope_base = 0;
    GeluParams ffn_gelu, projector_gelu;

    int32_t patch_values() const { return 3 * patch_size * patch_size; }
};

struct BoundVision : BoundWeights {
    VisionHparams hparams;
    Graph graph;                 // from the pixels of patches to feature rows
    uint64_t n_params = 0;
    uint64_t weight_bytes = 0;
};

// The text model that such a tower belongs to.
inline constexpr std::string_view kVisionPartner = "kimi-k3";

// Throws Error (FORMAT, UNSUPPORTED) naming key or tensor, expected and found.
BoundVision build_moonvit(const GgufSet& file);

}  // namespace delta
