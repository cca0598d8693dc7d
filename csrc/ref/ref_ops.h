// The definition of every op. Used by the ref backend only; ops.h has the formulas.
#pragma once

#include "backend/host.h"

namespace delta {

using RefOp = void (*)(HostBackend& self, const OpCall& call);

RefOp ref_op(OpKind kind);

}  // namespace delta
