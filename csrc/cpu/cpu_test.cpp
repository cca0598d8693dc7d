// delta_test_kernel: the kernels of one table, one by one. Arrays are dense unless a comment says otherwise.
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "api/handles.h"
#include "base/cpu.h"
#include "cpu/cpu_backend.h"
#include "include/deltallama_test.h"

namespace delta {
namespace {

// A new entry of the table needs a case below, a name in delta_test_kernels and a test.
static_assert(sizeof(CpuKernels) == sizeof(void*) * (3 + 2 * int{kCpuTypes} + 2 * kFloatTypes + int{kCpuInputs} + 19));

CpuKernels table(const std::string& isa) {
    CpuKernels k;
    if (isa == "generic") {
        kernels_init_generic(k);
    } else if (isa == "width8") {
        kernels_init_width8(k);
    } else if (isa == "width16") {
        kernels_init_width16(k);
#if defined(__x86_64__)
    } else if (isa == "avx2" && cpu_features().avx2) {
        kernels_init_avx2(k);
    } else if (isa == "avx512" && cpu_features().avx512) {
        kernels_init_avx512(k);
#elif defined(__aarch64__)
    } else if (isa == "neon" && cpu_features().neon) {
        kernels_init_neon(k);
    } else if (isa == "neon_dot" && cpu_features().neon_dot) {
        kernels_init_neon_dot(k);
    } else if (isa == "neon_i8mm" && cpu_features().neon_i8mm) {
        kernels_init_neon_i8mm(k);
#endif
    } else {
        throw Error(DELTA_UNSUPPORTED, "no kernels for " + isa);
    }
    return k;
}

template <class T>
T* present(T* entry, const delta_test_kernel_call& c) {
    if (entry == nullptr) {
        throw Error(DELTA_UNSUPPORTED, format("%s has no %s for type %u, input %u", c.isa, c.kernel, c.type, c.input));
    }
    return entry;
}

CpuType type_of(const delta_test_kernel_call& c) {
    const TypeInfo* type = find_type(c.type);
    const CpuType found = type != nullptr ? cpu_type(*type) : kCpuTypes;
    if (found == kCpuTypes || c.input >= kCpuInputs) {
        throw Error(DELTA_ARG, format("type %u, input %u", c.type, c.input));
    }
    return found;
}

// inputs: q, k, g [n, stride], v [n, n_v], beta [n]; outputs: o [n, n_v], state [n_v, d]; sizes: tokens, d, n_v.
// kda_prepare: outputs: q, k, decay [n, d], kq [n].
void call_kda(const CpuKernels& k, const std::string& name, const delta_test_kernel_call& c) {
    const auto n = static_cast<int32_t>(c.sizes[0]);
    const auto d = static_cast<int32_t>(c.sizes[1]);
    const auto n_v = static_cast<int32_t>(c.sizes[2]);
    const int32_t pad = pad_to_lanes(d);
    const auto size = static_cast<size_t>(n) * static_cast<size_t>(pad);
    std::vector<float> q(size), key(size), decay(size), kq(static_cast<size_t>(n));
    const KdaRows rows{q.data(), key.data(), decay.data(), kq.data()};
    k.kda_prepare(static_cast<const float*>(c.inputs[0]), static_cast<const float*>(c.inputs[1]), static_cast<const float*>(c.inputs[2]), d, n, d,
                  rows);
    if (name == "kda_prepare") {
        for (int i = 0; i < 3; ++i) {
            const float* from = i == 0 ? rows.q : i == 1 ? rows.k : rows.decay;
            for (int32_t t = 0; t < n; ++t) {
                std::memcpy(static_cast<float*>(c.outputs[i]) + int64_t{t} * d, from + int64_t{t} * pad, static_cast<size_t>(d) * sizeof(float));
            }
        }
        std::memcpy(c.outputs[3], rows.kq, kq.size() * sizeof(float));
        return;
    }
    KdaCall call;
    call.state = static_cast<float*>(c.outputs[1]);
    call.v = static_cast<const float*>(c.inputs[3]);
    call.o = static_cast<float*>(c.outputs[0]);
    call.beta = static_cast<const float*>(c.inputs[4]);
    call.v_stride = n_v;
    call.n = n;
    call.n_v = n_v;
    call.d = d;
    call.pad = pad;
    call.rows = rows;
    k.kda_scan(call);
}

// inputs: keys [n_keys, pad] of the type, queries [n_queries, pad]; outputs: y [n_queries, pad], best [n_queries], sum [n_queries], read and written;
// sizes: n_keys, n_queries, latent, pad; params: scale.
void call_attend(const CpuKernels& k, const delta_test_kernel_call& c) {
    std::vector<float> scores(static_cast<size_t>(c.sizes[1]) * kKeyBlock, __builtin_nanf(""));
    AttendCall call;
    call.keys = static_cast<const uint8_t*>(c.inputs[0]);
    call.key_stride = row_bytes(*find_type(c.type), c.sizes[3]);
    call.queries = static_cast<const float*>(c.inputs[1]);
    call.y = static_cast<float*>(c.outputs[0]);
    call.best = static_cast<float*>(c.outputs[1]);
    call.sum = static_cast<float*>(c.outputs[2]);
    call.scores = scores.data();
    call.n_keys = static_cast<int32_t>(c.sizes[0]);
    call.n_queries = static_cast<int32_t>(c.sizes[1]);
    call.latent = static_cast<int32_t>(c.sizes[2]);
    call.pad = static_cast<int32_t>(c.sizes[3]);
    call.scale = c.params[0];
    present(type_of(c) < kFloatTypes ? k.attend[type_of(c)] : nullptr, c)(call);
}

// inputs: y [latent], best [1], sum [1] of the part; outputs: the same, of what it is merged into; sizes: latent.
void call_attend_merge(const CpuKernels& k, const delta_test_kernel_call& c) {
    std::vector<float> y(static_cast<const float*>(c.inputs[0]), static_cast<const float*>(c.inputs[0]) + c.sizes[0]);
    float best = *static_cast<const float*>(c.inputs[1]);
    float sum = *static_cast<const float*>(c.inputs[2]);
    const AttendPart into{static_cast<float*>(c.outputs[0]), static_cast<float*>(c.outputs[1]), static_cast<float*>(c.outputs[2])};
    k.attend_merge({y.data(), &best, &sum}, static_cast<int32_t>(c.sizes[0]), into);
}

// inputs: keys [d, kKeyBlock], values [n_keys, pad], queries [n_queries, d]; outputs: y [n_queries, pad], best [n_queries], sum [n_queries],
// read and written; sizes: n_keys, n_queries, d; params: scale.
void call_image_attend(const CpuKernels& k, const delta_test_kernel_call& c) {
    std::vector<float> scores(static_cast<size_t>(c.sizes[1]) * kKeyBlock, __builtin_nanf(""));
    ImageAttendCall call;
    call.keys = static_cast<const float*>(c.inputs[0]);
    call.values = static_cast<const float*>(c.inputs[1]);
    call.queries = static_cast<const float*>(c.inputs[2]);
    call.y = static_cast<float*>(c.outputs[0]);
    call.best = static_cast<float*>(c.outputs[1]);
    call.sum = static_cast<float*>(c.outputs[2]);
    call.scores = scores.data();
    call.n_keys = static_cast<int32_t>(c.sizes[0]);
    call.n_queries = static_cast<int32_t>(c.sizes[1]);
    call.d = static_cast<int32_t>(c.sizes[2]);
    call.pad = pad_to_lanes(call.d);
    call.scale = c.params[0];
    k.image_attend(call);
}

// inputs: w [n_w, w_stride bytes], x [n_x, x_stride bytes]; outputs: [n_x, n_w]; sizes: n_w, n_x, columns, w_stride, x_stride.
void call_dot(const CpuKernels& k, const delta_test_kernel_call& c) {
    std::vector<const void*> x(static_cast<size_t>(c.sizes[1]));
    std::vector<float*> out(x.size());
    for (size_t j = 0; j < x.size(); ++j) {
        x[j] = static_cast<const uint8_t*>(c.inputs[1]) + static_cast<size_t>(c.sizes[4]) * j;
        out[j] = static_cast<float*>(c.outputs[0]) + static_cast<size_t>(c.sizes[0]) * j;
    }
    present((c.input == kInputI8 ? k.dot_i8 : k.dot)[type_of(c)], c)(static_cast<const uint8_t*>(c.inputs[0]), static_cast<size_t>(c.sizes[3]), static_cast<int32_t>(c.sizes[0]),
                                           x.data(), static_cast<int32_t>(c.sizes[1]), c.sizes[2], out.data());
}

// The rest: inputs and outputs as in CpuKernels, sizes[0] values; rows of several inputs (weighted_sum, conv) are dense, sizes[1] of them.
void call_row(const CpuKernels& k, const std::string& name, const delta_test_kernel_call& c) {
    const auto* a = static_cast<const float*>(c.inputs[0]);
    const auto* b = static_cast<const float*>(c.inputs[1]);
    const auto* w = static_cast<const float*>(c.inputs[2]);
    auto* y = static_cast<float*>(c.outputs[0]);
    const int64_t n = c.sizes[0];
    std::vector<const float*> rows;
    for (int64_t i = 0; i < c.sizes[1]; ++i) {
        rows.push_back(a + i * n);
    }
    if (name == "wide_dot") {
        *static_cast<double*>(c.outputs[0]) = k.wide_dot(static_cast<const double*>(c.inputs[0]), static_cast<const double*>(c.inputs[1]), n);
    } else if (name == "widen") {
        present(type_of(c) < kFloatTypes ? k.widen[type_of(c)] : nullptr, c)(static_cast<const uint8_t*>(c.inputs[0]), y, n);
    } else if (name == "widen_q8_0") {
        k.widen_q8_0(static_cast<const uint8_t*>(c.inputs[0]), y, n);
    } else if (name == "quantize") {
        present(c.input < kCpuInputs ? k.quantize[c.input] : nullptr, c)(
            a, n, rounded_row(c.outputs[0], n));
    } else if (name == "add") {
        k.add(a, b, n, y);
    } else if (name == "mul_sigmoid") {
        k.mul_sigmoid(a, b, n, y);
    } else if (name == "sigmoid") {
        k.sigmoid(a, n, y);
    } else if (name == "silu_mul") {
        k.silu_mul(a, b, n, y);
    } else if (name == "situ_mul") {
        k.situ_mul(a, b, n, c.params[0], c.params[1], y);
    } else if (name == "gelu_tanh") {
        k.gelu_tanh(a, n, y);
    } else if (name == "rms_norm") {
        k.rms_norm(a, b, n, c.params[0], y);
    } else if (name == "gated_norm") {
        k.gated_norm(a, b, w, n, c.params[0], y);
    } else if (name == "rms_dot") {
        *static_cast<double*>(c.outputs[0]) = k.rms_dot(a, b, n, c.params[0]);
    } else if (name == "weighted_sum") {
        k.weighted_sum(rows.data(), b, static_cast<int32_t>(c.sizes[1]), n, y);
    } else if (name == "conv") {
        k.conv(rows.data(), b, n, static_cast<int32_t>(c.sizes[1]), n, y);
    } else if (name == "gate_softplus") {
        k.gate_softplus(a, b, c.params[0], n, y);
    } else if (name == "gate_bounded") {
        k.gate_bounded(a, b, c.params[0], c.params[1], n, y);
    } else {
        throw Error(DELTA_ARG, "unknown kernel " + name);
    }
}

}  // namespace
}  // namespace delta

extern "C" const char* delta_test_isas(void) {
    static const std::string names = [] {
        const delta::CpuFeatures& has = delta::cpu_features();
        std::string all = "generic width8 width16";
        for (const auto& [present, name] : {std::pair(has.avx2, " avx2"), std::pair(has.avx512, " avx512"), std::pair(has.neon, " neon"),
                                            std::pair(has.neon_dot, " neon_dot"), std::pair(has.neon_i8mm, " neon_i8mm")}) {
            all += present ? name : "";
        }
        return all;
    }();
    return names.c_str();
}

extern "C" const char* delta_test_kernels(void) {
    return "dot wide_dot widen widen_q8_0 quantize add mul_sigmoid sigmoid silu_mul situ_mul rms_norm gated_norm rms_dot weighted_sum conv gate_softplus "
           "gate_bounded kda_prepare kda_scan attend attend_merge image_attend gelu_tanh";
}

extern "C" delta_status delta_test_kernel(const delta_test_kernel_call* call) {
    return delta::guard([&] {
        if (call->size != sizeof(delta_test_kernel_call)) {
            throw delta::Error(DELTA_ABI, "size of delta_test_kernel_call");
        }
        const std::string name = call->kernel;
        const delta::CpuKernels k = delta::table(call->isa);
        if (name == "dot") {
            delta::call_dot(k, *call);
        } else if (name == "attend") {
            delta::call_attend(k, *call);
        } else if (name == "attend_merge") {
            delta::call_attend_merge(k, *call);
        } else if (name == "image_attend") {
            delta::call_image_attend(k, *call);
        } else if (name.rfind("kda_", 0) == 0) {
            delta::call_kda(k, name, *call);
        } else {
            delta::call_row(k, name, *call);
        }
    });
}
