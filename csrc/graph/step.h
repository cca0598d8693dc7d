// What changes from one run of the graph to the next. There is no padding: every row is a real token.
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

struct Step {
    std::span<const int32_t> tokens;       // [n_tokens]
    std::span<const SeqRows> seqs;         // cover all rows, in order, each slot at most once
    std::span<const int32_t> output_rows;  // [n_outputs] indices into tokens, ascending
    StateMemory state;

    int32_t n_rows(RowKind kind) const {
        return static_cast<int32_t>(kind == RowKind::Tokens ? tokens.size() : output_rows.size());
    }
};

}  // namespace delta
