// The reference device: one thread, scalar code, float64 throughout. It defines what the other devices must compute.
#include <cstdio>

#include "ref/ref_ops.h"

namespace delta {
namespace {

class RefBackend final : public HostBackend {
   public:
    void describe(delta_device_info& info) const override {
        HostBackend::describe(info);
        std::snprintf(info.kind, sizeof info.kind, "ref");
        std::snprintf(info.name, sizeof info.name, "scalar reference in float64");
        std::snprintf(info.isa, sizeof info.isa, "scalar");
    }

    int32_t n_threads() const override { return 1; }
    ValueType value_type() const override { return ValueType::F64; }
    size_t workspace_bytes(const Op& op, int32_t) const override { return ref_scratch_bytes(op); }

   protected:
    void run_op(const OpCall& call) override {
        const RefOp& op = ref_op(call.op->kind);
        const WideCall wide(call);
        op.run(wide, ref_dot, 0, op.n_items(wide), call.workspace);
    }
};

}  // namespace

std::unique_ptr<Backend> make_ref_backend(const BackendOptions&) { return std::make_unique<RefBackend>(); }

}  // namespace delta
