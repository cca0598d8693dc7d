// Encoding by weighted least squares. A group of N values is approximated by s * c_i, or by s * q_i + b; for given codes the best s
// (and b) solve the normal equations, and for given s (and b) the best codes are the nearest ones. The error as a function of s has many
// local minima, so a search starts from a row of scales around the obvious one and improves the best of them by turns.
//
// Several groups are searched at once, one per lane (lanes.h). Weights are the importance of each column, or all one.
#pragma once

#include "quant/lanes.h"

namespace delta {
namespace {

// Codes -n .. n - 1, their own values.
struct SignedCodes {
    float n;
    float lowest() const { return -n; }
    Lanes nearest(Lanes x) const { return round_even(clamp(x, -n, n - 1)); }
};

// x of a group as scale * code value.
struct Scaled {
    Lanes scale;
    Lanes error;  // sum of w (x - scale * c)^2, without the constant sum of w x^2: the lower the better, at most 0
};

// The best scale for the codes that `inverse` gives.
template <int N, class Codes>
inline Scaled fit_codes(const Codes& codes, const Lanes* x, const Lanes* w, Lanes inverse) {
    Lanes xc{}, cc{};
    for (int j = 0; j < N; ++j) {
        const Lanes c = codes.nearest(x[j] * inverse);
        const Lanes wc = w[j] * c;
        xc += wc * x[j];
        cc += wc * c;
    }
    const Lanes scale = ratio(xc, cc);
    return {scale, -scale * xc};
}

inline void keep_better(Scaled& best, const Scaled& other) {
    const IntLanes better = other.error < best.error;
    best.scale = select(better, other.scale, best.scale);
    best.error = select(better, other.error, best.error);
}

// Scales that put the largest magnitude on or around the lowest code, `n_steps` on each side, `step` of a code apart, of both signs
// because the codes reach further on one side.
template <int N, class Codes>
inline Scaled fit_scale(const Codes& codes, const Lanes* x, const Lanes* w, int n_steps, float step) {
    Lanes largest{};
    for (int j = 0; j < N; ++j) {
        largest = max(largest, magnitude(x[j]));
    }
    Scaled best{};
    for (int k = -n_steps; k <= n_steps; ++k) {
        const Lanes inverse = ratio(splat(codes.lowest() + step * static_cast<float>(k)), largest);
        keep_better(best, fit_codes<N>(codes, x, w, inverse));
        keep_better(best, fit_codes<N>(codes, x, w, -inverse));
    }
    for (int turn = 0; turn < 2; ++turn) {
        keep_better(best, fit_codes<N>(codes, x, w, ratio(splat(1), best.scale)));
    }
    return best;
}

// sum of w (x - scale * c)^2 with the nearest codes.
template <int N, class Codes>
inline Lanes scaled_error(const Codes& codes, const Lanes* x, const Lanes* w, Lanes scale) {
    const Lanes inverse = ratio(splat(1), scale);
    Lanes error{};
    for (int j = 0; j < N; ++j) {
        const Lanes rest = x[j] - scale * codes.nearest(x[j] * inverse);
        error += w[j] * rest * rest;
    }
    return error;
}

// x of a group as scale * q + base, q = 0 .. n.
struct Affine {
    Lanes scale, base;
    Lanes error;  // sum of w (x - scale * q - base)^2
};

inline Lanes nearest_step(Lanes x, float n) { return round_even(clamp(x, 0, n)); }

template <int N>
inline Lanes affine_error(const Lanes* x, const Lanes* w, Lanes scale, Lanes base, float n) {
    const Lanes inverse = ratio(splat(1), scale);
    Lanes error{};
    for (int j = 0; j < N; ++j) {
        const Lanes rest = x[j] - (scale * nearest_step((x[j] - base) * inverse, n) + base);
        error += w[j] * rest * rest;
    }
    return error;
}

// Sums over a group that do not depend on codes.
struct Moments {
    Lanes w, x, xx;  // sums of w, w x, w x^2
};

template <int N>
inline Moments moments(const Lanes* x, const Lanes* w) {
    Moments m{};
    for (int j = 0; j < N; ++j) {
        const Lanes wx = w[j] * x[j];
        m.w += w[j];
        m.x += wx;
        m.xx += wx * x[j];
    }
    return m;
}

// The best scale and base for the codes that `inverse` and `low` give. With `below`, the base is at most zero: such types store its
// negative without a sign.
template <int N>
inline Affine fit_steps(const Lanes* x, const Lanes* w, const Moments& m, Lanes inverse, Lanes low, float n, bool below) {
    Lanes q1{}, q2{}, qx{};  // sums of w q, w q^2, w q x
    for (int j = 0; j < N; ++j) {
        const Lanes q = nearest_step((x[j] - low) * inverse, n);
        const Lanes wq = w[j] * q;
        q1 += wq;
        q2 += wq * q;
        qx += wq * x[j];
    }
    const Lanes determinant = m.w * q2 - q1 * q1;
    Lanes scale = ratio(m.w * qx - m.x * q1, determinant);
    Lanes base = ratio(q2 * m.x - q1 * qx, determinant);
    if (below) {
        const IntLanes above = base > 0;
        scale = select(above, ratio(qx, q2), scale);
        base = select(above, Lanes{}, base);
    }
    const Lanes error = m.xx - scale * (2 * qx - scale * q2 - 2 * base * q1) - base * (2 * m.x - base * m.w);
    return {scale, base, error};
}

inline void keep_better(Affine& best, const Affine& other) {
    const IntLanes better = (other.error < best.error) & (other.scale > 0);
    best.scale = select(better, other.scale, best.scale);
    best.base = select(better, other.base, best.base);
    best.error = select(better, other.error, best.error);
}

// Grids that divide the range of the group into n + k * step parts, k = -n_steps .. n_steps.
template <int N>
inline Affine fit_affine(const Lanes* x, const Lanes* w, float n, bool below, int n_steps, float step) {
    Lanes low = x[0], high = x[0];
    for (int j = 1; j < N; ++j) {
        low = min(low, x[j]);
        high = max(high, x[j]);
    }
    low = below ? min(low, Lanes{}) : low;
    const Moments m = moments<N>(x, w);
    const Lanes width = high - low;
    Affine best{width / n, low, affine_error<N>(x, w, width / n, low, n)};
    for (int k = -n_steps; k <= n_steps; ++k) {
        keep_better(best, fit_steps<N>(x, w, m, ratio(splat(n + step * static_cast<float>(k)), width), low, n, below));
    }
    for (int turn = 0; turn < 2; ++turn) {
        keep_better(best, fit_steps<N>(x, w, m, ratio(splat(1), best.scale), best.base, n, below));
    }
    return best;
}

}  // namespace
}  // namespace delta
