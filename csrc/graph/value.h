// What ops read and write: activations (Value), tensors of the file (Weight) and per-sequence memory (StateLayout).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "quant/quant.h"

namespace delta {

// Rows of a text model are tokens, and those of them whose logits are wished for; rows of a vision tower are patches of an image, and the
// squares of patches that become tokens.
enum class RowKind : uint8_t { Tokens, Outputs, Patches, Squares };

// What the numbers between ops and in the recurrent state are; one choice for a whole device.
enum class ValueType : uint8_t { F32, F64 };
constexpr size_t value_bytes(ValueType type) { return type == ValueType::F64 ? sizeof(double) : sizeof(float); }
constexpr const char* value_name(ValueType type) { return type == ValueType::F64 ? "float64" : "float32"; }

// A row-major matrix [rows, cols] of the device's value type. The number of rows is known at run time only.
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
//   recurrent: for each KDA layer  conv q, k, v: [conv_rows, inner] values each, oldest row first; then S: [n_head, v, k] values
//   latent:    for each MLA layer  [n_ctx, latent_width] of cache_type, or of values if that is F32
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
    ValueType value_type = ValueType::F32;

    int64_t inner() const { return int64_t{n_head} * head_dim; }
    size_t conv_values() const { return static_cast<size_t>(conv_rows) * static_cast<size_t>(inner()); }                   // one stream
    size_t scan_values() const { return static_cast<size_t>(inner()) * static_cast<size_t>(head_dim); }                    // one layer
    size_t kda_layer_values() const { return 3 * conv_values() + scan_values(); }
    size_t recurrent_bytes() const { return static_cast<size_t>(n_kda) * kda_layer_values() * value_bytes(value_type); }  // one slot
    // A cache of type F32 rounds nothing: it holds the device's own values.
    bool wide_latents() const { return value_type == ValueType::F64 && cache_type->id == 0; }
    size_t latent_row_bytes() const {
        if (n_mla == 0) {
            return 0;
        }
        return wide_latents() ? static_cast<size_t>(latent_width) * sizeof(double) : row_bytes(*cache_type, latent_width);
    }
    size_t latent_layer_bytes() const { return static_cast<size_t>(n_ctx) * latent_row_bytes(); }
    size_t latent_bytes() const { return static_cast<size_t>(n_mla) * latent_layer_bytes(); }                              // one slot
};

// Where the slots are on the device.
struct StateMemory {
    const StateLayout* layout = nullptr;
    uint8_t* recurrent = nullptr;  // [n_slots][recurrent_bytes]
    uint8_t* latent = nullptr;     // [n_slots][latent_bytes]

    // T is the layout's value type.
    template <class T>
    T* conv(int32_t slot, int32_t kda, int32_t stream) const {
        return kda_layer<T>(slot, kda) + static_cast<size_t>(stream) * layout->conv_values();
    }
    template <class T>
    T* scan(int32_t slot, int32_t kda) const {
        return kda_layer<T>(slot, kda) + 3 * layout->conv_values();
    }
    uint8_t* latents(int32_t slot, int32_t mla) const {
        return latent + static_cast<size_t>(slot) * layout->latent_bytes() + static_cast<size_t>(mla) * layout->latent_layer_bytes();
    }

   private:
    template <class T>
    T* kda_layer(int32_t slot, int32_t kda) const {
        return reinterpret_cast<T*>(recurrent + static_cast<size_t>(slot) * layout->recurrent_bytes()) +
               static_cast<size_t>(kda) * layout->kda_layer_values();
    }
};

}  // namespace delta
