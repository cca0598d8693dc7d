// What backends in host memory share: allocation and the loop over the ops. A subclass fills the table of functions.
#pragma once

#include <array>

#include "backend/backend.h"

namespace delta {

class HostBackend : public Backend {
   public:
    void describe(delta_device_info& info) const override;  // the memory; subclasses add their names
    std::unique_ptr<Buffer> allocate(size_t bytes, const char* what) override;
    void copy(uint8_t* dst, const uint8_t* src, size_t bytes) override;
    void zero(uint8_t* dst, size_t bytes) override;
    size_t bind_weight(Weight& weight) override;
    void check_op(const Op& op) const override;
    size_t workspace_bytes(const Op&, int32_t) const override { return 0; }
    void run(const Graph& graph, const ArenaPlan& plan, const Step& step, uint8_t* arena, uint8_t* workspace,
             const RunOptions& options) override;

   protected:
    using OpFn = void (*)(HostBackend& self, const OpCall& call);
    std::array<OpFn, static_cast<size_t>(OpKind::Count)> table_{};  // null: the op is lacking
    const char* kind_ = "";
};

}  // namespace delta
