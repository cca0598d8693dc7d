#include "ref/ref_ops.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "ref/decoder.h"
#include "ref/ref_image.h"

namespace delta {

double ref_dot(const double* w, const double* x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
        sum += w[i] * x[i];
    }
    return sum;
}

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

double square_sum(const double* x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
        sum += x[i] * x[i];
    }
    return sum;
}

// 1 / sqrt(mean(x^2) + eps)
double inverse_rms(const double* x, int64_t n, double eps) { return 1.0 / std::sqrt(square_sum(x, n) / static_cast<double>(n) + eps); }

// A weight with a single row.
const double* decoded_vector(const Weight& w, Workspace& space) { return Decoder(space, w.cols).row(w, 0, 0); }

// The sequence that a row of the step belongs to.
const SeqRows& sequence_of(const Step& step, int64_t row) {
    const auto after = std::upper_bound(step.seqs.begin(), step.seqs.end(), row,
                                        [](int64_t r, const SeqRows& seq) { return r < seq.first_row; });
    return *(after - 1);
}

int64_t each_row(const WideCall& c) { return c.n_rows; }
int64_t each_output_column(const WideCall& c) { return c.op->out.cols; }

void embed(const WideCall& c, WideDot, int64_t begin, int64_t end, void* scratch) {
    Workspace space(scratch);
    const Weight& w = *c.op->w[0];
    Decoder decoder(space, w.cols);
    for (int64_t r = begin; r < end; ++r) {
        const int32_t token = c.step->tokens[static_cast<size_t>(r)];
        if (is_feature(token)) {
            std::copy_n(c.step->features[static_cast<size_t>(feature_token(token))], w.cols, c.out + r * w.cols);
        } else {
            std::copy_n(decoder.row(w, 0, token), w.cols, c.out + r * w.cols);
        }
    }
}

void rms_norm(const WideCall& c, WideDot, int64_t begin, int64_t end, void* scratch) {
    Workspace space(scratch);
    const int64_t n = c.op->out.cols;
    const double* w = decoded_vector(*c.op->w[0], space);
    for (int64_t r = begin; r < end; ++r) {
        const double* x = c.in[0] + r * n;
        const double scale = inverse_rms(x, n, double{c.op->get<NormParams>().eps});
        for (int64_t i = 0; i < n; ++i) {
            c.out[r * n + i] = x[i] * scale * w[i];
        }
    }
}

void add(const WideCall& c, WideDot, int64_t begin, int64_t end, void*) {
    const int64_t n = c.op->out.cols;
    for (int64_t i = begin * n; i < end * n; ++i) {
        c.out[i] = c.in[0][i] + c.in[1][i];
    }
}

// Items are rows of all matrices of the weight; linear has one matrix, head_linear one for each head.
void linear(const WideCall& c, WideDot dot, int64_t begin, int64_t end, void* scratch) {
    Workspace space(scratch);
    const Weight& w = *c.op->w[0];
    const int64_t stride = c.op->kind == OpKind::Linear ? w.cols : c.op->get<HeadLinearParams>().stride;
    Decoder decoder(space, w.cols);
    for (int64_t item = begin; item < end; ++item) {
        const int64_t h = item / w.rows;
        const double* row = decoder.row(w, h, item % w.rows);
        for (int64_t r = 0; r < c.n_rows; ++r) {
            c.out[r * w.mats * w.rows + item] = dot(row, c.in[0] + (r * w.mats + h) * stride, w.cols);
        }
    }
}

void glu(const WideCall& c, WideDot, int64_t begin, int64_t end, void*) {
    const int64_t n = c.op->out.cols;
    for (int64_t i = begin * n; i < end * n; ++i) {
        c.out[i] = glu_value(c.in[0][i], c.in[1][i], c.op->get<Activation>());
    }
}

// Items are channels.
void short_conv(const WideCall& c, WideDot, int64_t begin, int64_t end, void* scratch) {
    Workspace space(scratch);
    const Weight& w = *c.op->w[0];
    const int64_t channels = w.rows;
    const int64_t taps = w.cols;
    const ConvParams& p = c.op->get<ConvParams>();
    Decoder decoder(space, taps);
    for (int64_t ch = begin; ch < end; ++ch) {
        const double* kernel = decoder.row(w, 0, ch);
        for (const SeqRows& seq : c.step->seqs) {
            auto* state = c.step->state.conv<double>(seq.slot, p.kda, p.stream);  // [taps - 1, channels]
            const double* x = c.in[0] + int64_t{seq.first_row} * channels;
            // Row t of the sequence; negative rows are in the state.
            const auto input = [&](int64_t t) { return t >= 0 ? x[t * channels + ch] : state[(taps - 1 + t) * channels + ch]; };
            for (int64_t t = 0; t < seq.n_rows; ++t) {
                double sum = 0;
                for (int64_t j = 0; j < taps; ++j) {
                    sum += kernel[j] * input(t - (taps - 1) + j);
                }
                c.out[(seq.first_row + t) * channels + ch] = sum * sigmoid(sum);
            }
            // Oldest row first, so that a row moves only to where nothing is still to be read from.
            for (int64_t j = 0; j < taps - 1; ++j) {
                state[j * channels + ch] = input(seq.n_rows - (taps - 1) + j);
            }
        }
    }
}

void kda_gate(const WideCall& c, WideDot, int64_t begin, int64_t end, void* scratch) {
    Workspace space(scratch);
    const GateParams& p = c.op->get<GateParams>();
    const int64_t n = c.op->out.cols;
    const double* a = decoded_vector(*c.op->w[0], space);
    const double* dt = decoded_vector(*c.op->w[1], space);
    const int64_t head_dim = n / c.op->w[0]->cols;
    for (int64_t r = begin; r < end; ++r) {
        for (int64_t i = 0; i < n; ++i) {
            const double ah = a[i / head_dim];
            const double z = c.in[0][r * n + i] + dt[i];
            c.out[r * n + i] = p.bounded ? p.lower_bound * sigmoid(-ah * z) : ah * softplus(z);
        }
    }
}

int64_t each_head_of_each_sequence(const WideCall& c) { return static_cast<int64_t>(c.step->seqs.size()) * c.op->in[4].cols; }

void kda_scan(const WideCall& c, WideDot, int64_t begin, int64_t end, void* scratch) {
    Workspace space(scratch);
    const int64_t n_head = c.op->in[4].cols;
    const int64_t inner = c.op->in[0].cols;
    const int64_t d = inner / n_head;
    auto* q = space.take<double>(static_cast<size_t>(d));
    auto* k = space.take<double>(static_cast<size_t>(d));
    auto* decay = space.take<double>(static_cast<size_t>(d));
    for (int64_t item = begin; item < end; ++item) {
        const SeqRows& seq = c.step->seqs[static_cast<size_t>(item / n_head)];
        const int64_t h = item % n_head;
        double* s = c.step->state.scan<double>(seq.slot, c.op->get<ScanParams>().kda) + h * d * d;  // [v][k]
        for (int64_t t = seq.first_row; t < seq.first_row + seq.n_rows; ++t) {
            const int64_t at = t * inner + h * d;
            const double beta = sigmoid(c.in[4][t * n_head + h]);
            const double q_scale = 1.0 / std::sqrt(square_sum(c.in[0] + at, d) + kL2NormEps) / std::sqrt(static_cast<double>(d));
            const double k_scale = 1.0 / std::sqrt(square_sum(c.in[1] + at, d) + kL2NormEps);
            for (int64_t i = 0; i < d; ++i) {
                q[i] = c.in[0][at + i] * q_scale;
                k[i] = c.in[1][at + i] * k_scale;
                decay[i] = std::exp(c.in[3][at + i]);
            }
            for (int64_t v = 0; v < d; ++v) {
                double* row = s + v * d;
                double predicted = 0;
                for (int64_t i = 0; i < d; ++i) {
                    row[i] *= decay[i];
                    predicted += row[i] * k[i];
                }
                const double u = beta * (c.in[2][at + v] - predicted);
                double out = 0;
                for (int64_t i = 0; i < d; ++i) {
                    row[i] += u * k[i];
                    out += row[i] * q[i];
                }
                c.out[at + v] = out;
            }
        }
    }
}

void gated_norm(const WideCall& c, WideDot, int64_t begin, int64_t end, void* scratch) {
    Workspace space(scratch);
    const double* w = decoded_vector(*c.op->w[0], space);
    const int64_t d = c.op->w[0]->cols;
    const int64_t n_groups = c.op->out.cols / d;
    for (int64_t g = begin * n_groups; g < end * n_groups; ++g) {
        const double* o = c.in[0] + g * d;
        const double scale = inverse_rms(o, d, double{c.op->get<NormParams>().eps});
        for (int64_t i = 0; i < d; ++i) {
            c.out[g * d + i] = o[i] * scale * w[i] * sigmoid(c.in[1][g * d + i]);
        }
    }
}

void latent_append(const WideCall& c, WideDot, int64_t begin, int64_t end, void* scratch) {
    Workspace space(scratch);
    const NormParams& p = c.op->get<NormParams>();
    const StateLayout& layout = *c.step->state.layout;
    const double* w = decoded_vector(*c.op->w[0], space);
    const int64_t latent = c.op->w[0]->cols;
    const int64_t width = layout.latent_width;
    auto* row = space.take<double>(static_cast<size_t>(width));
    auto* narrow = space.take<float>(static_cast<size_t>(width));
    for (int64_t r = begin; r < end; ++r) {
        const SeqRows& seq = sequence_of(*c.step, r);
        const double* kv = c.in[0] + r * width;
        const double scale = inverse_rms(kv, latent, double{p.eps});
        for (int64_t i = 0; i < width; ++i) {
            row[i] = i < latent ? kv[i] * scale * w[i] : kv[i];
        }
        const auto position = static_cast<size_t>(seq.position + r - seq.first_row);
        uint8_t* at = c.step->state.latents(seq.slot, p.mla) + position * layout.latent_row_bytes();
        if (layout.wide_latents()) {
            std::memcpy(at, row, layout.latent_row_bytes());
        } else {
            std::transform(row, row + width, narrow, [](double x) { return static_cast<float>(x); });
            layout.cache_type->from_float(narrow, at, width);
        }
    }
}

int64_t each_head_of_each_row(const WideCall& c) { return int64_t{c.n_rows} * c.op->get<AttentionParams>().n_head; }

// The scores are computed twice, for their maximum and for their weights: the scratch does not grow with the context.
void mla_attention(const WideCall& c, WideDot dot, int64_t begin, int64_t end, void* scratch) {
    Workspace space(scratch);
    const AttentionParams& p = c.op->get<AttentionParams>();
    const StateLayout& layout = *c.step->state.layout;
    const int64_t q_stride = c.op->in[1].cols / p.n_head;
    Decoder decoder(space, layout.latent_width);
    auto* y = space.take<double>(static_cast<size_t>(p.latent));
    for (int64_t item = begin; item < end; ++item) {
        const int64_t r = item / p.n_head;
        const SeqRows& seq = sequence_of(*c.step, r);
        const uint8_t* cache = c.step->state.latents(seq.slot, p.mla);
        const auto key = [&](int64_t t) {
            const uint8_t* at = cache + static_cast<size_t>(t) * layout.latent_row_bytes();
            return layout.wide_latents() ? reinterpret_cast<const double*>(at) : decoder.row(*layout.cache_type, at, layout.latent_width);
        };
        const double* a = c.in[0] + item * p.latent;
        const double* q_rest = c.in[1] + (item + 1) * q_stride - p.rope;
        const auto score = [&](const double* row) { return (dot(row, a, p.latent) + dot(row + p.latent, q_rest, p.rope)) * p.scale; };
        const int64_t visible = seq.position + r - seq.first_row + 1;
        double best = -INFINITY;
        for (int64_t t = 0; t < visible; ++t) {
            const double s = score(key(t));
            // A comparison that lets NaN through: it must reach the logits, not vanish here.
            best = s <= best ? best : s;
        }
        std::fill_n(y, p.latent, 0.0);
        double sum = 0;
        for (int64_t t = 0; t < visible; ++t) {
            const double* row = key(t);
            const double weight = std::exp(score(row) - best);
            sum += weight;
            for (int64_t i = 0; i < p.latent; ++i) {
                y[i] += weight * row[i];
            }
        }
        for (int64_t i = 0; i < p.latent; ++i) {
            c.out[item * p.latent + i] = y[i] / sum;
        }
    }
}

void mul_sigmoid(const WideCall& c, WideDot, int64_t begin, int64_t end, void*) {
    const int64_t n = c.op->out.cols;
    for (int64_t i = begin * n; i < end * n; ++i) {
        c.out[i] = c.in[0][i] * sigmoid(c.in[1][i]);
    }
}

void moe_route(const WideCall& c, WideDot, int64_t begin, int64_t end, void* scratch) {
    Workspace space(scratch);
    const RouteParams& p = c.op->get<RouteParams>();
    const int32_t n_expert = c.op->in[0].cols;
    const double* bias = c.op->w[0] != nullptr ? decoded_vector(*c.op->w[0], space) : nullptr;
    auto* score = space.take<double>(static_cast<size_t>(n_expert));
    auto* choice = space.take<double>(static_cast<size_t>(n_expert));
    for (int64_t r = begin; r < end; ++r) {
        // No comparison may see NaN (each would be false), and NaN must not vanish here: the weights of the whole row become NaN.
        bool bad = false;
        for (int32_t e = 0; e < n_expert; ++e) {
            score[e] = sigmoid(c.in[0][r * n_expert + e]);
            choice[e] = score[e] + (bias != nullptr ? bias[e] : 0.0);
            bad = bad || std::isnan(choice[e]);
        }
        if (bad) {
            std::fill_n(choice, n_expert, 0.0);
        }
        double* ids = c.out + r * 2 * p.n_used;
        double* weights = ids + p.n_used;
        double sum = 0;
        for (int32_t i = 0; i < p.n_used; ++i) {
            const int64_t e = std::max_element(choice, choice + n_expert) - choice;  // the first of equals
            choice[e] = -INFINITY;
            ids[i] = static_cast<double>(e);
            weights[i] = score[e];
            sum += score[e];
        }
        const double norm = p.normalise && p.n_used > 1 ? sum + 1e-20 : 1.0;
        for (int32_t i = 0; i < p.n_used; ++i) {
            weights[i] = bad ? NAN : weights[i] / norm * p.scale;
        }
    }
}

void moe_experts(const WideCall& c, WideDot dot, int64_t begin, int64_t end, void* scratch) {
    Workspace space(scratch);
    const ExpertParams& p = c.op->get<ExpertParams>();
    const Weight& gate = *c.op->w[0];
    const Weight& up = *c.op->w[1];
    const Weight& down = *c.op->w[2];
    Decoder decoder(space, std::max(gate.cols, down.cols));
    auto* hidden = space.take<double>(static_cast<size_t>(gate.rows));
    for (int64_t r = begin; r < end; ++r) {
        const double* z = c.in[0] + r * gate.cols;
        const double* route = c.in[1] + r * 2 * p.n_used;
        double* out = c.out + r * down.rows;
        std::fill_n(out, down.rows, 0.0);
        for (int32_t i = 0; i < p.n_used; ++i) {
            const auto e = static_cast<int64_t>(route[i]);
            for (int64_t x = 0; x < gate.rows; ++x) {
                const double g = dot(decoder.row(gate, e, x), z, gate.cols);
                hidden[x] = glu_value(g, dot(decoder.row(up, e, x), z, up.cols), p.activation);
            }
            for (int64_t o = 0; o < down.rows; ++o) {
                out[o] += route[p.n_used + i] * dot(decoder.row(down, e, o), hidden, down.cols);
            }
        }
    }
}

void bank_push(const WideCall& c, WideDot, int64_t begin, int64_t end, void*) {
    const int64_t n = c.op->in[0].cols;
    const int64_t width = c.op->out.cols;
    for (int64_t r = begin; r < end; ++r) {
        std::copy_n(c.in[0] + r * n, n, c.out + r * width + c.op->get<BankParams>().slot * n);
    }
}

void bank_mix(const WideCall& c, WideDot dot, int64_t begin, int64_t end, void* scratch) {
    Workspace space(scratch);
    const BankParams& p = c.op->get<BankParams>();
    const int64_t n = c.op->out.cols;
    const int64_t width = c.op->in[0].cols;
    const double* w = decoded_vector(*c.op->w[0], space);
    auto* weight = space.take<double>(static_cast<size_t>(p.n_slots) + 1);
    for (int64_t r = begin; r < end; ++r) {
        const auto entry = [&](int32_t s) { return s < p.n_slots ? c.in[0] + r * width + s * n : c.in[1] + r * n; };
        double best = -INFINITY;
        for (int32_t s = 0; s <= p.n_slots; ++s) {
            weight[s] = dot(w, entry(s), n) * inverse_rms(entry(s), n, double{p.eps});
            best = weight[s] <= best ? best : weight[s];
        }
        double sum = 0;
        for (int32_t s = 0; s <= p.n_slots; ++s) {
            weight[s] = std::exp(weight[s] - best);
            sum += weight[s];
        }
        for (int64_t i = 0; i < n; ++i) {
            double y = 0;
            for (int32_t s = 0; s <= p.n_slots; ++s) {
                y += weight[s] * entry(s)[i];
            }
            c.out[r * n + i] = y / sum;
        }
    }
}

void pick_rows(const WideCall& c, WideDot, int64_t begin, int64_t end, void*) {
    const int64_t n = c.op->out.cols;
    for (int64_t r = begin; r < end; ++r) {
        std::copy_n(c.in[0] + c.step->output_rows[static_cast<size_t>(r)] * n, n, c.out + r * n);
    }
}

constexpr std::array<RefOp, static_cast<size_t>(OpKind::Count)> kOps = [] {
    std::array<RefOp, static_cast<size_t>(OpKind::Count)> ops{};
    const auto at = [&](OpKind kind) -> RefOp& { return ops[static_cast<size_t>(kind)]; };
    at(OpKind::Embed) = {each_row, embed};
    at(OpKind::RmsNorm) = {each_row, rms_norm};
    at(OpKind::Add) = {each_row, add};
    at(OpKind::Linear) = {each_output_column, linear};
    at(OpKind::HeadLinear) = {each_output_column, linear};
    at(OpKind::Glu) = {each_row, glu};
    at(OpKind::ShortConv) = {each_output_column, short_conv};
    at(OpKind::KdaGate) = {each_row, kda_gate};
    at(OpKind::KdaScan) = {each_head_of_each_sequence, kda_scan};
    at(OpKind::GatedNorm) = {each_row, gated_norm};
    at(OpKind::LatentAppend) = {each_row, latent_append};
    at(OpKind::MlaAttention) = {each_head_of_each_row, mla_attention};
    at(OpKind::MulSigmoid) = {each_row, mul_sigmoid};
    at(OpKind::MoeRoute) = {each_row, moe_route};
    at(OpKind::MoeExperts) = {each_row, moe_experts};
    at(OpKind::BankPush) = {each_row, bank_push};
    at(OpKind::BankMix) = {each_row, bank_mix};
    at(OpKind::PickRows) = {each_row, pick_rows};
    at(OpKind::Pixels) = {each_row, pixels};
    at(OpKind::GridPosition) = {each_row, grid_position};
    at(OpKind::GridRope) = {each_row, grid_rope};
    at(OpKind::ImageAttention) = {each_head_of_each_patch, image_attention};
    at(OpKind::Gelu) = {each_row, gelu};
    at(OpKind::MergeSquares) = {each_row, merge_squares};
    return ops;
}();

}  // namespace

const RefOp& ref_op(OpKind kind) { return kOps[static_cast<size_t>(kind)]; }

size_t ref_scratch_bytes(const Op& op) {
    // No op takes more than six rows of its widest matrix.
    int64_t widest = op.out.cols;
    for (const Value& v : op.in) {
        widest = std::max<int64_t>(widest, v.cols);
    }
    for (const Weight* w : op.w) {
        widest = w != nullptr ? std::max({widest, w->rows, w->cols}) : widest;
    }
    Workspace space;
    for (int i = 0; i < 6; ++i) {
        space.take<double>(static_cast<size_t>(widest));
    }
    return space.used();
}

}  // namespace delta
