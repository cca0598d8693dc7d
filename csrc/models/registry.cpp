#include "models/registry.h"

#include "base/error.h"
#include "models/models.h"

namespace delta {
namespace {

struct Architecture {
    const char* name;
    void (*build)(Builder&);
};

constexpr Architecture kArchitectures[] = {
    {"kimi-linear", build_kimi_linear},
    {"kimi-k3", build_kimi_k3},
};

// Parameters and bytes in all, and what one token reads: k of E experts, and not the embedding table, of which it reads one row.
void count_parameters(const GgufSet& file, BoundModel& m) {
    double params = 0;
    double bytes = 0;
    for (const GgufTensor& t : file.tensors()) {
        const auto n = static_cast<double>(t.mats) * static_cast<double>(t.rows) * static_cast<double>(t.cols);
        m.n_params += static_cast<uint64_t>(n);
        m.weight_bytes += t.n_bytes;
        if (t.name == "token_embd.weight") {
            continue;
        }
        const bool routed = t.name.find("_exps.") != std::string_view::npos;
        const double share = routed ? static_cast<double>(m.hparams.n_expert_used) / m.hparams.n_expert : 1.0;
        params += n * share;
        bytes += static_cast<double>(t.n_bytes) * share;
    }
    m.n_params_active = static_cast<uint64_t>(params);
    m.weight_bytes_active = static_cast<uint64_t>(bytes);
}

}  // namespace

BoundModel build_model(const GgufSet& file) {
    const std::string name(file.string("general.architecture"));
    if (name == "clip") {
        throw Error(DELTA_UNSUPPORTED, format("%s is a vision tower, no text model: it is opened beside one (mmproj)", file.path().c_str()));
    }
    std::string known;
    for (const Architecture& a : kArchitectures) {
        if (name == a.name) {
            BoundModel m;
            m.hparams = read_hparams(file, name);
            Builder b{m.hparams, Binder(file, name, m), Recorder(m.graph)};
            a.build(b);
            b.bind.check_closure();
            m.state.n_kda = b.n_kda;
            m.state.n_mla = b.n_mla;
            m.state.conv_rows = m.hparams.d_conv - 1;
            m.state.n_head = m.hparams.n_head;
            m.state.head_dim = m.hparams.kda_head_dim;
            m.state.latent_width = m.hparams.kv_lora + m.hparams.rope;
            count_parameters(file, m);
            return m;
        }
        known += (known.empty() ? "" : ", ") + std::string(a.name);
    }
    throw Error(DELTA_UNSUPPORTED, format("%s: architecture '%s' is not supported; supported: %s", file.path().c_str(), name.c_str(), known.c_str()));
}

}  // namespace delta
