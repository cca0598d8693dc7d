// What ops read and write: activations (Value), tensors of the file (Weight) and per-sequence memory (StateLayout).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "quant/quant.h"

namespace delta {

enum class RowKind : uint8_t { Tokens, Outputs };

// A row-major float32 matrix [rows, cols]. The number of rows is known at run time only: all tokens of the step, or its output rows.
struct Value {
    int32_t id = -1;
    RowKind rows = RowKind::Tokens;
    int32_t cols = 0;
};

// A tensor of the file, bound by name, shape and type: `mats` matrices [rows, cols], each row encoded as `type`.
struct Weight {
    std::string name;
    const TypeInfo* type = nullptr;
    int64_t mats = 1;
    int64_t rows = 1;
    int64_t cols = 1;
    size_t mat_stride = 0;             // bytes from one matrix to the next
    const uint8_t* data = nullptr;     // in the mapped file, or a private copy
    const void* device = nullptr;      // the backend's form, set by Backend::bind_weight

    size_t row_bytes() const { return delta::row_bytes(*type, cols); }
    const uint8_t* row(int64_t mat, int64_t r) const { return data + static_cast<size_t>(mat) * mat_stride + static_cast<size_t>(r) * row_bytes(); }
};

// Per-sequence memory. One slot has a recurrent part of fixed size and a latent part that grows with the position:
//   recurrent: for each KDA layer  conv q, k, v: [conv_rows, inner] float32 each, oldest row first; then S: [n_head, v, k] float32
//   latent:    for each MLA layer  [n_ctx, latent_width] of cache_type
// A checkpoint is a copy of the recurrent part.
struct StateLayout {
    int32_t n_kda = 0;          // KDA layers
    int32_t n_mla = 0;          // MLA layers
    int32_t conv_rows = 0;      // d_conv - 1
    int32_t n_head = 0;         // KDA heads
    int32_t head_dim = 0;       // k and v width of a KDA head
    int32_t latent_width = 0;   // kv_lora_rank + rope part
    int32_t n_ctx = 0;          // positions per slot
    const TypeInfo* cache_type = nullptr;

    int64_t inner() const { return int64_t{n_head} * head_dim; }
    size_t conv_floats() const { return static_cast<size_t>(conv_rows) * static_cast<size_t>(inner()); }                   // one stream
    size_t scan_floats() const { return static_cast<size_t>(inner()) * static_cast<size_t>(head_dim); }                    // one layer
    size_t kda_layer_floats() const { return 3 * conv_floats() + scan_floats(); }
    size_t recurrent_bytes() const { return static_cast<size_t>(n_kda) * kda_layer_floats() * sizeof(float); }             // one slot
    size_t latent_row_bytes() const { return n_mla == 0 ? 0 : row_bytes(*cache_type, latent_width); }
    size_t latent_layer_bytes() const { return static_cast<size_t>(n_ctx) * latent_row_bytes(); }
    size_t latent_bytes() const { return static_cast<size_t>(n_mla) * latent_layer_bytes(); }                              // one slot
};

// Where the slots are on the device.
struct StateMemory {
    const StateLayout* layout = nullptr;
    uint8_t* recurrent = nullptr;  // [n_slots][recurrent_bytes]
    uint8_t* latent = nullptr;     // [n_slots][latent_bytes]

    float* conv(int32_t slot, int32_t kda, int32_t stream) const {
        return kda_layer(slot, kda) + static_cast<size_t>(stream) * layout->conv_floats();
    }
    float* scan(int32_t slot, int32_t kda) const { return kda_layer(slot, kda) + 3 * layout->conv_floats(); }
    uint8_t* latents(int32_t slot, int32_t mla) const {
        return latent + static_cast<size_t>(slot) * layout->latent_bytes() + static_cast<size_t>(mla) * layout->latent_layer_bytes();
    }

   private:
    float* kda_layer(int32_t slot, int32_t kda) const {
        return reinterpret_cast<float*>(recurrent + static_cast<size_t>(slot) * layout->recurrent_bytes()) +
               static_cast<size_t>(kda) * layout->kda_layer_floats();
    }
};

}  // namespace delta
