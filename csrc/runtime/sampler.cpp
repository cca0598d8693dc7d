#include "runtime/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/error.h"

namespace delta {

namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

void require(bool valid, const char* name, const char* range, double value) {
    if (!valid) {
        throw Error(DELTA_ARG, format("sampling parameter %s must be %s, not %g", name, range, value));
    }
}

bool allowed(const uint32_t* mask, int32_t token) { return (mask[token / 32] >> (token % 32) & 1u) != 0; }

void apply_penalties(float* x, std::span<const int32_t> timeline, const delta_sampling_params& params) {
    const bool none = params.repetition_penalty == 1 && params.presence_penalty == 0 && params.frequency_penalty == 0;
    if (none || params.penalty_last_n == 0) {
        return;
    }
    size_t n = timeline.size();
    if (params.penalty_last_n > 0) {
        n = std::min(n, static_cast<size_t>(params.penalty_last_n));
    }
    std::vector<int32_t> recent(timeline.end() - static_cast<std::ptrdiff_t>(n), timeline.end());
    std::erase(recent, DELTA_FEATURE);
    std::sort(recent.begin(), recent.end());
    for (size_t i = 0; i < recent.size();) {
        size_t end = i;
        while (end < recent.size() && recent[end] == recent[i]) {
            ++end;
        }
        float& score = x[recent[i]];
        score = score > 0 ? score / params.repetition_penalty : score * params.repetition_penalty;
        score -= params.presence_penalty + static_cast<float>(end - i) * params.frequency_penalty;
        i = end;
    }
}

// Better first: larger score, then lower id.
struct Better {
    const float* x;
    bool operator()(int32_t a, int32_t b) const { return x[a] > x[b] || (x[a] == x[b] && a < b); }
};

// Moves the `n` best of `ids` to the front, in order. Linear in the rest.
void best_first(std::span<int32_t> ids, size_t n, Better better) {
    const auto middle = ids.begin() + static_cast<std::ptrdiff_t>(std::min(n, ids.size()));
    if (middle != ids.end()) {
        std::nth_element(ids.begin(), middle, ids.end(), better);
    }
    std::sort(ids.begin(), middle, better);
}

// Shortens `kept` to the shortest head, best first, that has `top_p` of its weight. Sorts in pieces that double, because the head is
// nearly always short.
void keep_top_p(std::vector<int32_t>& kept, const float* x, double top_p, double best, double temperature) {
    double total = 0;
    for (const int32_t t : kept) {
        total += std::exp((x[t] - best) / temperature);
    }
    double sum = 0;
    size_t sorted = 0;
    for (size_t i = 0; i < kept.size(); ++i) {
        if (i == sorted) {
            const size_t piece = std::max<size_t>(64, sorted);
            best_first(std::span(kept).subspan(sorted), piece, Better{x});
            sorted = std::min(sorted + piece, kept.size());
        }
        sum += std::exp((x[kept[i]] - best) / temperature);
        if (sum >= top_p * total) {
            kept.resize(i + 1);
            return;
        }
    }
}

uint64_t mix(uint64_t z) {  // finalizer of SplitMix64 (Steele, Lea, Flood 2014)
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

}  // namespace

void check_sampling(const delta_sampling_params& params, int32_t n_vocab) {
    require(std::isfinite(params.temperature) && params.temperature >= 0, "temperature", "finite and at least 0",
            params.temperature);
    require(params.top_k >= 0, "top_k", "at least 0", params.top_k);
    require(params.top_p > 0 && params.top_p <= 1, "top_p", "above 0 and at most 1", params.top_p);
    require(params.min_p >= 0 && params.min_p <= 1, "min_p", "between 0 and 1", params.min_p);
    require(std::isfinite(params.repetition_penalty) && params.repetition_penalty > 0, "repetition_penalty",
            "finite and above 0", params.repetition_penalty);
    require(std::isfinite(params.presence_penalty), "presence_penalty", "finite", params.presence_penalty);
    require(std::isfinite(params.frequency_penalty), "frequency_penalty", "finite", params.frequency_penalty);
    require(params.penalty_last_n >= -1, "penalty_last_n", "at least -1", params.penalty_last_n);

    if (params.n_logit_bias > 0 && params.logit_bias == nullptr) {
        throw Error(DELTA_ARG, format("sampling parameter logit_bias is null, but n_logit_bias is %zu", params.n_logit_bias));
    }
    if (params.n_logit_bias > static_cast<size_t>(n_vocab)) {
        throw Error(DELTA_ARG, format("sampling parameter n_logit_bias must be at most the vocabulary's %d, not %zu", n_vocab,
                                      params.n_logit_bias));
    }
    std::vector<int32_t> ids;
    for (size_t i = 0; i < params.n_logit_bias; ++i) {
        const delta_token_bias& item = params.logit_bias[i];
        if (item.token < 0 || item.token >= n_vocab) {
            throw Error(DELTA_ARG,
                        format("sampling parameter logit_bias[%zu] names token %d, outside 0..%d", i, item.token, n_vocab - 1));
        }
        if (std::isnan(item.bias) || item.bias == -kForbidden) {
            throw Error(DELTA_ARG, format("sampling parameter logit_bias of token %d must be a number or -inf, not %g",
                                          item.token, static_cast<double>(item.bias)));
        }
        ids.push_back(item.token);
    }
    std::sort(ids.begin(), ids.end());
    const auto twice = std::adjacent_find(ids.begin(), ids.end());
    if (twice != ids.end()) {
        throw Error(DELTA_ARG, format("sampling parameter logit_bias names token %d more than once", *twice));
    }

    if (params.token_mask != nullptr) {
        bool any = false;
        for (int32_t t = 0; t < n_vocab && !any; ++t) {
            any = allowed(params.token_mask, t);
        }
        if (!any) {
            throw Error(DELTA_ARG, format("sampling parameter token_mask allows none of the %d tokens", n_vocab));
        }
    }
}

double uniform(uint64_t seed, uint64_t counter) {
    constexpr uint64_t kStep = 0x9e3779b97f4a7c15u;  // odd, so that every counter gives another state
    return static_cast<double>(mix(mix(seed + kStep) + counter * kStep) >> 11) * 0x1.0p-53;
}

int32_t sample_token(std::span<const float> logits, std::span<const int32_t> timeline, const delta_sampling_params& params,
                     std::vector<float>& scratch) {
    const auto n_vocab = static_cast<int32_t>(logits.size());
    scratch.assign(logits.begin(), logits.end());
    float* x = scratch.data();
    if (params.token_mask != nullptr) {
        for (int32_t t = 0; t < n_vocab; ++t) {
            if (!allowed(params.token_mask, t)) {
                x[t] = kForbidden;
            }
        }
    }
    for (size_t i = 0; i < params.n_logit_bias; ++i) {
        x[params.logit_bias[i].token] += params.logit_bias[i].bias;
    }
    apply_penalties(x, timeline, params);

    const auto best = static_cast<int32_t>(std::max_element(x, x + n_vocab) - x);  // the first of equals
    const double top = static_cast<double>(x[best]);
    if (std::isinf(top)) {
        throw Error(DELTA_ARG, top > 0 ? format("the penalties and biases drive the logit of token %d to infinity", best)
                                       : format("sampling parameters logit_bias and token_mask forbid all %d tokens", n_vocab));
    }
    if (params.temperature == 0) {
        return best;
    }

    std::vector<int32_t> kept;
    for (int32_t t = 0; t < n_vocab; ++t) {
        if (x[t] != kForbidden) {
            kept.push_back(t);
        }
    }
    const double temperature = static_cast<double>(params.temperature);
    if (params.top_k > 0 && static_cast<size_t>(params.top_k) < kept.size()) {
        std::nth_element(kept.begin(), kept.begin() + params.top_k, kept.end(), Better{x});
        kept.resize(static_cast<size_t>(params.top_k));
    }
    if (params.top_p < 1) {
        keep_top_p(kept, x, static_cast<double>(params.top_p), top, temperature);
    }
    std::sort(kept.begin(), kept.end());

    std::vector<double> weights;  // of `kept`, once min-p has cut it
    double total = 0;
    for (const int32_t t : kept) {
        const double w = std::exp((x[t] - top) / temperature);
        if (w < static_cast<double>(params.min_p)) {
            continue;  // never the best: it has w = 1
        }
        kept[weights.size()] = t;
        weights.push_back(w);
        total += w;
    }
    const double goal = uniform(params.seed, timeline.size()) * total;
    double sum = 0;
    size_t i = 0;
    while (i + 1 < weights.size() && (sum += weights[i]) <= goal) {
        ++i;
    }
    return kept[i];
}

void top_tokens(std::span<const float> logits, std::span<delta_top_token> top) {
    std::vector<int32_t> ids(logits.size());
    std::iota(ids.begin(), ids.end(), 0);
    best_first(ids, top.size(), Better{logits.data()});
    const double best = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
    double sum = 0;
    for (const float logit : logits) {
        sum += std::exp(static_cast<double>(logit) - best);
    }
    const double log_sum = best + std::log(sum);
    for (size_t i = 0; i < top.size(); ++i) {
        const float logit = logits[static_cast<size_t>(ids[i])];
        top[i] = {ids[i], logit, static_cast<float>(static_cast<double>(logit) - log_sum)};
    }
}

}  // namespace delta
