// One function per op of graph/ops.def, and the scratch of those that need some. Formulas and shapes: graph/ops.h.
#pragma once

#include "cpu/cpu_backend.h"

namespace delta {

void cpu_embed(HostBackend& self, const OpCall& call);
void cpu_rms_norm(HostBackend& self, const OpCall& call);
void cpu_add(HostBackend& self, const OpCall& call);
void cpu_glu(HostBackend& self, const OpCall& call);
void cpu_mul_sigmoid(HostBackend& self, const OpCall& call);
void cpu_gated_norm(HostBackend& self, const OpCall& call);
void cpu_bank_push(HostBackend& self, const OpCall& call);
void cpu_bank_mix(HostBackend& self, const OpCall& call);
size_t cpu_bank_mix_workspace(const CpuBackend& self, const Op& op);
void cpu_pick_rows(HostBackend& self, const OpCall& call);

void cpu_linear(HostBackend& self, const OpCall& call);  // head_linear too
size_t cpu_linear_workspace(const CpuBackend& self, const Op& op, int32_t n_rows);

void cpu_moe_route(HostBackend& self, const OpCall& call);
size_t cpu_moe_route_workspace(const CpuBackend& self, const Op& op);
void cpu_moe_experts(HostBackend& self, const OpCall& call);
size_t cpu_moe_experts_workspace(const CpuBackend& self, const Op& op, int32_t n_rows);

void cpu_short_conv(HostBackend& self, const OpCall& call);
size_t cpu_short_conv_workspace(const CpuBackend& self, const Op& op);
void cpu_kda_gate(HostBackend& self, const OpCall& call);
void cpu_kda_scan(HostBackend& self, const OpCall& call);
size_t cpu_kda_scan_workspace(const CpuBackend& self, const Op& op);

void cpu_latent_append(HostBackend& self, const OpCall& call);
size_t cpu_latent_append_workspace(const CpuBackend& self, const Op& op);
void cpu_mla_attention(HostBackend& self, const OpCall& call);
size_t cpu_mla_attention_workspace(const CpuBackend& self, const Op& op);

}  // namespace delta
