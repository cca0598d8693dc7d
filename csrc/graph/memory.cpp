#include "graph/memory.h"

#include <algorithm>
#include <numeric>

namespace delta {
namespace {

constexpr size_t kAlign = 64;

struct Life {
    int32_t first = INT32_MAX;
    int32_t last = -1;
    size_t bytes = 0;
};

}  // namespace

ArenaPlan plan_arena(const Graph& graph, ValueType type, int32_t n_rows, int32_t n_results) {
    std::vector<Life> life(graph.values.size());
    // Time is counted in groups, whose ops may run at once.
    const auto touch = [&](const Value& v, int32_t group) {
        if (v.id >= 0) {
            Life& l = life[static_cast<size_t>(v.id)];
            l.first = std::min(l.first, group);
            l.last = std::max(l.last, group);
        }
    };
    for (const Op& op : graph.ops) {
        for (const Value& v : op.in) {
            touch(v, op.group);
        }
        touch(op.out, op.group);
    }
    touch(graph.result, INT32_MAX);  // read after the run

    for (const Value& v : graph.values) {
        const bool result_rows = v.rows == RowKind::Outputs || v.rows == RowKind::Squares;
        const auto rows = static_cast<size_t>(result_rows ? n_results : n_rows);
        life[static_cast<size_t>(v.id)].bytes = (rows * static_cast<size_t>(v.cols) * value_bytes(type) + kAlign - 1) / kAlign * kAlign;
    }

    // Largest first, each at the lowest offset that is free during its whole life: few values are wide, and the narrow ones fit
    // into the gaps those leave.
    std::vector<size_t> order(life.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return life[a].bytes > life[b].bytes; });

    ArenaPlan plan;
    plan.offset.assign(life.size(), 0);
    std::vector<size_t> placed;
    for (const size_t v : order) {
        if (life[v].last < 0) {
            continue;
        }
        std::vector<std::pair<size_t, size_t>> taken;  // offset, end
        for (const size_t other : placed) {
            if (life[other].first <= life[v].last && life[v].first <= life[other].last) {
                taken.emplace_back(plan.offset[other], plan.offset[other] + life[other].bytes);
            }
        }
        std::sort(taken.begin(), taken.end());
        size_t offset = 0;
        for (const auto& [begin, end] : taken) {
            if (offset + life[v].bytes <= begin) {
                break;
            }
            offset = std::max(offset, end);
        }
        plan.offset[v] = offset;
        plan.bytes = std::max(plan.bytes, offset + life[v].bytes);
        placed.push_back(v);
    }
    return plan;
}

}  // namespace delta
