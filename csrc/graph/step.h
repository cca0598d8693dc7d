// What changes from one run of the graph to the next. There is no padding: every row is a real token or patch.
#pragma once

#include <cstdint>
#include <span>

#include "graph/value.h"

namespace delta {

// Rows first_row .. first_row + n_rows - 1 are consecutive tokens of one sequence, whose state is in `slot`; the first of them
// has position `position` (= tokens already in the state).
struct SeqRows {
    int32_t slot;
    int32_t first_row;
    int32_t n_rows;
    int32_t position;
};

// An image, or several frames of one size: its patches, row by row, frame after frame.
struct ImageGrid {
    int32_t frames = 0;
    int32_t height = 0;  // in patches
    int32_t width = 0;

    int32_t n_patches() const { return frames * height * width; }
};

// A token that stands for row `row` of Step::features; its own inverse.
constexpr int32_t feature_token(int32_t row) { return -1 - row; }
constexpr bool is_feature(int32_t token) { return token < 0; }

struct Step {
    std::span<const int32_t> tokens;       // [n_tokens]
    std::span<const SeqRows> seqs;         // cover all rows, in order, each slot at most once
    std::span<const int32_t> output_rows;  // [n_outputs] indices into tokens, ascending
    StateMemory state;
    std::span<const float* const> features{};  // rows that stand in place of embeddings, each as wide as those

    // Of a vision tower; the rest is empty then.
    const float* pixels = nullptr;           // [n_patches, values of a patch]
    ImageGrid image{};
    int32_t square = 1;                      // side of the squares of patches that become one row

    int32_t n_rows(RowKind kind) const {
        switch (kind) {
            case RowKind::Tokens: return static_cast<int32_t>(tokens.size());
            case RowKind::Outputs: return static_cast<int32_t>(output_rows.size());
            case RowKind::Patches: return image.n_patches();
            case RowKind::Squares: return (image.height / square) * (image.width / square);
        }
        return 0;
    }
    // Many rows per sequence, rather than the next token of each.
    bool is_batch() const { return tokens.size() > seqs.size() || pixels != nullptr; }
};

}  // namespace delta
