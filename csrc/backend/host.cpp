#include "backend/host.h"

#include <cstring>
#include <limits>

#include "base/error.h"
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

void fill_nan(float* data, size_t n) { std::fill_n(data, n, std::numeric_limits<float>::quiet_NaN()); }

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

void HostBackend::check_op(const Op& op) const {
    if (table_[static_cast<size_t>(op.kind)] == nullptr) {
        throw Error(DELTA_UNSUPPORTED, format("op %s (%s, layer %d) is lacking on device %s", op_name(op.kind), op.name.c_str(),
                                              op.layer, kind_));
    }
}

void HostBackend::run(const Graph& graph, const ArenaPlan& plan, const Step& step, uint8_t* arena, uint8_t* workspace,
                      const RunOptions& options) {
    const auto at = [&](const Value& v) {
        return v.id < 0 ? nullptr : reinterpret_cast<float*>(arena + plan.offset[static_cast<size_t>(v.id)]);
    };
    if (options.poison) {
        fill_nan(reinterpret_cast<float*>(arena), plan.bytes / sizeof(float));
    }
    for (const Op& op : graph.ops) {
        OpCall call;
        call.op = &op;
        call.step = &step;
        const RowKind rows = op.out.id >= 0 ? op.out.rows : op.in[0].rows;
        call.n_rows = step.n_rows(rows);
        for (size_t i = 0; i < kMaxInputs; ++i) {
            call.in[i] = at(op.in[i]);
        }
        call.out = at(op.out);
        call.workspace = workspace;
        if (options.poison && op.out.id >= 0 && op.kind != OpKind::BankPush) {
            fill_nan(call.out, static_cast<size_t>(call.n_rows) * static_cast<size_t>(op.out.cols));
        }
        if (call.n_rows > 0) {
            table_[static_cast<size_t>(op.kind)](*this, call);
        }
        if (options.observer != nullptr) {
            (*options.observer)(op, call.out, call.n_rows, op.out.cols);
        }
    }
}

}  // namespace delta
