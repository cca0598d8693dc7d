// One function per op of graph/ops.def, and the scratch of those that need some. Formulas and shapes: graph/ops.h.
#pragma once

#include "cpu/cpu_backend.h"

namespace delta {

void cpu_embed(CpuBackend& self, const FloatCall& call);
void cpu_rms_norm(CpuBackend& self, const FloatCall& call);
void cpu_add(CpuBackend& self, const FloatCall& call);
void cpu_glu(CpuBackend& self, const FloatCall& call);
void cpu_mul_sigmoid(CpuBackend& self, const FloatCall& call);
void cpu_gated_norm(CpuBackend& self, const FloatCall& call);
void cpu_bank_push(CpuBackend& self, const FloatCall& call);
void cpu_bank_mix(CpuBackend& self, const FloatCall& call);
size_t cpu_bank_mix_workspace(const CpuBackend& self, const Op& op);
void cpu_pick_rows(CpuBackend& self, const FloatCall& call);

// Ops of groups are given as items. Products round their input, if need be, before that.
Items cpu_linear_items(CpuBackend& self, const FloatCall& call);  // head_linear too
size_t cpu_linear_workspace(const CpuBackend& self, const Op& op, int32_t n_rows);

void cpu_moe_route(CpuBackend& self, const FloatCall& call);
size_t cpu_moe_route_workspace(const CpuBackend& self, const Op& op);
void cpu_moe_experts(CpuBackend& self, const FloatCall& call);
size_t cpu_moe_experts_workspace(const CpuBackend& self, const Op& op, int32_t n_rows);

Items cpu_short_conv_items(CpuBackend& self, const FloatCall& call);
size_t cpu_short_conv_workspace(const CpuBackend& self, const Op& op);
void cpu_kda_gate(CpuBackend& self, const FloatCall& call);
void cpu_kda_scan(CpuBackend& self, const FloatCall& call);
size_t cpu_kda_scan_workspace(const CpuBackend& self, const Op& op);

void cpu_latent_append(CpuBackend& self, const FloatCall& call);
size_t cpu_latent_append_workspace(const CpuBackend& self, const Op& op);
void cpu_mla_attention(CpuBackend& self, const FloatCall& call);
size_t cpu_mla_attention_workspace(const CpuBackend& self, const Op& op, int32_t n_rows);

void cpu_pixels(CpuBackend& self, const FloatCall& call);
void cpu_grid_position(CpuBackend& self, const FloatCall& call);
void cpu_grid_rope(CpuBackend& self, const FloatCall& call);
size_t cpu_grid_rope_workspace(const Op& op, int32_t n_rows);
void cpu_image_attention(CpuBackend& self, const FloatCall& call);
size_t cpu_image_attention_workspace(const CpuBackend& self, const Op& op, int32_t n_rows);
void cpu_gelu(CpuBackend& self, const FloatCall& call);
void cpu_merge_squares(CpuBackend& self, const FloatCall& call);

}  // namespace delta
