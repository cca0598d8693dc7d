// The table of tensor types: one row per type in types.def, one header per type with its block layout and scalar conversions.
// Everybody who meets an encoded row asks here; nobody else knows a block layout except the kernels of a backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace delta {

struct TypeInfo {
    uint32_t id;           // GGUF type id
    const char* name;      // "Q8_0"
    int32_t block;         // values per block
    int32_t block_bytes;   // bytes per block
    void (*to_float)(const void* src, float* dst, int64_t n);    // n values, a multiple of `block`
    void (*from_float)(const float* src, void* dst, int64_t n);  // null: no quantizer
    // The same with the importance of each value, positive numbers around one: the encoding keeps the sum of importance * error^2
    // small. Null: `from_float` does not choose.
    void (*from_weighted)(const float* src, const float* importance, void* dst, int64_t n);
    float largest;         // larger magnitudes do not survive from_float
};

// Null if this build does not know the type.
const TypeInfo* find_type(uint32_t id);
const TypeInfo* find_type(std::string_view name);
// "F32, F16, ..." for messages.
const char* type_names();

inline size_t row_bytes(const TypeInfo& type, int64_t n_cols) {
    return static_cast<size_t>(n_cols / type.block) * static_cast<size_t>(type.block_bytes);
}

}  // namespace delta
