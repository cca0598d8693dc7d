// Choosing a token from a row of logits. Everything is a function of its arguments; nothing is remembered between calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "include/deltallama.h"

namespace delta {

// Throws Error(ARG) naming the parameter and its value.
void check_sampling(const delta_sampling_params& params, int32_t n_vocab);

// The definition, in this order. x is the row of logits, all in float64 from the temperature on.
//   mask         x[t] = -inf where bit t of the mask is 0
//   logit bias   x[t] += bias; -inf forbids the token
//   penalties    for each token t that occurs c > 0 times among the last penalty_last_n tokens of the timeline:
//                x[t] = x[t] > 0 ? x[t] / repetition : x[t] * repetition;  x[t] -= presence + c * frequency
//   temperature  0: the largest x, ties to the lower id, and nothing below happens. Otherwise w[t] = exp((x[t] - max x) / temperature)
//   top-k        keeps the k largest x, ties to the lower id
//   top-p        of the kept, best first, keeps the shortest head whose weight is at least top_p of the kept weight
//   min-p        of the kept, keeps those with w[t] >= min_p * max w
//   draw         u = uniform(seed, length of the timeline) in [0, 1); the first kept token in order of id at which the running sum of
//                w exceeds u * (sum of the kept w)
// `params` must have passed check_sampling. Throws Error(ARG) if bias and mask forbid every token. `scratch` only saves allocations.
int32_t sample_token(std::span<const float> logits, std::span<const int32_t> timeline, const delta_sampling_params& params,
                     std::vector<float>& scratch);

// A number in [0, 1) that depends on nothing but its arguments (53 bits).
double uniform(uint64_t seed, uint64_t counter);

// The n best tokens, best first, ties by lower id; n is at most the number of logits. Log-probabilities are over the raw logits.
void top_tokens(std::span<const float> logits, std::span<delta_top_token> top);

}  // namespace delta
