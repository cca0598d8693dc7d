#include "ref/ref_ops.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace delta {
namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

double softplus(double x) { return x > 30.0 ? x + std::exp(-x) : std::log1p(std::exp(x)); }

double glu_value(double g, double u, const Activation& a) {
    if (a.kind == Activation::Silu) {
        return g * sigmoid(g) * u;
    }
    const double up = a.linear_beta > 0 ? a.linear_beta * std::tanh(u / a.linear_beta) : u;
    return a.beta * std::tanh(g / a.beta) * sigmoid(g) * up;
}

// 1 / sqrt(mean(x^2) + eps)
double inverse_rms(const float* x, int64_t n, double eps) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
        sum += double{x[i]} * x[i];
    }
    return 1.0 / std::sqrt(sum / static_cast<double>(n) + eps);
}

// One row of a weight as float32, the exact decoded values.
void decode_row(const Weight& w, int64_t mat, int64_t row, std::vector<float>& out) {
    out.resize(static_cast<size_t>(w.cols));
    w.type->to_float(w.row(mat, row), out.data(), w.cols);
}

std::vector<float> decode_vector(const Weight& w) {
    std::vector<float> out;
    decode_row(w, 0, 0, out);
    return out;
}

double dot(const float* a, const float* b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
        sum += double{a[i]} * b[i];
    }
    return sum;
}

void embed(HostBackend&, const OpCall& c) {
    const Weight& w = *c.op->w[0];
    std::vector<float> row;
    for (int32_t r = 0; r < c.n_rows; ++r) {
        decode_row(w, 0, c.step->tokens[static_cast<size_t>(r)], row);
        std::copy(row.begin(), row.end(), c.out + int64_t{r} * w.cols);
    }
}

void rms_norm(HostBackend&, const OpCall& c) {
    const int64_t n = c.op->out.cols;
    const std::vector<float> w = decode_vector(*c.op->w[0]);
    for (int32_t r = 0; r < c.n_rows; ++r) {
        const float* x = c.in[0] + r * n;
        const double scale = inverse_rms(x, n, c.op->get<NormParams>().eps);
        for (int64_t i = 0; i < n; ++i) {
            c.out[r * n + i] = static_cast<float>(x[i] * scale * w[static_cast<size_t>(i)]);
        }
    }
}

void add(HostBackend&, const OpCall& c) {
    const int64_t n = int64_t{c.n_rows} * c.op->out.cols;
    for (int64_t i = 0; i < n; ++i) {
        c.out[i] = c.in[0][i] + c.in[1][i];
    }
}

void linear(HostBackend&, const OpCall& c) {
    const Weight& w = *c.op->w[0];
    std::vector<float> row;
    for (int64_t o = 0; o < w.rows; ++o) {
        decode_row(w, 0, o, row);
        for (int32_t r = 0; r < c.n_rows; ++r) {
            c.out[r * w.rows + o] = static_cast<float>(dot(c.in[0] + r * w.cols, row.data(), w.cols));
        }
    }
}

void head_linear(HostBackend&, const OpCall& c) {
    const Weight& w = *c.op->w[0];
    const int64_t stride = c.op->get<HeadLinearParams>().stride;
    std::vector<float> row;
    for (int64_t h = 0; h < w.mats; ++h) {
        for (int64_t o = 0; o < w.rows; ++o) {
            decode_row(w, h, o, row);
            for (int32_t r = 0; r < c.n_rows; ++r) {
                const float* x = c.in[0] + (r * w.mats + h) * stride;
                c.out[(r * w.mats + h) * w.rows + o] = static_cast<float>(dot(x, row.data(), w.cols));
            }
        }
    }
}

void glu(HostBackend&, const OpCall& c) {
    const int64_t n = int64_t{c.n_rows} * c.op->out.cols;
    for (int64_t i = 0; i < n; ++i) {
        c.out[i] = static_cast<float>(glu_value(c.in[0][i], c.in[1][i], c.op->get<Activation>()));
    }
}

void short_conv(HostBackend&, const OpCall& c) {
    const Weight& w = *c.op->w[0];
    const int64_t channels = w.rows;
    const int64_t taps = w.cols;
    const ConvParams& p = c.op->get<ConvParams>();
    std::vector<std::vector<float>> kernel(static_cast<size_t>(channels));
    for (int64_t ch = 0; ch < channels; ++ch) {
        decode_row(w, 0, ch, kernel[static_cast<size_t>(ch)]);
    }
    for (const SeqRows& seq : c.step->seqs) {
        float* state = c.step->state.conv(seq.slot, p.kda, p.stream);  // [taps - 1, channels]
        const float* x = c.in[0] + int64_t{seq.first_row} * channels;
        // Row t of the sequence; negative rows are in the state.
        const auto input = [&](int64_t t, int64_t ch) {
            return t >= 0 ? x[t * channels + ch] : state[(taps - 1 + t) * channels + ch];
        };
        for (int64_t t = 0; t < seq.n_rows; ++t) {
            for (int64_t ch = 0; ch < channels; ++ch) {
                double sum = 0;
                for (int64_t j = 0; j < taps; ++j) {
                    sum += double{kernel[static_cast<size_t>(ch)][static_cast<size_t>(j)]} * input(t - (taps - 1) + j, ch);
                }
                c.out[(seq.first_row + t) * channels + ch] = static_cast<float>(sum * sigmoid(sum));
            }
        }
        // Oldest row first, so that a row moves only to where nothing is still to be read from.
        for (int64_t j = 0; j < taps - 1; ++j) {
            for (int64_t ch = 0; ch < channels; ++ch) {
                state[j * channels + ch] = input(seq.n_rows - (taps - 1) + j, ch);
            }
        }
    }
}

void kda_gate(HostBackend&, const OpCall& c) {
    const GateParams& p = c.op->get<GateParams>();
    const int64_t n = c.op->out.cols;
    const std::vector<float> a = decode_vector(*c.op->w[0]);
    const std::vector<float> dt = decode_vector(*c.op->w[1]);
    const int64_t head_dim = n / static_cast<int64_t>(a.size());
    for (int32_t r = 0; r < c.n_rows; ++r) {
        for (int64_t i = 0; i < n; ++i) {
            const double ah = a[static_cast<size_t>(i / head_dim)];
            const double z = double{c.in[0][r * n + i]} + dt[static_cast<size_t>(i)];
            c.out[r * n + i] = static_cast<float>(p.bounded ? p.lower_bound * sigmoid(-ah * z) : ah * softplus(z));
        }
    }
}

void kda_scan(HostBackend&, const OpCall& c) {
    const StateLayout& layout = *c.step->state.layout;
    const int64_t d = layout.head_dim;
    const int64_t inner = layout.inner();
    std::vector<double> q(static_cast<size_t>(d));
    std::vector<double> k(static_cast<size_t>(d));
    std::vector<double> decay(static_cast<size_t>(d));
    std::vector<double> state(static_cast<size_t>(d * d));
    for (const SeqRows& seq : c.step->seqs) {
        float* s_all = c.step->state.scan(seq.slot, c.op->get<ScanParams>().kda);
        for (int64_t h = 0; h < layout.n_head; ++h) {
            float* s = s_all + h * d * d;  // [v][k]
            std::copy(s, s + d * d, state.begin());
            for (int64_t t = seq.first_row; t < seq.first_row + seq.n_rows; ++t) {
                const int64_t at = t * inner + h * d;
                const double beta = sigmoid(c.in[4][t * layout.n_head + h]);
                const double q_scale = 1.0 / std::sqrt(dot(c.in[0] + at, c.in[0] + at, d) + double{kL2NormEps}) / std::sqrt(static_cast<double>(d));
                const double k_scale = 1.0 / std::sqrt(dot(c.in[1] + at, c.in[1] + at, d) + double{kL2NormEps});
                for (int64_t i = 0; i < d; ++i) {
                    q[static_cast<size_t>(i)] = c.in[0][at + i] * q_scale;
                    k[static_cast<size_t>(i)] = c.in[1][at + i] * k_scale;
                    decay[static_cast<size_t>(i)] = std::exp(double{c.in[3][at + i]});
                }
                for (int64_t v = 0; v < d; ++v) {
                    double* row = state.data() + v * d;
                    double predicted = 0;
                    for (int64_t i = 0; i < d; ++i) {
                        row[i] *= decay[static_cast<size_t>(i)];
                        predicted += row[i] * k[static_cast<size_t>(i)];
                    }
                    const double u = beta * (c.in[2][at + v] - predicted);
                    double out = 0;
                    for (int64_t i = 0; i < d; ++i) {
                        row[i] += u * k[static_cast<size_t>(i)];
                        out += row[i] * q[static_cast<size_t>(i)];
                    }
                    c.out[at + v] = static_cast<float>(out);
                }
            }
            std::transform(state.begin(), state.end(), s, [](double x) { return static_cast<float>(x); });
        }
    }
}

void gated_norm(HostBackend&, const OpCall& c) {
    const std::vector<float> w = decode_vector(*c.op->w[0]);
    const auto d = static_cast<int64_t>(w.size());
    const int64_t n_groups = c.n_rows * (c.op->out.cols / d);
    for (int64_t g = 0; g < n_groups; ++g) {
        const float* o = c.in[0] + g * d;
        const double scale = inverse_rms(o, d, c.op->get<NormParams>().eps);
        for (int64_t i = 0; i < d; ++i) {
            c.out[g * d + i] = static_cast<float>(o[i] * scale * w[static_cast<size_t>(i)] * sigmoid(c.in[1][g * d + i]));
        }
    }
}

void latent_append(HostBackend&, const OpCall& c) {
    const NormParams& p = c.op->get<NormParams>();
    const StateLayout& layout = *c.step->state.layout;
    const std::vector<float> w = decode_vector(*c.op->w[0]);
    const auto latent = static_cast<int64_t>(w.size());
    const int64_t width = layout.latent_width;
    std::vector<float> row(static_cast<size_t>(width));
    for (const SeqRows& seq : c.step->seqs) {
        uint8_t* cache = c.step->state.latents(seq.slot, p.mla);
        for (int64_t t = 0; t < seq.n_rows; ++t) {
            const float* kv = c.in[0] + (seq.first_row + t) * width;
            const double scale = inverse_rms(kv, latent, p.eps);
            for (int64_t i = 0; i < width; ++i) {
                row[static_cast<size_t>(i)] = i < latent ? static_cast<float>(kv[i] * scale * w[static_cast<size_t>(i)]) : kv[i];
            }
            layout.cache_type->from_float(row.data(), cache + static_cast<size_t>(seq.position + t) * layout.latent_row_bytes(), width);
        }
    }
}

void mla_attention(HostBackend&, const OpCall& c) {
    const AttentionParams& p = c.op->get<AttentionParams>();
    const StateLayout& layout = *c.step->state.layout;
    const int64_t width = layout.latent_width;
    const int64_t q_stride = c.op->in[1].cols / p.n_head;
    for (const SeqRows& seq : c.step->seqs) {
        const int64_t n_keys = seq.position + seq.n_rows;
        std::vector<float> cache(static_cast<size_t>(n_keys * width));
        const uint8_t* rows = c.step->state.latents(seq.slot, p.mla);
        for (int64_t t = 0; t < n_keys; ++t) {
            layout.cache_type->to_float(rows + static_cast<size_t>(t) * layout.latent_row_bytes(), cache.data() + t * width, width);
        }
        std::vector<double> weight(static_cast<size_t>(n_keys));
        for (int64_t r = 0; r < seq.n_rows; ++r) {
            const int64_t row = seq.first_row + r;
            const int64_t visible = seq.position + r + 1;
            for (int64_t h = 0; h < p.n_head; ++h) {
                const float* a = c.in[0] + (row * p.n_head + h) * p.latent;
                const float* q_rest = c.in[1] + (row * p.n_head + h + 1) * q_stride - p.rope;
                double best = -INFINITY;
                for (int64_t t = 0; t < visible; ++t) {
                    const float* key = cache.data() + t * width;
                    const double s = (dot(a, key, p.latent) + dot(q_rest, key + p.latent, p.rope)) * p.scale;
                    weight[static_cast<size_t>(t)] = s;
                    // A comparison that lets NaN through: it must reach the logits, not vanish here.
                    best = s <= best ? best : s;
                }
                double sum = 0;
                for (int64_t t = 0; t < visible; ++t) {
                    weight[static_cast<size_t>(t)] = std::exp(weight[static_cast<size_t>(t)] - best);
                    sum += weight[static_cast<size_t>(t)];
                }
                for (int64_t i = 0; i < p.latent; ++i) {
                    double y = 0;
                    for (int64_t t = 0; t < visible; ++t) {
                        y += weight[static_cast<size_t>(t)] * cache[static_cast<size_t>(t * width + i)];
                    }
                    c.out[(row * p.n_head + h) * p.latent + i] = static_cast<float>(y / sum);
                }
            }
        }
    }
}

void mul_sigmoid(HostBackend&, const OpCall& c) {
    const int64_t n = int64_t{c.n_rows} * c.op->out.cols;
    for (int64_t i = 0; i < n; ++i) {
        c.out[i] = static_cast<float>(c.in[0][i] * sigmoid(c.in[1][i]));
    }
}

void moe_route(HostBackend&, const OpCall& c) {
    const RouteParams& p = c.op->get<RouteParams>();
    const int64_t n_expert = c.op->in[0].cols;
    const std::vector<float> bias =
        c.op->w[0] != nullptr ? decode_vector(*c.op->w[0]) : std::vector<float>(static_cast<size_t>(n_expert), 0.0F);
    std::vector<double> score(static_cast<size_t>(n_expert));
    std::vector<int32_t> order(static_cast<size_t>(n_expert));
    for (int32_t r = 0; r < c.n_rows; ++r) {
        for (int64_t e = 0; e < n_expert; ++e) {
            score[static_cast<size_t>(e)] = sigmoid(c.in[0][r * n_expert + e]);
        }
        std::iota(order.begin(), order.end(), 0);
        // A sort must not see NaN (every comparison would be false), and NaN must not vanish here: the whole row becomes NaN.
        bool bad = false;
        for (int64_t e = 0; e < n_expert; ++e) {
            bad = bad || std::isnan(score[static_cast<size_t>(e)] + bias[static_cast<size_t>(e)]);
        }
        const auto choice = [&](int32_t e) { return bad ? 0.0 : score[static_cast<size_t>(e)] + bias[static_cast<size_t>(e)]; };
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return choice(a) > choice(b); });
        double sum = 0;
        for (int32_t i = 0; i < p.n_used; ++i) {
            sum += score[static_cast<size_t>(order[static_cast<size_t>(i)])];
        }
        const double norm = p.normalise && p.n_used > 1 ? sum + 1e-20 : 1.0;
        float* out = c.out + int64_t{r} * 2 * p.n_used;
        for (int32_t i = 0; i < p.n_used; ++i) {
            const int32_t e = order[static_cast<size_t>(i)];
            out[i] = static_cast<float>(e);
            out[p.n_used + i] = bad ? NAN : static_cast<float>(score[static_cast<size_t>(e)] / norm * p.scale);
        }
    }
}

void moe_experts(HostBackend&, const OpCall& c) {
    const ExpertParams& p = c.op->get<ExpertParams>();
    const Weight& gate = *c.op->w[0];
    const Weight& up = *c.op->w[1];
    const Weight& down = *c.op->w[2];
    std::vector<float> row;
    std::vector<double> hidden(static_cast<size_t>(gate.rows));
    std::vector<double> sum(static_cast<size_t>(down.rows));
    for (int32_t r = 0; r < c.n_rows; ++r) {
        const float* z = c.in[0] + r * gate.cols;
        const float* route = c.in[1] + int64_t{r} * 2 * p.n_used;
        std::fill(sum.begin(), sum.end(), 0.0);
        for (int32_t i = 0; i < p.n_used; ++i) {
            const auto e = static_cast<int64_t>(route[i]);
            for (int64_t x = 0; x < gate.rows; ++x) {
                decode_row(gate, e, x, row);
                const double g = dot(z, row.data(), gate.cols);
                decode_row(up, e, x, row);
                hidden[static_cast<size_t>(x)] = glu_value(g, dot(z, row.data(), up.cols), p.activation);
            }
            for (int64_t o = 0; o < down.rows; ++o) {
                decode_row(down, e, o, row);
                double y = 0;
                for (int64_t x = 0; x < down.cols; ++x) {
                    y += hidden[static_cast<size_t>(x)] * row[static_cast<size_t>(x)];
                }
                sum[static_cast<size_t>(o)] += route[p.n_used + i] * y;
            }
        }
        std::transform(sum.begin(), sum.end(), c.out + r * down.rows, [](double y) { return static_cast<float>(y); });
    }
}

void bank_push(HostBackend&, const OpCall& c) {
    const int64_t n = c.op->in[0].cols;
    const int64_t width = c.op->out.cols;
    for (int32_t r = 0; r < c.n_rows; ++r) {
        std::copy_n(c.in[0] + r * n, n, c.out + r * width + c.op->get<BankParams>().slot * n);
    }
}

void bank_mix(HostBackend&, const OpCall& c) {
    const BankParams& p = c.op->get<BankParams>();
    const int64_t n = c.op->out.cols;
    const int64_t width = c.op->in[0].cols;
    const std::vector<float> w = decode_vector(*c.op->w[0]);
    std::vector<double> weight(static_cast<size_t>(p.n_slots) + 1);
    for (int32_t r = 0; r < c.n_rows; ++r) {
        const auto entry = [&](int32_t s) { return s < p.n_slots ? c.in[0] + r * width + s * n : c.in[1] + r * n; };
        double best = -INFINITY;
        for (int32_t s = 0; s <= p.n_slots; ++s) {
            const double score = dot(entry(s), w.data(), n) * inverse_rms(entry(s), n, p.eps);
            weight[static_cast<size_t>(s)] = score;
            best = score <= best ? best : score;
        }
        double sum = 0;
        for (double& x : weight) {
            x = std::exp(x - best);
            sum += x;
        }
        for (int64_t i = 0; i < n; ++i) {
            double y = 0;
            for (int32_t s = 0; s <= p.n_slots; ++s) {
                y += weight[static_cast<size_t>(s)] * entry(s)[i];
            }
            c.out[r * n + i] = static_cast<float>(y / sum);
        }
    }
}

void pick_rows(HostBackend&, const OpCall& c) {
    const int64_t n = c.op->out.cols;
    for (int32_t r = 0; r < c.n_rows; ++r) {
        std::copy_n(c.in[0] + c.step->output_rows[static_cast<size_t>(r)] * n, n, c.out + r * n);
    }
}

}  // namespace

RefOp ref_op(OpKind kind) {
    switch (kind) {
        case OpKind::Embed: return embed;
        case OpKind::RmsNorm: return rms_norm;
        case OpKind::Add: return add;
        case OpKind::Linear: return linear;
        case OpKind::HeadLinear: return head_linear;
        case OpKind::Glu: return glu;
        case OpKind::ShortConv: return short_conv;
        case OpKind::KdaGate: return kda_gate;
        case OpKind::KdaScan: return kda_scan;
        case OpKind::GatedNorm: return gated_norm;
        case OpKind::LatentAppend: return latent_append;
        case OpKind::MlaAttention: return mla_attention;
        case OpKind::MulSigmoid: return mul_sigmoid;
        case OpKind::MoeRoute: return moe_route;
        case OpKind::MoeExperts: return moe_experts;
        case OpKind::BankPush: return bank_push;
        case OpKind::BankMix: return bank_mix;
        case OpKind::PickRows: return pick_rows;
        case OpKind::Count: break;
    }
    return nullptr;
}

}  // namespace delta
