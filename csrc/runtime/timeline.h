// What a timeline holds: tokens, and in place of some of them rows of features, such as those of an image.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "include/deltallama.h"

namespace delta {

// Positions begin .. end - 1 are rows `index` and following of the features whose content has this digest.
struct FeatureRun {
    size_t begin;
    size_t end;
    uint64_t digest;
    uint64_t index;
    const float* rows = nullptr;  // the first of them, where they are to be computed; a timeline does not keep them

    uint64_t index_at(size_t position) const { return index + (position - begin); }
};

// `tokens` is DELTA_FEATURE at every position of a run and nowhere else; runs are in order and do not overlap.
struct TimelineView {
    std::span<const int32_t> tokens;
    std::span<const FeatureRun> runs{};
};

// Leading positions with equal tokens, and equal digest and index where there are features.
size_t common_prefix(const TimelineView& a, const TimelineView& b);
// Whether any of positions begin .. end - 1 is a feature.
bool has_features(std::span<const FeatureRun> runs, size_t begin, size_t end);
// Removes what lies at `length` and beyond.
void cut_runs(std::vector<FeatureRun>& runs, size_t length);
// Appends what `from` has at positions begin .. end - 1, without the rows; does not fail if one place for each run is reserved.
void append_runs(std::vector<FeatureRun>& runs, std::span<const FeatureRun> from, size_t begin, size_t end);
// The row of a feature position.
const float* feature_row(std::span<const FeatureRun> runs, size_t position, size_t n_embd);

}  // namespace delta
