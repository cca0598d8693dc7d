// What backends in host memory share: allocation and the loop over the ops. A subclass runs single ops.
#pragma once

#include <span>
#include <vector>

#include "backend/backend.h"

namespace delta {

// One op at run time. Matrices are row-major, of the device's value type; `n_rows` is the number of rows of the inputs and the output
// (for pick_rows: of the output).
struct OpCall {
    const Op* op;
    const Step* step;
    int32_t n_rows;
    const void* in[kMaxInputs];
    void* out;          // bank_push: the bank
    void* workspace;    // workspace_bytes() of this backend's plan
};

// The same with the value type known.
template <class T>
struct TypedCall {
    const Op* op;
    const Step* step;
    int32_t n_rows;
    const T* in[kMaxInputs];
    T* out;
    void* workspace;

    explicit TypedCall(const OpCall& c) : op(c.op), step(c.step), n_rows(c.n_rows), out(static_cast<T*>(c.out)), workspace(c.workspace) {
        for (int i = 0; i < kMaxInputs; ++i) {
            in[i] = static_cast<const T*>(c.in[i]);
        }
    }
};
using FloatCall = TypedCall<float>;
using WideCall = TypedCall<double>;

// Takes arrays from a workspace, or, made without one, adds up what would be taken: an op describes its scratch once, for the plan
// and for the run.
class Workspace {
   public:
    explicit Workspace(void* data = nullptr) : data_(static_cast<uint8_t*>(data)) {}

    template <class T>
    T* take(size_t n) {
        constexpr size_t kAlign = 64;
        T* array = data_ == nullptr ? nullptr : reinterpret_cast<T*>(data_ + used_);
        used_ += (n * sizeof(T) + kAlign - 1) / kAlign * kAlign;
        return array;
    }
    size_t used() const { return used_; }

   private:
    uint8_t* data_;
    size_t used_ = 0;
};

// Ops of a group run at once in steps of up to this many rows: with more, one of them is work enough for all threads.
inline constexpr int32_t kMostRowsAtOnce = 8;

class HostBackend : public Backend {
   public:
    void describe(delta_device_info& info) const override;  // the memory; subclasses add their names
    std::unique_ptr<Buffer> allocate(size_t bytes, const char* what) override;
    void copy(uint8_t* dst, const uint8_t* src, size_t bytes) override;
    void zero(uint8_t* dst, size_t bytes) override;
    size_t bind_weight(Weight& weight) override;
    void check_op(const Op&) const override {}
    size_t workspace_bytes(const Op&, int32_t) const override { return 0; }
    size_t plan_workspace(const Graph& graph, int32_t n_rows, int32_t n_results) const final;
    void run(const Graph& graph, const ArenaPlan& plan, const Step& step, uint8_t* arena, uint8_t* workspace,
             const RunOptions& options) final;

   protected:
    virtual void run_op(const OpCall& call) = 0;  // at least one row
    virtual void begin_group() {}                // what comes belongs to another group than what was
    // The calls of a group, at most kMostRowsAtOnce rows each, in any order or at once. Each has a workspace of its own.
    virtual void run_group(std::span<const OpCall> calls) {
        for (const OpCall& call : calls) {
            run_op(call);
        }
    }

   private:
    std::vector<OpCall> group_;  // the calls that wait for the end of their group; kept, so that a step allocates nothing
};

}  // namespace delta
