#include "backend/host.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <vector>

#include "backend/traffic.h"
#include "base/mmap.h"

namespace delta {
namespace {

struct HostBuffer final : Buffer {
    CommittedMemory memory;
    HostBuffer(size_t n, const char* what) : memory(n, what) {
        data = memory.data();
        bytes = n;
    }
};

void fill_nan(void* data, size_t n, ValueType type) {
    if (type == ValueType::F64) {
        std::fill_n(static_cast<double*>(data), n, std::numeric_limits<double>::quiet_NaN());
    } else {
        std::fill_n(static_cast<float*>(data), n, std::numeric_limits<float>::quiet_NaN());
    }
}

// The output of an op as its observer gets it.
std::vector<double> widened(const void* data, size_t n, ValueType type) {
    if (type == ValueType::F64) {
        return {static_cast<const double*>(data), static_cast<const double*>(data) + n};
    }
    return {static_cast<const float*>(data), static_cast<const float*>(data) + n};
}

// What ops that ran at once have cost: each has a share of the time in proportion to the bytes that it moved.
void add_costs(const std::vector<OpCall>& calls, OpCost* costs, std::chrono::steady_clock::duration elapsed, ValueType type) {
    std::vector<OpCost> each;
    double all = 0;
    for (const OpCall& call : calls) {
        each.push_back({.n_runs = 1, .n_rows = static_cast<uint64_t>(call.n_rows), .ns = 0,
                        .weight_bytes = weight_bytes_read(call, type), .state_bytes = state_bytes_moved(call)});
        all += static_cast<double>(each.back().weight_bytes + each.back().state_bytes);
    }
    const auto ns = static_cast<double>(elapsed / std::chrono::nanoseconds(1));
    for (size_t i = 0; i < each.size(); ++i) {
        const double share = calls.size() == 1 ? 1 : static_cast<double>(each[i].weight_bytes + each[i].state_bytes) / all;
        costs[i].n_runs += each[i].n_runs;
        costs[i].n_rows += each[i].n_rows;
        costs[i].ns += static_cast<uint64_t>(ns * share);
        costs[i].weight_bytes += each[i].weight_bytes;
        costs[i].state_bytes += each[i].state_bytes;
    }
}

size_t aligned(size_t bytes) {
    constexpr size_t kAlign = 64;  // as Workspace gives it
    return (bytes + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

void HostBackend::describe(delta_device_info& info) const {
    const HostMemory memory = host_memory();
    info.bytes_free = memory.bytes_free;
    info.bytes_total = memory.bytes_total;
}

std::unique_ptr<Buffer> HostBackend::allocate(size_t bytes, const char* what) { return std::make_unique<HostBuffer>(bytes, what); }

void HostBackend::copy(uint8_t* dst, const uint8_t* src, size_t bytes) { std::memcpy(dst, src, bytes); }

void HostBackend::zero(uint8_t* dst, size_t bytes) { std::memset(dst, 0, bytes); }

size_t HostBackend::bind_weight(Weight& weight) {
    weight.device = weight.data;
    return 0;
}

size_t HostBackend::plan_workspace(const Graph& graph, int32_t n_rows, int32_t n_results) const {
    size_t most = 0;
    size_t of_group = 0;
    for (size_t i = 0; i < graph.ops.size(); ++i) {
        const Op& op = graph.ops[i];
        const bool results = op.out.id >= 0 && (op.out.rows == RowKind::Outputs || op.out.rows == RowKind::Squares);
        const int32_t n = results ? n_results : n_rows;
        of_group = aligned(workspace_bytes(op, std::min(n, kMostRowsAtOnce))) + (i > 0 && graph.ops[i - 1].group == op.group ? of_group : 0);
        most = std::max({most, of_group, workspace_bytes(op, n)});
    }
    return most;
}

void HostBackend::run(const Graph& graph, const ArenaPlan& plan, const Step& step, uint8_t* arena, uint8_t* workspace,
                      const RunOptions& options) {
    const ValueType type = value_type();
    const auto at = [&](const Value& v) -> void* { return v.id < 0 ? nullptr : arena + plan.offset[static_cast<size_t>(v.id)]; };
    const auto call_of = [&](const Op& op) {
        OpCall call;
        call.op = &op;
        call.step = &step;
        call.n_rows = step.n_rows(op.out.id >= 0 ? op.out.rows : op.in[0].rows);
        for (size_t i = 0; i < kMaxInputs; ++i) {
            call.in[i] = at(op.in[i]);
        }
        call.out = at(op.out);
        call.workspace = workspace;
        return call;
    };
    const auto n_out = [](const OpCall& call) { return static_cast<size_t>(call.n_rows) * static_cast<size_t>(call.op->out.cols); };
    if (options.poison) {
        fill_nan(arena, plan.bytes / value_bytes(type), type);
    }
    group_.clear();
    for (size_t index = 0; index < graph.ops.size(); ++index) {
        if (options.proceed != nullptr && !(*options.proceed)(index)) {
            return;
        }
        const Op& op = graph.ops[index];
        const OpCall call = call_of(op);
        if (index == 0 || graph.ops[index - 1].group != op.group) {
            begin_group();
        }
        if (options.poison && op.out.id >= 0 && !is_in_place(op.kind)) {
            fill_nan(call.out, n_out(call), type);
        }
        // With an observer one op is run after the other, so that it meets them in order.
        const bool alone = options.observer != nullptr || call.n_rows > kMostRowsAtOnce;
        if (call.n_rows > 0) {
            group_.push_back(call);
        }
        if (!group_.empty() && (alone || index + 1 == graph.ops.size() || graph.ops[index + 1].group != op.group)) {
            uint8_t* free = workspace;
            for (size_t i = 1; i < group_.size(); ++i) {
                free += aligned(workspace_bytes(*group_[i - 1].op, group_[i - 1].n_rows));
                group_[i].workspace = free;
            }
            const auto start = std::chrono::steady_clock::now();
            group_.size() == 1 ? run_op(group_[0]) : run_group(group_);
            if (options.costs != nullptr) {
                add_costs(group_, &(*options.costs)[index + 1 - group_.size()], std::chrono::steady_clock::now() - start, type);
            }
            group_.clear();
        }
        if (options.observer != nullptr) {
            const std::vector<double> out = call.out == nullptr ? std::vector<double>{} : widened(call.out, n_out(call), type);
            (*options.observer)(op, call.out == nullptr ? nullptr : out.data(), call.n_rows, op.out.cols);
        }
    }
}

}  // namespace delta
