// The search of fit.h for super-blocks: 256 values in groups of N with a scale (and minimum) each, which are themselves small integers
// times a common half-precision factor. First each group alone; then the common factor, and around it for each group the integers
// that serve it best, since rounding the scales costs more than choosing them; then the factor again for what was chosen.
#pragma once

#include "quant/block.h"
#include "quant/fit.h"

namespace delta {
namespace {

constexpr int kSuperBlock = 256;


// Groups of N in lanes: lane g of set l holds group kLanes * l + g.
template <int N>
struct SuperBlock {
    static constexpr int kSets = kSuperBlock / N / kLanes;
    Lanes x[kSets][N];
    Lanes w[kSets][N];

    // `importance` may be null: all values alike.
    void load(const float* src, const float* importance) {
        for (int l = 0; l < kSets; ++l) {
            load_groups<N>(src + l * N * kLanes, kLanes, x[l]);
            if (importance != nullptr) {
                load_groups<N>(importance + l * N * kLanes, kLanes, w[l]);
            } else {
                for (int j = 0; j < N; ++j) {
                    w[l][j] = splat(1);
                }
            }
        }
    }
};

template <int N>
struct ScaledSuperBlock {
    float d = 0;                                   // as f16 has it
    Lanes scales[SuperBlock<N>::kSets] = {};       // integers
    float error = 0;
};

// The integers around scale / d that serve each group best.
template <int N, class Codes>
inline ScaledSuperBlock<N> choose_scales(const Codes& codes, const SuperBlock<N>& block, const Lanes* wish, float d, float low, float high) {
    ScaledSuperBlock<N> chosen;
    chosen.d = factor_as_f16(d);
    const float inverse = finite_reciprocal(chosen.d);
    Lanes errors[SuperBlock<N>::kSets];
    for (int l = 0; l < SuperBlock<N>::kSets; ++l) {
        const Lanes middle = round_even(clamp(wish[l] * inverse, low, high));
        Lanes best = scaled_error<N>(codes, block.x[l], block.w[l], chosen.d * middle);
        chosen.scales[l] = middle;
        for (int away = -1; away <= 1; away += 2) {
            const Lanes scale = clamp(middle + static_cast<float>(away), low, high);
            const Lanes error = scaled_error<N>(codes, block.x[l], block.w[l], chosen.d * scale);
            chosen.scales[l] = select(error < best, scale, chosen.scales[l]);
            best = min(error, best);
        }
        errors[l] = best;
    }
    chosen.error = sum(errors, SuperBlock<N>::kSets);
    return chosen;
}

// The best factor for given integers and the codes that go with them.
template <int N, class Codes>
inline float refit_scale(const Codes& codes, const SuperBlock<N>& block, const ScaledSuperBlock<N>& chosen) {
    constexpr int kSets = SuperBlock<N>::kSets;
    Lanes xv[kSets] = {}, vv[kSets] = {};
    for (int l = 0; l < kSets; ++l) {
        const Lanes inverse = ratio(splat(1), chosen.d * chosen.scales[l]);
        for (int j = 0; j < N; ++j) {
            const Lanes v = chosen.scales[l] * codes.nearest(block.x[l][j] * inverse);
            const Lanes wv = block.w[l][j] * v;
            xv[l] += wv * block.x[l][j];
            vv[l] += wv * v;
        }
    }
    const float square = sum(vv, kSets);
    return square > 0 ? sum(xv, kSets) / square : 0;
}

// x ~ d * scale * code with low <= scale <= high; replaces x by the code values.
template <int N, class Codes>
inline ScaledSuperBlock<N> fit_scaled_super(const Codes& codes, SuperBlock<N>& block, float low, float high, int n_steps, float step) {
    constexpr int kSets = SuperBlock<N>::kSets;
    Lanes wish[kSets];
    float extreme = 0;
    for (int l = 0; l < kSets; ++l) {
        wish[l] = fit_scale<N>(codes, block.x[l], block.w[l], n_steps, step).scale;
        for (int g = 0; g < kLanes; ++g) {
            extreme = __builtin_fabsf(wish[l][g]) > __builtin_fabsf(extreme) ? wish[l][g] : extreme;
        }
    }
    // The largest scale as the lowest integer, a little within or beyond it, or as the highest.
    const float factors[] = {extreme / low, extreme / (1.04f * low), extreme / (0.96f * low), extreme / high};
    ScaledSuperBlock<N> best;
    for (int k = 0; k < 5; ++k) {
        const float d = k < 4 ? factors[k] : refit_scale<N>(codes, block, best);
        const ScaledSuperBlock<N> other = choose_scales<N>(codes, block, wish, d, low, high);
        best = k == 0 || other.error < best.error ? other : best;
    }
    for (int l = 0; l < kSets; ++l) {
        const Lanes inverse = ratio(splat(1), best.d * best.scales[l]);
        for (int j = 0; j < N; ++j) {
            block.x[l][j] = codes.nearest(block.x[l][j] * inverse);
        }
    }
    return best;
}

template <int N>
struct AffineSuperBlock {
    float d = 0, dmin = 0;                         // as f16 has them
    Lanes scales[SuperBlock<N>::kSets] = {};       // integers
    Lanes mins[SuperBlock<N>::kSets] = {};
    float error = 0;
};

// The integers around scale / d and -base / dmin that serve each group best.
template <int N>
inline AffineSuperBlock<N> choose_steps(const SuperBlock<N>& block, const Affine* wish, float d, float dmin, float n, float high) {
    AffineSuperBlock<N> chosen;
    chosen.d = factor_as_f16(d);
    chosen.dmin = factor_as_f16(dmin);
    const float inverse = finite_reciprocal(chosen.d), inverse_min = finite_reciprocal(chosen.dmin);
    Lanes errors[SuperBlock<N>::kSets];
    for (int l = 0; l < SuperBlock<N>::kSets; ++l) {
        const Lanes scale = round_even(clamp(wish[l].scale * inverse, 0, high));
        const Lanes least = round_even(clamp(wish[l].base * -inverse_min, 0, high));
        Lanes best{};
        for (int k = 0; k < 9; ++k) {  // the middle first
            const float ds = static_cast<float>((k + 1) % 3 - 1), dm = static_cast<float>((k / 3 + 1) % 3 - 1);
            const Lanes s = clamp(scale + ds, 0, high), m = clamp(least + dm, 0, high);
            const Lanes error = affine_error<N>(block.x[l], block.w[l], chosen.d * s, -(chosen.dmin * m), n);
            const IntLanes better = k == 0 ? IntLanes{} - 1 : error < best;
            chosen.scales[l] = select(better, s, chosen.scales[l]);
            chosen.mins[l] = select(better, m, chosen.mins[l]);
            best = select(better, error, best);
        }
        errors[l] = best;
    }
    chosen.error = sum(errors, SuperBlock<N>::kSets);
    return chosen;
}

// The best factors for given integers and the codes that go with them: least squares in (d, dmin).
template <int N>
inline void refit_steps(const SuperBlock<N>& block, const AffineSuperBlock<N>& chosen, float n, float& d, float& dmin) {
    constexpr int kSets = SuperBlock<N>::kSets;
    Lanes vv[kSets] = {}, mm[kSets] = {}, vm[kSets] = {}, xv[kSets] = {}, xm[kSets] = {};  // v = scale * q, m = -min
    for (int l = 0; l < kSets; ++l) {
        const Lanes base = -(chosen.dmin * chosen.mins[l]), m = -chosen.mins[l];
        const Lanes inverse = ratio(splat(1), chosen.d * chosen.scales[l]);
        for (int j = 0; j < N; ++j) {
            const Lanes x = block.x[l][j], w = block.w[l][j];
            const Lanes v = chosen.scales[l] * nearest_step((x - base) * inverse, n);
            const Lanes wv = w * v, wm = w * m;
            vv[l] += wv * v;
            mm[l] += wm * m;
            vm[l] += wv * m;
            xv[l] += wv * x;
            xm[l] += wm * x;
        }
    }
    const double a = sum(vv, kSets), b = sum(vm, kSets), c = sum(mm, kSets), p = sum(xv, kSets), q = sum(xm, kSets);
    const double determinant = a * c - b * b;
    d = chosen.d;
    dmin = chosen.dmin;
    if (determinant > 1e-6 * a * c) {
        const double first = (p * c - q * b) / determinant, second = (a * q - b * p) / determinant;
        if (first > 0 && second >= 0) {
            d = static_cast<float>(first);
            dmin = static_cast<float>(second);
        }
    } else if (a > 0 && c == 0) {
        d = static_cast<float>(p / a);
    }
}

// x ~ d * scale * q - dmin * min with scale, min = 0 .. high and q = 0 .. n; replaces x by q.
template <int N>
inline AffineSuperBlock<N> fit_affine_super(SuperBlock<N>& block, float n, float high, int n_steps, float step) {
    constexpr int kSets = SuperBlock<N>::kSets;
    Affine wish[kSets];
    float scale = 0, least = 0;
    for (int l = 0; l < kSets; ++l) {
        wish[l] = fit_affine<N>(block.x[l], block.w[l], n, true, n_steps, step);
        for (int g = 0; g < kLanes; ++g) {
            scale = wish[l].scale[g] > scale ? wish[l].scale[g] : scale;
            least = -wish[l].base[g] > least ? -wish[l].base[g] : least;
        }
    }
    AffineSuperBlock<N> best = choose_steps<N>(block, wish, scale / high, least / high, n, high);
    for (int turn = 0; turn < 2; ++turn) {
        float d, dmin;
        refit_steps<N>(block, best, n, d, dmin);
        const AffineSuperBlock<N> other = choose_steps<N>(block, wish, d, dmin, n, high);
        best = other.error < best.error ? other : best;
    }
    for (int l = 0; l < kSets; ++l) {
        const Lanes base = -(best.dmin * best.mins[l]), inverse = ratio(splat(1), best.d * best.scales[l]);
        for (int j = 0; j < N; ++j) {
            block.x[l][j] = nearest_step((block.x[l][j] - base) * inverse, n);
        }
    }
    return best;
}

// Integers of groups from lanes, in group order.
template <int N>
inline void store_scales(const Lanes* scales, int32_t* dst) {
    for (int l = 0; l < SuperBlock<N>::kSets; ++l) {
        store_groups<1>(scales + l, dst + l * kLanes);
    }
}

// 256 codes from lanes, in order.
template <int N>
inline void store_codes(const SuperBlock<N>& block, int32_t* dst) {
    for (int l = 0; l < SuperBlock<N>::kSets; ++l) {
        store_groups<N>(block.x[l], dst + l * N * kLanes);
    }
}

}  // namespace
}  // namespace delta
