#include "cpu/cpu_backend.h"

#include <cstdio>

#include "base/error.h"
#include "cpu/ops.h"

namespace delta {
namespace {

CpuKernels choose_kernels() {
    CpuKernels kernels;
    kernels_init_generic(kernels);
    switch (choose_isa()) {
        case Isa::Generic:
            break;
        case Isa::Avx2:
#if defined(__x86_64__)
            kernels_init_avx2(kernels);
#endif
            break;
    }
    return kernels;
}

}  // namespace

CpuType cpu_type(const TypeInfo& type) {
    switch (type.id) {
        case 0: return kF32;
        case 1: return kF16;
        case 8: return kQ8_0;
        case 30: return kBF16;
        case 39: return kMXFP4;
        default: return kCpuTypes;
    }
}

CpuBackend::CpuBackend(const BackendOptions& options)
    : pool(options.n_threads), kernels(choose_kernels()), activations(options.activations) {
    kind_ = "cpu";
    const auto at = [this](OpKind kind) -> OpFn& { return table_[static_cast<size_t>(kind)]; };
    at(OpKind::Embed) = cpu_embed;
    at(OpKind::RmsNorm) = cpu_rms_norm;
    at(OpKind::Add) = cpu_add;
    at(OpKind::Linear) = cpu_linear;
    at(OpKind::HeadLinear) = cpu_linear;
    at(OpKind::Glu) = cpu_glu;
    at(OpKind::ShortConv) = cpu_short_conv;
    at(OpKind::KdaGate) = cpu_kda_gate;
    at(OpKind::KdaScan) = cpu_kda_scan;
    at(OpKind::GatedNorm) = cpu_gated_norm;
    at(OpKind::LatentAppend) = cpu_latent_append;
    at(OpKind::MlaAttention) = cpu_mla_attention;
    at(OpKind::MulSigmoid) = cpu_mul_sigmoid;
    at(OpKind::MoeRoute) = cpu_moe_route;
    at(OpKind::MoeExperts) = cpu_moe_experts;
    at(OpKind::BankPush) = cpu_bank_push;
    at(OpKind::BankMix) = cpu_bank_mix;
    at(OpKind::PickRows) = cpu_pick_rows;
}

void CpuBackend::describe(delta_device_info& info) const {
    HostBackend::describe(info);
    std::snprintf(info.kind, sizeof info.kind, "cpu");
    std::snprintf(info.name, sizeof info.name, "%s, %s kernels of %d lanes", processor_name().c_str(), kernels.isa, kernels.width);
    std::snprintf(info.isa, sizeof info.isa, "%s", kernels.isa);
}

CpuInput CpuBackend::input_kind(const Weight& w) const {
    const CpuType type = cpu_type(*w.type);
    if (activations == DELTA_EXACT) {
        return kInputExact;
    }
    const CpuInput wish = activations == DELTA_FINE ? kInputI16 : kInputI8;
    return type != kCpuTypes && kernels.dot[wish][type] != nullptr ? wish : kInputF32;
}

void CpuBackend::check_op(const Op& op) const {
    HostBackend::check_op(op);
    // Matrices may be anything there is a kernel for; vectors are read as they are.
    const bool product = op.kind == OpKind::Linear || op.kind == OpKind::HeadLinear || op.kind == OpKind::MoeExperts;
    for (const Weight* w : op.w) {
        if (w == nullptr) {
            continue;
        }
        const CpuType type = cpu_type(*w->type);
        const bool ok = product || op.kind == OpKind::Embed ? type != kCpuTypes : type == kF32;
        if (!ok) {
            throw Error(DELTA_UNSUPPORTED, format("op %s (%s, layer %d) on device cpu: no kernel for %s of type %s", op_name(op.kind),
                                                  op.name.c_str(), op.layer, w->name.c_str(), w->type->name));
        }
    }
}

size_t CpuBackend::workspace_bytes(const Op& op, int32_t n_batch) const {
    switch (op.kind) {
        case OpKind::Linear:
        case OpKind::HeadLinear: return cpu_linear_workspace(*this, op, n_batch);
        case OpKind::MoeRoute: return cpu_moe_route_workspace(*this, op);
        case OpKind::MoeExperts: return cpu_moe_experts_workspace(*this, op, n_batch);
        case OpKind::ShortConv: return cpu_short_conv_workspace(*this, op);
        case OpKind::KdaScan: return cpu_kda_scan_workspace(*this, op);
        case OpKind::LatentAppend: return cpu_latent_append_workspace(*this, op);
        case OpKind::MlaAttention: return cpu_mla_attention_workspace(*this, op);
        case OpKind::BankMix: return cpu_bank_mix_workspace(*this, op);
        default: return 0;
    }
}

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options) { return std::make_unique<CpuBackend>(options); }

}  // namespace delta
