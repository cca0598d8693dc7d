#include "cpu/cpu_backend.h"

#include <algorithm>
#include <cstdio>

#include "base/error.h"
#include "cpu/ops.h"
#include "ref/ref_ops.h"

namespace delta {
namespace {

CpuKernels choose_kernels() {
    CpuKernels kernels;
    kernels_init_generic(kernels);
    switch (choose_isa()) {
#if defined(__x86_64__)
        case Isa::Avx2: kernels_init_avx2(kernels); break;
        case Isa::Avx512: kernels_init_avx512(kernels); break;
#elif defined(__aarch64__)
        case Isa::Neon: kernels_init_neon(kernels); break;
        case Isa::NeonDot: kernels_init_neon_dot(kernels); break;
        case Isa::NeonI8mm: kernels_init_neon_i8mm(kernels); break;
#endif
        default: break;
    }
    return kernels;
}

ThreadOptions pool_options(const BackendOptions& options) {
    ThreadPool::check_size(options.n_threads);
    ThreadPool::check_size(options.n_threads_batch);
    const int32_t n = options.n_threads == 0 ? physical_cores() : options.n_threads;
    return {std::max(n, options.n_threads_batch), options.pin_threads, options.interleave_memory};
}

}  // namespace

CpuType cpu_type(const TypeInfo& type) {
    switch (type.id) {
        case 0: return kF32;
        case 1: return kF16;
        case 2: return kQ4_0;
        case 3: return kQ4_1;
        case 6: return kQ5_0;
        case 7: return kQ5_1;
        case 8: return kQ8_0;
        case 10: return kQ2_K;
        case 11: return kQ3_K;
        case 12: return kQ4_K;
        case 13: return kQ5_K;
        case 14: return kQ6_K;
        case 20: return kIQ4_NL;
        case 23: return kIQ4_XS;
        case 30: return kBF16;
        case 39: return kMXFP4;
        default: return kCpuTypes;
    }
}

CpuBackend::CpuBackend(const BackendOptions& options)
    : pool(pool_options(options)), kernels(choose_kernels()), activations(options.activations),
      n_threads_(options.n_threads == 0 ? physical_cores() : options.n_threads),
      n_threads_batch_(options.n_threads_batch == 0 ? n_threads_ : options.n_threads_batch) {}

void CpuBackend::run_op(const OpCall& call) {
    pool.use(call.step->is_batch() ? n_threads_batch_ : n_threads_);
    if (exact()) {
        run_exactly(call);
        return;
    }
    const FloatCall c(call);
    switch (call.op->kind) {
        case OpKind::Embed: return cpu_embed(*this, c);
        case OpKind::RmsNorm: return cpu_rms_norm(*this, c);
        case OpKind::Add: return cpu_add(*this, c);
        case OpKind::ShortConv: rounded.clear(); [[fallthrough]];  // alone it has the scratch in which those rows are
        case OpKind::Linear:
        case OpKind::HeadLinear: return run_group({&call, 1});
        case OpKind::Glu: return cpu_glu(*this, c);
        case OpKind::KdaGate: return cpu_kda_gate(*this, c);
        case OpKind::KdaScan: return cpu_kda_scan(*this, c);
        case OpKind::GatedNorm: return cpu_gated_norm(*this, c);
        case OpKind::LatentAppend: return cpu_latent_append(*this, c);
        case OpKind::MlaAttention: return cpu_mla_attention(*this, c);
        case OpKind::MulSigmoid: return cpu_mul_sigmoid(*this, c);
        case OpKind::MoeRoute: return cpu_moe_route(*this, c);
        case OpKind::MoeExperts: return cpu_moe_experts(*this, c);
        case OpKind::BankPush: return cpu_bank_push(*this, c);
        case OpKind::BankMix: return cpu_bank_mix(*this, c);
        case OpKind::PickRows: return cpu_pick_rows(*this, c);
        case OpKind::Pixels: return cpu_pixels(*this, c);
        case OpKind::GridPosition: return cpu_grid_position(*this, c);
        case OpKind::GridRope: return cpu_grid_rope(*this, c);
        case OpKind::ImageAttention: return cpu_image_attention(*this, c);
        case OpKind::Gelu: return cpu_gelu(*this, c);
        case OpKind::MergeSquares: return cpu_merge_squares(*this, c);
        case OpKind::Count: return;
    }
}

void CpuBackend::run_group(std::span<const OpCall> calls) {
    pool.use(calls[0].step->is_batch() ? n_threads_batch_ : n_threads_);
    if (exact()) {
        HostBackend::run_group(calls);
        return;
    }
    // One section for all of them: to begin and to end one takes as long as reading some ten kilobytes.
    parts_.clear();
    int64_t n = 0;
    int64_t cost = 0;
    for (const OpCall& call : calls) {
        const FloatCall c(call);
        parts_.push_back(call.op->kind == OpKind::ShortConv ? cpu_short_conv_items(*this, c) : cpu_linear_items(*this, c));
        n += parts_.back().n;
        cost += parts_.back().n * parts_.back().cost;
    }
    parallel(n, cost / std::max<int64_t>(n, 1), [&](int64_t begin, int64_t end, int32_t thread) {
        int64_t first = 0;  // of the part
        for (auto part = parts_.begin(); begin < end; first += part->n, ++part) {
            if (begin < first + part->n) {
                const int64_t stop = std::min(end, first + part->n);
                part->run(begin - first, stop - first, thread);
                begin = stop;
            }
        }
    });
}

void CpuBackend::run_exactly(const OpCall& call) {
    const Op& op = *call.op;
    const RefOp& definition = ref_op(op.kind);
    const WideCall c(call);
    const int64_t n_items = definition.n_items(c);
    const size_t scratch_bytes = ref_scratch_bytes(op);
    // About an exponential for every value read.
    const int64_t cost = int64_t{16} * c.n_rows * std::max(op.in[0].cols, op.out.cols) / std::max<int64_t>(n_items, 1);
    parallel(n_items, cost, [&](int64_t begin, int64_t end, int32_t thread) {
        definition.run(c, kernels.wide_dot, begin, end, static_cast<uint8_t*>(call.workspace) + static_cast<size_t>(thread) * scratch_bytes);
    });
}

void CpuBackend::describe(delta_device_info& info) const {
    HostBackend::describe(info);
    std::snprintf(info.kind, sizeof info.kind, "cpu");
    std::snprintf(info.name, sizeof info.name, "%s, %s kernels of %d lanes", processor_name().c_str(), kernels.isa, kernels.width);
    std::snprintf(info.isa, sizeof info.isa, "%s", kernels.isa);
}

CpuInput CpuBackend::input_kind(const Weight& w) const {
    const CpuType type = cpu_type(*w.type);
    if (type == kCpuTypes || type < kFloatTypes) {
        return kInputF32;
    }
    const bool is_k = type >= kQ2_K && type <= kQ6_K;
    return activations == DELTA_FAST || (activations == DELTA_AUTO && is_k) ? kInputI8 : kInputI16;
}

void CpuBackend::check_op(const Op& op) const {
    if (exact() || op.kind == OpKind::Linear || op.kind == OpKind::HeadLinear || op.kind == OpKind::MoeExperts || op.kind == OpKind::Embed) {
        return;  // any type is decoded
    }
    // Vectors are read as they are.
    for (const Weight* w : op.w) {
        if (w != nullptr && cpu_type(*w->type) != kF32) {
            throw Error(DELTA_UNSUPPORTED, format("op %s (%s, layer %d) on device cpu: no kernel for %s of type %s", op_name(op.kind),
                                                  op.name.c_str(), op.layer, w->name.c_str(), w->type->name));
        }
    }
}

size_t CpuBackend::workspace_bytes(const Op& op, int32_t n_batch) const {
    if (exact()) {
        return ref_scratch_bytes(op) * static_cast<size_t>(n_threads());
    }
    switch (op.kind) {
        case OpKind::Linear:
        case OpKind::HeadLinear: return cpu_linear_workspace(*this, op, n_batch);
        case OpKind::MoeRoute: return cpu_moe_route_workspace(*this, op);
        case OpKind::MoeExperts: return cpu_moe_experts_workspace(*this, op, n_batch);
        case OpKind::ShortConv: return cpu_short_conv_workspace(*this, op);
        case OpKind::KdaScan: return cpu_kda_scan_workspace(*this, op);
        case OpKind::LatentAppend: return cpu_latent_append_workspace(*this, op);
        case OpKind::MlaAttention: return cpu_mla_attention_workspace(*this, op, n_batch);
        case OpKind::BankMix: return cpu_bank_mix_workspace(*this, op);
        case OpKind::GridRope: return cpu_grid_rope_workspace(op, n_batch);
        case OpKind::ImageAttention: return cpu_image_attention_workspace(*this, op, n_batch);
        default: return 0;
    }
}

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options) { return std::make_unique<CpuBackend>(options); }

}  // namespace delta
