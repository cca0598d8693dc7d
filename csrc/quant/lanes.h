// Eight floats side by side, on the compiler's vector extensions: lane g of a vector belongs to group g of a block, so that every sum
// over a group runs in one lane, in order, and comes out the same at every vector width of the processor.
#pragma once

#include <cstdint>
#include <cstring>

namespace delta {
namespace {

constexpr int kLanes = 8;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));

inline Lanes splat(float value) { return value - Lanes{}; }
inline Lanes select(IntLanes mask, Lanes yes, Lanes no) { return mask ? yes : no; }
inline Lanes min(Lanes a, Lanes b) { return select(a < b, a, b); }
inline Lanes max(Lanes a, Lanes b) { return select(a > b, a, b); }
inline Lanes clamp(Lanes x, float low, float high) { return min(max(x, splat(low)), splat(high)); }
inline Lanes magnitude(Lanes x) { return (Lanes)((IntLanes)x & 0x7fffffff); }

// To the nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction.
inline Lanes round_even(Lanes x) { return (x + 12582912.0f) - 12582912.0f; }

// a / b, and 0 where b is 0.
inline Lanes ratio(Lanes a, Lanes b) { return select(b != 0, a / select(b != 0, b, splat(1)), Lanes{}); }

inline float sum(Lanes x) {
    float total = 0;
    for (int g = 0; g < kLanes; ++g) {
        total += x[g];
    }
    return total;
}

// n groups of N consecutive values to lanes: x[j][g] = src[g * N + j]. Missing groups are zeros.
template <int N>
inline void load_groups(const float* src, int64_t n, Lanes* x) {
    alignas(sizeof(Lanes)) float values[N][kLanes] = {};
    for (int64_t g = 0; g < n; ++g) {
        for (int j = 0; j < N; ++j) {
            values[j][g] = src[g * N + j];
        }
    }
    std::memcpy(x, values, sizeof values);
}

// The way back, as integers.
template <int N>
inline void store_groups(const Lanes* q, int32_t* dst) {
    for (int j = 0; j < N; ++j) {
        const IntLanes whole = __builtin_convertvector(q[j], IntLanes);
        for (int g = 0; g < kLanes; ++g) {
            dst[g * N + j] = whole[g];
        }
    }
}

}  // namespace
}  // namespace delta
