// A vision tower beside a text model: its file, its graph, and memory for the largest image so far. It runs on the model's backend; one
// thread at a time computes (the caller holds Model::busy).
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>

#include "models/moonvit.h"
#include "runtime/session.h"

namespace delta {

class Vision {
   public:
    // Opens and checks the file, and that it belongs to `model`, which must outlive it. Throws Error.
    static std::unique_ptr<Vision> open(const std::string& path, Model& model, const delta_vision_params& params);

    const VisionHparams& hparams() const { return bound_.hparams; }
    const Graph& graph() const { return bound_.graph; }
    delta_vision_info info() const;
    std::span<const OpCost> costs() const { return costs_; }  // of every op, in the latest encode; for who holds `busy`

    // The grid, if the tower can take it. Throws Error(ARG).
    ImageGrid check_grid(uint32_t frames, uint32_t height, uint32_t width) const;
    // Rows of squares [n, projection_dim] into `features`, which must have room for them. Throws Error.
    void encode(const float* pixels, const ImageGrid& grid, std::span<float> features, Progress progress);

   private:
    explicit Vision(Model& model) : model_(model) {}

    struct Needs {
        ArenaPlan plan;
        size_t workspace_bytes = 0;
    };
    Needs needs(int32_t n_patches, int32_t n_squares) const;

    Model& model_;
    std::unique_ptr<GgufSet> file_;
    BoundVision bound_;
    int32_t max_patches_ = 0;
    uint64_t bytes_most_ = 0;
    uint64_t fingerprint_ = 0;
    std::atomic<uint64_t> bytes_now_{0};
    std::vector<OpCost> costs_;
    std::unique_ptr<Buffer> arena_;
    std::unique_ptr<Buffer> workspace_;
};

}  // namespace delta
