// The search of fit.h for blocks of 32 values that stand alone, and what their quantizers share.
#pragma once

#include "quant/block.h"
#include "quant/fit.h"

namespace delta {
namespace {

struct Range {
    float min, max;
};

// Of n values, a multiple of the lanes.
inline Range range_of(const float* x, int64_t n) {
    Lanes low = load_lanes(x), high = low;
    for (int64_t i = kLanes; i < n; i += kLanes) {
        const Lanes next = load_lanes(x + i);
        low = min(low, next);
        high = max(high, next);
    }
    Range range{low[0], high[0]};
    for (int g = 1; g < kLanes; ++g) {
        range.min = low[g] < range.min ? low[g] : range.min;
        range.max = high[g] > range.max ? high[g] : range.max;
    }
    return range;
}

inline Lanes each_as_f16(Lanes values) {
    for (int g = 0; g < kLanes; ++g) {
        values[g] = as_f16(values[g]);
    }
    return values;
}

// Up to as many blocks of 32 as there are lanes, from block `first` on: x and weights in lanes; without importance all weights are one.
inline void load_blocks(const float* src, const float* importance, int64_t first, int64_t n_blocks, Lanes* x, Lanes* w) {
    load_groups<32>(src + 32 * first, n_blocks, x);
    if (importance != nullptr) {
        load_groups<32>(importance + 32 * first, n_blocks, w);
    } else {
        for (int j = 0; j < 32; ++j) {
            w[j] = splat(1);
        }
    }
}

// Calls store(block, d, values[32]) with x ~ d * value, the value of a code (of `codes`), d as f16 has it.
template <class Codes, class Store>
inline void fit_scaled_blocks(const Codes& codes, const float* src, const float* importance, int64_t n, int n_steps, float step,
                              const Store& store) {
    for (int64_t first = 0; first < n / 32; first += kLanes) {
        const int64_t n_blocks = n / 32 - first < kLanes ? n / 32 - first : kLanes;
        Lanes x[32], w[32];
        load_blocks(src, importance, first, n_blocks, x, w);
        const Lanes scale = each_as_f16(fit_scale<32>(codes, x, w, n_steps, step).scale);
        const Lanes inverse = ratio(splat(1), scale);
        for (int j = 0; j < 32; ++j) {
            x[j] = codes.nearest(x[j] * inverse);
        }
        int32_t q[32 * kLanes];
        store_groups<32>(x, q);
        for (int64_t b = 0; b < n_blocks; ++b) {
            store(first + b, scale[b], q + 32 * b);
        }
    }
}

// Calls store(block, d, m, q[32]) with x ~ d * q + m, 0 <= q <= n_codes, d and m as f16 has them.
template <class Store>
inline void fit_affine_blocks(const float* src, const float* importance, int64_t n, float n_codes, const Store& store) {
    for (int64_t first = 0; first < n / 32; first += kLanes) {
        const int64_t n_blocks = n / 32 - first < kLanes ? n / 32 - first : kLanes;
        Lanes x[32], w[32];
        load_blocks(src, importance, first, n_blocks, x, w);
        const Affine fit = fit_affine<32>(x, w, n_codes, false, 15, 0.1f);
        const Lanes scale = each_as_f16(fit.scale), base = each_as_f16(fit.base);
        const Lanes inverse = ratio(splat(1), scale);
        for (int j = 0; j < 32; ++j) {
            x[j] = nearest_step((x[j] - base) * inverse, n_codes);
        }
        int32_t q[32 * kLanes];
        store_groups<32>(x, q);
        for (int64_t b = 0; b < n_blocks; ++b) {
            store(first + b, scale[b], base[b], q + 32 * b);
        }
    }
}

}  // namespace
}  // namespace delta
