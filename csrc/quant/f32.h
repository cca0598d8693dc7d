// F32: plain float32. Rows may start at any address.
#pragma once

#include <cstdint>
#include <cstring>

namespace delta {

static inline void to_float_f32(const void* src, float* dst, int64_t n) {
    std::memcpy(dst, src, static_cast<size_t>(n) * sizeof(float));
}

static inline void from_float_f32(const float* src, void* dst, int64_t n) {
    std::memcpy(dst, src, static_cast<size_t>(n) * sizeof(float));
}

}  // namespace delta
