// The CPU device: kernels of the best instruction set of this processor on a thread pool.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "backend/host.h"
#include "base/cpu.h"
#include "base/threads.h"
#include "cpu/kernels.h"

namespace delta {

// The work of one op, cut into items that threads may do in any order. Nothing is allocated: a token makes hundreds of these.
class Items {
   public:
    // `run(begin, end, thread)` does items begin .. end - 1 of 0 .. n - 1; `cost` is that of one, as CpuBackend::parallel has it.
    template <class Run>
    Items(int64_t n_items, int64_t item_cost, const Run& run) : n(n_items), cost(item_cost), call_([](const void* data, int64_t begin, int64_t end, int32_t thread) {
        (*static_cast<const Run*>(data))(begin, end, thread);
    }) {
        static_assert(sizeof(Run) <= sizeof data_ && alignof(Run) <= alignof(std::max_align_t) && std::is_trivially_copyable_v<Run>);
        std::memcpy(data_, &run, sizeof run);
    }
    void run(int64_t begin, int64_t end, int32_t thread) const { call_(data_, begin, end, thread); }

    int64_t n;
    int64_t cost;

   private:
    void (*call_)(const void* data, int64_t begin, int64_t end, int32_t thread);
    alignas(std::max_align_t) std::byte data_[192];
};

class CpuBackend final : public HostBackend {
   public:
    explicit CpuBackend(const BackendOptions& options);

    void describe(delta_device_info& info) const override;
    int32_t n_threads() const override { return pool.n_threads(); }  // the larger of the two numbers below
    ValueType value_type() const override { return exact() ? ValueType::F64 : ValueType::F32; }
    void check_op(const Op& op) const override;
    size_t workspace_bytes(const Op& op, int32_t n_batch) const override;

    // Whether ops follow their definition in float64, only with several threads and faster sums.
    bool exact() const { return activations == DELTA_EXACT; }
    // How the input of a product with `w` is given to the kernels: rounded only if the weights are integers and the activation
    // policy allows it.
    CpuInput input_kind(const Weight& w) const;

    // Calls f(begin, end, thread) until all of 0 .. n - 1 are done. `cost` is the work of one item, in multiplications or the like:
    // below some thousands in all, waking a thread takes longer than doing it.
    template <class F>
    void parallel(int64_t n, int64_t cost, F&& f) {
        constexpr int64_t kWorthAThread = 16384;
        const int64_t share = n / (int64_t{16} * pool.n_used());
        pool.parallel_for(n, std::max<int64_t>({1, share, kWorthAThread / std::max<int64_t>(cost, 1)}), f);
    }

    // Rows that a product of the present group has rounded, and where they are: several products often have the same input.
    struct Rounded {
        const float* x;
        int64_t n_rows;
        int64_t stride;
        int64_t n;
        CpuInput kind;
        const uint8_t* data;
    };

    ThreadPool pool;
    CpuKernels kernels;
    delta_activations activations;
    std::vector<Rounded> rounded;

   protected:
    void run_op(const OpCall& call) override;
    void begin_group() override { rounded.clear(); }
    void run_group(std::span<const OpCall> calls) override;

   private:
    void run_exactly(const OpCall& call);

    int32_t n_threads_;
    int32_t n_threads_batch_;
    std::vector<Items> parts_;  // of the present group
};

// The kernels' number of a tensor type; kCpuTypes if there are none for it: then rows are decoded and multiplied as float32.
CpuType cpu_type(const TypeInfo& type);

}  // namespace delta
