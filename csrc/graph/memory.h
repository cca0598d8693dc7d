// Turns the lifetimes of values into offsets in one arena.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "graph/graph.h"

namespace delta {

struct ArenaPlan {
    std::vector<size_t> offset;  // bytes, per value id
    size_t bytes = 0;            // size of the arena
};

// `n_rows` rows for values of tokens or patches, `n_results` for those of outputs or squares, of numbers of the given type. Two values
// share bytes only if no group of ops needs both; outputs never overlap inputs.
ArenaPlan plan_arena(const Graph& graph, ValueType type, int32_t n_rows, int32_t n_results);

}  // namespace delta
