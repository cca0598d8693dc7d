#include "runtime/timeline.h"

#include <algorithm>

namespace delta {

size_t common_prefix(const TimelineView& a, const TimelineView& b) {
    const auto n = static_cast<size_t>(std::mismatch(a.tokens.begin(), a.tokens.end(), b.tokens.begin(), b.tokens.end()).first - a.tokens.begin());
    // Up to there features stand at the same positions, though they need not be divided into runs alike.
    auto x = a.runs.begin();
    auto y = b.runs.begin();
    while (x != a.runs.end() && y != b.runs.end()) {
        const size_t position = std::max(x->begin, y->begin);
        if (position >= n) {
            break;
        }
        if (x->digest != y->digest || x->index_at(position) != y->index_at(position)) {
            return position;
        }
        const size_t end = std::min(x->end, y->end);
        x += x->end == end ? 1 : 0;
        y += y->end == end ? 1 : 0;
    }
    return n;
}

bool has_features(std::span<const FeatureRun> runs, size_t begin, size_t end) {
    return std::any_of(runs.begin(), runs.end(), [&](const FeatureRun& run) { return run.begin < end && begin < run.end; });
}

void cut_runs(std::vector<FeatureRun>& runs, size_t length) {
    while (!runs.empty() && runs.back().begin >= length) {
        runs.pop_back();
    }
    if (!runs.empty()) {
        runs.back().end = std::min(runs.back().end, length);
    }
}

void append_runs(std::vector<FeatureRun>& runs, std::span<const FeatureRun> from, size_t begin, size_t end) {
    for (const FeatureRun& run : from) {
        const size_t first = std::max(run.begin, begin);
        const size_t last = std::min(run.end, end);
        if (first >= last) {
            continue;
        }
        const uint64_t index = run.index_at(first);
        if (!runs.empty() && runs.back().end == first && runs.back().digest == run.digest && runs.back().index_at(first) == index) {
            runs.back().end = last;  // an image that was divided among steps
        } else {
            runs.push_back({first, last, run.digest, index});
        }
    }
}

const float* feature_row(std::span<const FeatureRun> runs, size_t position, size_t n_embd) {
    const auto run = std::upper_bound(runs.begin(), runs.end(), position, [](size_t at, const FeatureRun& r) { return at < r.end; });
    return run->rows + (position - run->begin) * n_embd;
}

}  // namespace delta
