// What the products of a model are fed with: the sum of squares of every input column, per tensor of the file and per matrix of it.
// Quantizers weigh the error of a column by it (an "importance matrix").
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "gguf/gguf.h"

namespace delta {

// Of one tensor. A row counts for every matrix it was multiplied with: an expert counts the rows routed to it.
struct InputStats {
    std::string name;
    int64_t mats = 0;
    int64_t cols = 0;
    std::vector<double> sum_squares;  // [mats, cols]
    std::vector<uint64_t> n_rows;     // [mats]

    void add(int64_t mat, const double* row);
};

// Watches the ops of one model. Every value that a product reads is the output of an earlier op, except the hidden rows of experts,
// which never leave their op: those are computed once more.
class InputCollector {
   public:
    // Takes memory for the second computation. `graph`, `backend` and `file` outlive the collector.
    InputCollector(const Graph& graph, Backend& backend, const GgufSet& file, int32_t n_batch);
    ~InputCollector();

    const Observer& observer() const { return observer_; }
    const std::vector<InputStats>& stats() const { return stats_; }

   private:
    // A product reads columns stride * m .. of a value for matrix m of a tensor, and adds them to stats_[index].
    struct Use {
        size_t index;
        int32_t stride;
    };
    struct Experts {
        static constexpr size_t kNone = SIZE_MAX;
        size_t gate = kNone, up = kNone, down = kNone;  // in stats_
    };
    class HiddenRows;

    size_t find_or_add(const Weight& weight, const GgufSet& file);
    void observe(const Op& op, const double* data, int32_t rows, int32_t cols);
    void add_experts(const Op& op, const Experts& experts, int32_t n_rows);

    std::vector<InputStats> stats_;
    std::vector<std::vector<Use>> uses_;         // by id of the value that is read
    std::vector<std::vector<double>> kept_;      // by id: values that experts will read
    std::vector<char> is_kept_;                  // by id
    std::map<const Op*, Experts> experts_;
    std::unique_ptr<HiddenRows> hidden_rows_;
    Observer observer_;
};

}  // namespace delta
