// short_conv, kda_gate and kda_scan.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/ops.h"

namespace delta {
namespace {

constexpr int64_t kChannels = 256;     // of one item of short_conv

struct ConvScratch {
    float* w;              // [taps, kChannels] transposed
    const float** window;  // [taps] the rows a token sees
};

ConvScratch conv_scratch(Workspace& space, int64_t taps) {
    const auto n = static_cast<size_t>(taps);
    return {space.take<float>(n * kChannels), space.take<const float*>(n)};
}

size_t conv_scratch_bytes(const Op& op) {
    Workspace space;
    conv_scratch(space, op.w[0]->cols);
    return space.used();
}

// to[j * kChannels + ch] = w[ch * taps + j]. With a number of taps that is known, the compiler makes this a few shuffles.
template <int64_t kTaps = 0>
void transpose_taps(const float* __restrict w, int64_t n, int64_t n_taps, float* __restrict to) {
    const int64_t taps = kTaps > 0 ? kTaps : n_taps;
    for (int64_t ch = 0; ch < n; ++ch) {
        for (int64_t j = 0; j < taps; ++j) {
            to[j * kChannels + ch] = w[ch * taps + j];
        }
    }
}

// Asks memory for n floats at once, long before they are read.
void ask_for(const float* at, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        __builtin_prefetch(at + i, 0, 3);
    }
}

}  // namespace

Items cpu_short_conv_items(CpuBackend& self, const FloatCall& c) {
    const ConvParams p = c.op->get<ConvParams>();
    const int64_t channels = c.op->w[0]->rows;
    const int64_t taps = c.op->w[0]->cols;
    const auto* w = reinterpret_cast<const float*>(c.op->w[0]->data);
    const size_t scratch_bytes = conv_scratch_bytes(*c.op);
    const int64_t n_items = (channels + kChannels - 1) / kChannels;
    const auto run = [&self, c, p, channels, taps, w, scratch_bytes](int64_t begin, int64_t end, int32_t thread) {
        Workspace space(static_cast<uint8_t*>(c.workspace) + static_cast<size_t>(thread) * scratch_bytes);
        const ConvScratch s = conv_scratch(space, taps);
        for (int64_t item = begin; item < end; ++item) {
            const int64_t first = item * kChannels;
            const int64_t n = std::min(kChannels, channels - first);
            const auto state_of = [&](const SeqRows& seq) { return c.step->state.conv<float>(seq.slot, p.kda, p.stream) + first; };
            for (int64_t j = 0; j < taps - 1; ++j) {
                ask_for(state_of(c.step->seqs.front()) + j * channels, n);
            }
            ask_for(w + first * taps, n * taps);
            (taps == 4 ? transpose_taps<4> : transpose_taps<>)(w + first * taps, n, taps, s.w);
            for (const SeqRows& seq : c.step->seqs) {
                float* state = state_of(seq);  // rows `channels` floats apart
                // Row t of the sequence; negative rows are in the state.
                const auto row = [&](int64_t t) {
                    return t >= 0 ? c.in[0] + (seq.first_row + t) * channels + first : state + (taps - 1 + t) * channels;
                };
                for (int64_t t = 0; t < seq.n_rows; ++t) {
                    for (int64_t j = 0; j < taps; ++j) {
                        s.window[j] = row(t - (taps - 1) + j);
                    }
                    self.kernels.conv(s.window, s.w, kChannels, static_cast<int32_t>(taps), n, c.out + (seq.first_row + t) * channels + first);
                }
                // Oldest row first, so that a row moves only to where nothing is still to be read from.
                for (int64_t j = 0; j < taps - 1; ++j) {
                    std::memcpy(state + j * channels, row(seq.n_rows - (taps - 1) + j), static_cast<size_t>(n) * sizeof(float));
                }
            }
        }
    };
    return {n_items, kChannels * (taps + 16) * c.n_rows, run};
}

size_t cpu_short_conv_workspace(const CpuBackend& self, const Op& op) {
    return conv_scratch_bytes(op) * static_cast<size_t>(self.n_threads());
}

void cpu_kda_gate(CpuBackend& self, const FloatCall& c) {
    const GateParams& p = c.op->get<GateParams>();
    const int64_t n_head = c.op->w[0]->cols;
    const int64_t d = c.op->out.cols / n_head;
    const auto* a = reinterpret_cast<const float*>(c.op->w[0]->data);
    const auto* dt = reinterpret_cast<const float*>(c.op->w[1]->data);
    self.parallel(c.n_rows * n_head, 32 * d, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t h = i % n_head;
            if (p.bounded) {
                self.kernels.gate_bounded(c.in[0] + i * d, dt + h * d, a[h], p.lower_bound, d, c.out + i * d);
            } else {
                self.kernels.gate_softplus(c.in[0] + i * d, dt + h * d, a[h], d, c.out + i * d);
            }
        }
    });
}

namespace {

struct ScanScratch {
    KdaRows rows;
    float* beta;  // [kKdaChunk]
};

ScanScratch scan_scratch(Workspace& space, int32_t d) {
    const auto rows = static_cast<size_t>(kKdaChunk * pad_to_lanes(d));
    ScanScratch s;
    s.rows = {space.take<float>(rows), space.take<float>(rows), space.take<float>(rows), space.take<float>(kKdaChunk)};
    s.beta = space.take<float>(kKdaChunk);
    return s;
}

int32_t head_dim(const Op& op) { return op.in[0].cols / op.in[4].cols; }

size_t scan_scratch_bytes(const Op& op) {
    Workspace space;
    scan_scratch(space, head_dim(op));
    return space.used();
}

}  // namespace

void cpu_kda_scan(CpuBackend& self, const FloatCall& c) {
    const int32_t n_head = c.op->in[4].cols;
    const int32_t d = head_dim(*c.op);
    const int64_t inner = c.op->in[0].cols;
    const size_t scratch_bytes = scan_scratch_bytes(*c.op);
    const auto n_seqs = static_cast<int64_t>(c.step->seqs.size());

    // Items are (sequence, head, part of the state's rows). Every row of the state is a recurrence of its own, so heads are divided
    // only if there are too few of them for the threads; each part prepares q, k and the decays again.
    const int64_t wanted = (2 * self.n_threads() + n_seqs * n_head - 1) / (n_seqs * n_head);
    const int32_t part = (d + static_cast<int32_t>(wanted) - 1) / static_cast<int32_t>(wanted);
    const int32_t n_v = std::max(part, std::min(d, 16));
    const int64_t parts = (d + n_v - 1) / n_v;
    self.parallel(n_seqs * n_head * parts, int64_t{4} * n_v * d * (c.n_rows / n_seqs), [&](int64_t begin, int64_t end, int32_t thread) {
        Workspace space(static_cast<uint8_t*>(c.workspace) + static_cast<size_t>(thread) * scratch_bytes);
        const ScanScratch s = scan_scratch(space, d);
        for (int64_t item = begin; item < end; ++item) {
            const SeqRows& seq = c.step->seqs[static_cast<size_t>(item / (n_head * parts))];
            const int64_t h = item / parts % n_head;
            const int64_t first_v = item % parts * n_v;
            KdaCall call;
            call.state = c.step->state.scan<float>(seq.slot, c.op->get<ScanParams>().kda) + (h * d + first_v) * d;
            call.beta = s.beta;
            call.v_stride = inner;
            call.n_v = static_cast<int32_t>(std::min<int64_t>(n_v, d - first_v));
            call.d = d;
            call.pad = pad_to_lanes(d);
            call.rows = s.rows;
            for (int32_t t = 0; t < seq.n_rows; t += kKdaChunk) {
                const int64_t row = seq.first_row + t;
                const int64_t at = row * inner + h * d;
                call.n = std::min(kKdaChunk, seq.n_rows - t);
                call.v = c.in[2] + at + first_v;
                call.o = c.out + at + first_v;
                self.kernels.kda_prepare(c.in[0] + at, c.in[1] + at, c.in[3] + at, inner, call.n, d, s.rows);
                for (int32_t i = 0; i < call.n; ++i) {
                    s.beta[i] = static_cast<float>(1.0 / (1.0 + std::exp(-double{c.in[4][(row + i) * n_head + h]})));
                }
                self.kernels.kda_scan(call);
            }
        }
    });
}

size_t cpu_kda_scan_workspace(const CpuBackend& self, const Op& op) {
    return scan_scratch_bytes(op) * static_cast<size_t>(self.n_threads());
}

}  // namespace delta
