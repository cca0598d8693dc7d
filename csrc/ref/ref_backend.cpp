// The reference device: one thread, scalar code, float64 inside every op. It defines what the other devices must compute.
#include "ref/ref_ops.h"

#include <cstdio>

#include "backend/host.h"

namespace delta {
namespace {

class RefBackend final : public HostBackend {
   public:
    RefBackend() {
        kind_ = "ref";
        for (size_t i = 0; i < table_.size(); ++i) {
            table_[i] = ref_op(static_cast<OpKind>(i));
        }
    }

    void describe(delta_device_info& info) const override {
        HostBackend::describe(info);
        std::snprintf(info.kind, sizeof info.kind, "ref");
        std::snprintf(info.name, sizeof info.name, "scalar reference, float64 inside every op");
        std::snprintf(info.isa, sizeof info.isa, "scalar");
    }

    int32_t n_threads() const override { return 1; }
};

}  // namespace

std::unique_ptr<Backend> make_ref_backend(const BackendOptions&) { return std::make_unique<RefBackend>(); }

}  // namespace delta
