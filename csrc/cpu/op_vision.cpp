// The ops of a vision tower. What takes time is the attention; the others read and write each value about once.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/ops.h"
#include "cpu/rows.h"
#include "ref/ref_image.h"

namespace delta {

void cpu_pixels(CpuBackend& self, const FloatCall& c) {
    const int64_t n = c.op->out.cols;
    each_row(self, c.n_rows, n, [&](int64_t r) { std::memcpy(c.out + r * n, c.step->pixels + r * n, static_cast<size_t>(n) * sizeof(float)); });
}

void cpu_grid_position(CpuBackend& self, const FloatCall& c) {
    const ImageGrid& image = c.step->image;
    const GridParams& p = c.op->get<GridParams>();
    const int64_t n = c.op->out.cols;
    const float* table = vector(*c.op->w[0]);
    each_row(self, c.n_rows, 5 * n, [&](int64_t r) {
        float* out = c.out + r * n;
        const GridSample y = grid_sample(r / image.width % image.height, image.height, p.height);
        const GridSample x = grid_sample(r % image.width, image.width, p.width);
        const auto place = [&](int32_t row, int32_t column) { return table + (int64_t{row} * p.width + column) * n; };
        const auto share = [](double a, double b) { return static_cast<float>(a * b); };
        const float* at[4] = {place(y.low, x.low), place(y.low, x.high), place(y.high, x.low), place(y.high, x.high)};
        const float weight[4] = {share(1 - y.high_share, 1 - x.high_share), share(1 - y.high_share, x.high_share),
                                 share(y.high_share, 1 - x.high_share), share(y.high_share, x.high_share)};
        for (int64_t i = 0; i < n; ++i) {
            out[i] += weight[0] * at[0][i] + weight[1] * at[1][i] + weight[2] * at[2][i] + weight[3] * at[3][i];
        }
        if (image.frames > 1) {
            const auto frame = static_cast<double>(r / (int64_t{image.height} * image.width));
            for (int64_t i = 0; i < n / 2; ++i) {
                const double angle = frame * std::pow(kTimeBase, -static_cast<double>(i) / static_cast<double>(n / 2));
                out[i] += static_cast<float>(std::sin(angle));
                out[n / 2 + i] += static_cast<float>(std::cos(angle));
            }
        }
    });
}

namespace {

struct Turn {
    float cos, sin;
};

// Turns of every row and column of the grid: [height + width, d / 4].
Turn* turns(Workspace& space, const ImageAttentionParams& p, int32_t n_sides) {
    return space.take<Turn>(static_cast<size_t>(n_sides) * static_cast<size_t>(p.head_dim / 4));
}

}  // namespace

void cpu_grid_rope(CpuBackend& self, const FloatCall& c) {
    const ImageGrid& image = c.step->image;
    const ImageAttentionParams& p = c.op->get<ImageAttentionParams>();
    const int64_t d = p.head_dim;
    const int64_t n_pairs = d / 4;  // of each axis
    Workspace space(c.workspace);
    Turn* const table = turns(space, p, image.height + image.width);
    each_row(self, image.height + image.width, 64 * n_pairs, [&](int64_t side) {
        const auto at = static_cast<double>(side < image.width ? side : side - image.width);
        for (int64_t i = 0; i < n_pairs; ++i) {
            const double angle = at * std::pow(p.rope_base, -static_cast<double>(i) / static_cast<double>(n_pairs));
            table[side * n_pairs + i] = {static_cast<float>(std::cos(angle)), static_cast<float>(std::sin(angle))};
        }
    });
    each_row(self, c.n_rows, 4 * p.n_head * d, [&](int64_t r) {
        const Turn* const axes[2] = {table + r % image.width * n_pairs, table + (image.width + r / image.width % image.height) * n_pairs};
        float* x = c.out + r * c.op->out.cols;
        for (int64_t half = 0; half < 4 * int64_t{p.n_head}; ++half) {  // two halves of the queries' and keys' heads
            for (int64_t i = 0; i < n_pairs; ++i, x += 2) {
                const Turn t = axes[half % 2][i];
                const float a = x[0], b = x[1];
                x[0] = a * t.cos - b * t.sin;
                x[1] = a * t.sin + b * t.cos;
            }
        }
    });
}

size_t cpu_grid_rope_workspace(const Op& op, int32_t n_rows) {
    Workspace space;
    turns(space, op.get<ImageAttentionParams>(), n_rows + 1);  // no grid of so many patches has longer sides
    return space.used();
}

namespace {

constexpr int64_t kRowsAtOnce = 8192;  // of all heads that are laid out together, where one has fewer

constexpr int64_t blocks_of(int64_t n_rows) { return (n_rows + kKeyBlock - 1) / kKeyBlock; }

struct ImageSpace {
    float* keys;     // [heads at once, blocks, d, kKeyBlock]
    float* values;   // [heads at once, blocks, kKeyBlock, pad]
    float* queries;  // the rest for each thread: [kImageQueries, d]
    float* y;        // [kImageQueries, pad]
    float* best;     // [kImageQueries]
    float* sum;      // [kImageQueries]
    float* scores;   // [kImageQueries, kKeyBlock]

    ImageSpace(Workspace& space, const ImageAttentionParams& p, int32_t n_threads, int32_t n_rows) {
        const auto n_packed = static_cast<size_t>(std::max(blocks_of(n_rows) * kKeyBlock, kRowsAtOnce + int64_t{p.n_head} * kKeyBlock));
        const auto n_queries = static_cast<size_t>(n_threads) * kImageQueries;
        const auto d = static_cast<size_t>(p.head_dim);
        const auto pad = static_cast<size_t>(pad_to_lanes(p.head_dim));
        keys = space.take<float>(n_packed * d);
        values = space.take<float>(n_packed * pad);
        queries = space.take<float>(n_queries * d);
        y = space.take<float>(n_queries * pad);
        best = space.take<float>(n_queries);
        sum = space.take<float>(n_queries);
        scores = space.take<float>(n_queries * kKeyBlock);
    }
};

// Heads are taken one after another, or several where the image is small: their keys and values are laid out anew for the kernel, and
// the space for that must not grow with the number of heads. Tiles of queries then meet one block of keys after another, in order.
class ImageAttention {
   public:
    ImageAttention(CpuBackend& self, const ImageAttentionParams& p, int32_t n_rows, Workspace space)
        : self_(self), p_(p), n_rows_(n_rows), d_(p.head_dim), pad_(pad_to_lanes(p.head_dim)), n_blocks_(blocks_of(n_rows)),
          n_tiles_((n_rows + kImageQueries - 1) / kImageQueries), heads_at_once_(std::clamp<int64_t>(kRowsAtOnce / n_rows, 1, p.n_head)),
          space_(space, p, self.n_threads(), n_rows) {}

    void run(const float* qkv, float* out) {
        for (int64_t first = 0; first < p_.n_head; first += heads_at_once_) {
            const int64_t n = std::min(heads_at_once_, p_.n_head - first);
            self_.parallel(n * n_blocks_, int64_t{2} * kKeyBlock * d_, [&](int64_t begin, int64_t end, int32_t) {
                for (int64_t i = begin; i < end; ++i) {
                    pack(qkv, first + i / n_blocks_, i % n_blocks_, i);
                }
            });
            self_.parallel(n * n_tiles_, int64_t{2} * kImageQueries * n_rows_ * d_, [&](int64_t begin, int64_t end, int32_t thread) {
                for (int64_t i = begin; i < end; ++i) {
                    attend(qkv, first + i / n_tiles_, i % n_tiles_, i / n_tiles_ * n_blocks_, thread, out);
                }
            });
        }
    }

   private:
    int64_t width() const { return int64_t{p_.n_head} * d_; }
    int32_t n_keys(int64_t block) const { return static_cast<int32_t>(std::min<int64_t>(kKeyBlock, n_rows_ - block * kKeyBlock)); }

    // Keys and values of a block, to place `at`.
    void pack(const float* qkv, int64_t head, int64_t block, int64_t at) const {
        float* keys = space_.keys + at * kKeyBlock * d_;
        float* values = space_.values + at * kKeyBlock * pad_;
        const int32_t n = n_keys(block);
        if (n < kKeyBlock) {
            std::fill_n(keys, int64_t{kKeyBlock} * d_, 0.0F);
        }
        for (int32_t t = 0; t < n; ++t) {
            const float* row = qkv + (block * kKeyBlock + t) * 3 * width() + width() + head * d_;
            for (int32_t c = 0; c < d_; ++c) {
                keys[c * kKeyBlock + t] = row[c];
            }
            std::memcpy(values + int64_t{t} * pad_, row + width(), static_cast<size_t>(d_) * sizeof(float));
            std::fill(values + int64_t{t} * pad_ + d_, values + int64_t{t + 1} * pad_, 0.0F);
        }
    }

    // A tile of queries and all keys, packed from place `first_block` on. Rows beyond the last patch are computed as zeros.
    void attend(const float* qkv, int64_t head, int64_t tile, int64_t first_block, int32_t thread, float* out) const {
        const int64_t row = tile * kImageQueries;
        const auto n = static_cast<int32_t>(std::min<int64_t>(kImageQueries, n_rows_ - row));
        const int32_t n_padded = (n + kImageGroup - 1) / kImageGroup * kImageGroup;
        const int64_t scratch = int64_t{thread} * kImageQueries;
        float* queries = space_.queries + scratch * d_;
        std::fill_n(queries, int64_t{n_padded} * d_, 0.0F);
        for (int32_t q = 0; q < n; ++q) {
            std::memcpy(queries + int64_t{q} * d_, qkv + (row + q) * 3 * width() + head * d_, static_cast<size_t>(d_) * sizeof(float));
        }
        ImageAttendCall call;
        call.queries = queries;
        call.y = space_.y + scratch * pad_;
        call.best = space_.best + scratch;
        call.sum = space_.sum + scratch;
        call.scores = space_.scores + scratch * kKeyBlock;
        call.n_queries = n_padded;
        call.d = d_;
        call.pad = pad_;
        call.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(d_)));
        std::fill_n(call.y, int64_t{n_padded} * pad_, 0.0F);
        std::fill_n(call.best, n_padded, -INFINITY);
        std::fill_n(call.sum, n_padded, 0.0F);
        for (int64_t block = 0; block < n_blocks_; ++block) {
            call.keys = space_.keys + (first_block + block) * kKeyBlock * d_;
            call.values = space_.values + (first_block + block) * kKeyBlock * pad_;
            call.n_keys = n_keys(block);
            self_.kernels.image_attend(call);
        }
        for (int32_t q = 0; q < n; ++q) {
            const float* y = call.y + int64_t{q} * pad_;
            float* to = out + (row + q) * width() + head * d_;
            for (int32_t i = 0; i < d_; ++i) {
                to[i] = y[i] / call.sum[q];
            }
        }
    }

    CpuBackend& self_;
    const ImageAttentionParams& p_;
    int64_t n_rows_;
    int32_t d_;
    int32_t pad_;
    int64_t n_blocks_;
    int64_t n_tiles_;
    int64_t heads_at_once_;
    ImageSpace space_;
};

}  // namespace

void cpu_image_attention(CpuBackend& self, const FloatCall& c) {
    ImageAttention(self, c.op->get<ImageAttentionParams>(), c.n_rows, Workspace(c.workspace)).run(c.in[0], c.out);
}

size_t cpu_image_attention_workspace(const CpuBackend& self, const Op& op, int32_t n_rows) {
    Workspace space;
    ImageSpace(space, op.get<ImageAttentionParams>(), self.n_threads(), n_rows);
    return space.used();
}

void cpu_gelu(CpuBackend& self, const FloatCall& c) {
    constexpr int64_t kExpensive = 32;  // an error function, in multiplications
    const int64_t n = c.op->out.cols;
    const bool erf = c.op->get<GeluParams>().kind == GeluParams::Erf;
    each_row(self, c.n_rows, kExpensive * n, [&](int64_t r) {
        float* x = c.out + r * n;
        if (erf) {
            std::transform(x, x + n, x, [](float v) { return static_cast<float>(gelu_erf(double{v})); });
        } else {
            self.kernels.gelu_tanh(x, n, x);
        }
    });
}

void cpu_merge_squares(CpuBackend& self, const FloatCall& c) {
    const ImageGrid& image = c.step->image;
    const int64_t side = c.op->get<MergeParams>().side;
    const int64_t n = c.op->in[0].cols;
    const int64_t across = image.width / side;
    each_row(self, c.n_rows, side * side * n * image.frames, [&](int64_t r) {
        for (int64_t part = 0; part < side * side; ++part) {
            const int64_t patch = (r / across * side + part / side) * image.width + r % across * side + part % side;
            float* out = c.out + (r * side * side + part) * n;
            std::memcpy(out, c.in[0] + patch * n, static_cast<size_t>(n) * sizeof(float));
            for (int64_t f = 1; f < image.frames; ++f) {
                self.kernels.add(out, c.in[0] + (f * image.height * image.width + patch) * n, n, out);
            }
            for (int64_t i = 0; i < n && image.frames > 1; ++i) {
                out[i] /= static_cast<float>(image.frames);
            }
        }
    });
}

}  // namespace delta
