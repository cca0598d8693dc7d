// Asks a file for tensors by name, shape and type, and remembers which it asked for, so that what is left over can be named.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "gguf/gguf.h"
#include "graph/value.h"

namespace delta {

enum class Want : uint8_t {
    F32,    // vectors, convolutions, routers: float32 in every file of these architectures
    Matrix  // any type of the table
};

struct BoundWeights {
    std::deque<Weight> weights;                     // stable addresses: ops point into it
    std::vector<std::unique_ptr<uint8_t[]>> owned;  // private copies made while binding (split attn_kv_b)
    size_t owned_bytes = 0;
};

class Binder {
   public:
    // `architecture` is what messages call the model.
    Binder(const GgufSet& file, std::string architecture, BoundWeights& bound) : file_(file), architecture_(std::move(architecture)), bound_(bound) {}

    bool has(const std::string& name) const { return file_.find_tensor(name) != nullptr; }

    // The tensor `name` as `mats` matrices [rows, cols]. Dimensions of 1 may be absent or in another place. Throws Error(FORMAT)
    // with expected and found.
    const Weight& get(const std::string& name, int64_t mats, int64_t rows, int64_t cols, Want want = Want::Matrix);
    const Weight& vector(const std::string& name, int64_t n) { return get(name, 1, 1, n, Want::F32); }

    // `n_rows` rows that are stored with further dimensions: mats * rows * cols values in all.
    const Weight& flattened(const std::string& name, int64_t mats, int64_t rows, int64_t cols, int64_t n_rows, Want want = Want::Matrix);

    // Row ranges of one stored matrix as weights of their own (fused q, k, v).
    const Weight& rows_of(const Weight& whole, const std::string& name, int64_t first, int64_t n_rows);

    // The two halves of a fused attn_kv_b [n_head * (nope + v), latent]: k_b transposed per head to [latent, nope] (a private float32
    // copy with the exact decoded values), v_b [v, latent] in place.
    struct SplitKvB {
        const Weight* k_b;
        const Weight* v_b;
    };
    SplitKvB split_kv_b(const std::string& name, int64_t n_head, int64_t nope, int64_t v, int64_t latent);

    // Throws Error(FORMAT) naming tensors of the file that nobody asked for.
    void check_closure() const;

   private:
    Weight& add(Weight weight);

    const GgufSet& file_;
    std::string architecture_;
    BoundWeights& bound_;
    std::unordered_set<std::string> used_;
};

}  // namespace delta
