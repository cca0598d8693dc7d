#include "ref/ref_image.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "ref/decoder.h"

namespace delta {

GridSample grid_sample(int64_t i, int32_t length, int32_t size) {
    const double at = std::max(0.0, (static_cast<double>(i) + 0.5) * size / length - 0.5);
    const auto low = static_cast<int32_t>(at);
    return {low, std::min(low + 1, size - 1), at - low};
}

// erfc keeps the digits of the small values on the left.
double gelu_erf(double x) { return 0.5 * x * std::erfc(-x / std::numbers::sqrt2); }

void pixels(const WideCall& c, WideDot, int64_t begin, int64_t end, void*) {
    const int64_t n = c.op->out.cols;
    std::copy_n(c.step->pixels + begin * n, (end - begin) * n, c.out + begin * n);
}

void grid_position(const WideCall& c, WideDot, int64_t begin, int64_t end, void* scratch) {
    const ImageGrid& image = c.step->image;
    const GridParams& p = c.op->get<GridParams>();
    const Weight& table = *c.op->w[0];
    const int64_t n = table.cols;
    Workspace space(scratch);
    Decoder decoder(space, n);
    for (int64_t r = begin; r < end; ++r) {
        double* row = c.out + r * n;
        const auto add = [&](int32_t y, int32_t x, double share) {
            const double* place = decoder.row(table, 0, int64_t{y} * p.width + x);
            for (int64_t i = 0; i < n; ++i) {
                row[i] += share * place[i];
            }
        };
        const GridSample y = grid_sample(r / image.width % image.height, image.height, p.height);
        const GridSample x = grid_sample(r % image.width, image.width, p.width);
        add(y.low, x.low, (1 - y.high_share) * (1 - x.high_share));
        add(y.low, x.high, (1 - y.high_share) * x.high_share);
        add(y.high, x.low, y.high_share * (1 - x.high_share));
        add(y.high, x.high, y.high_share * x.high_share);
        if (image.frames > 1) {
            const auto frame = static_cast<double>(r / (int64_t{image.height} * image.width));
            for (int64_t i = 0; i < n / 2; ++i) {
                const double angle = frame * std::pow(kTimeBase, -static_cast<double>(i) / static_cast<double>(n / 2));
                row[i] += std::sin(angle);
                row[n / 2 + i] += std::cos(angle);
            }
        }
    }
}

void grid_rope(const WideCall& c, WideDot, int64_t begin, int64_t end, void*) {
    const ImageGrid& image = c.step->image;
    const ImageAttentionParams& p = c.op->get<ImageAttentionParams>();
    const int64_t d = p.head_dim;
    for (int64_t r = begin; r < end; ++r) {
        const std::array<double, 2> at = {static_cast<double>(r % image.width), static_cast<double>(r / image.width % image.height)};
        double* row = c.out + r * c.op->out.cols;
        for (int64_t head = 0; head < 2 * int64_t{p.n_head}; ++head) {  // queries, then keys
            for (int64_t axis = 0; axis < 2; ++axis) {
                for (int64_t i = 0; i < d / 4; ++i) {
                    const double angle = at[static_cast<size_t>(axis)] * std::pow(p.rope_base, -static_cast<double>(i) / static_cast<double>(d / 4));
                    double* pair = row + head * d + axis * (d / 2) + 2 * i;
                    const double a = pair[0], b = pair[1];
                    pair[0] = a * std::cos(angle) - b * std::sin(angle);
                    pair[1] = a * std::sin(angle) + b * std::cos(angle);
                }
            }
        }
    }
}

int64_t each_head_of_each_patch(const WideCall& c) { return int64_t{c.n_rows} * c.op->get<ImageAttentionParams>().n_head; }

// As in mla_attention, the scores are computed twice.
void image_attention(const WideCall& c, WideDot dot, int64_t begin, int64_t end, void*) {
    const ImageAttentionParams& p = c.op->get<ImageAttentionParams>();
    const int64_t d = p.head_dim;
    const int64_t width = p.n_head * d;
    const double scale = 1.0 / std::sqrt(static_cast<double>(d));
    for (int64_t item = begin; item < end; ++item) {
        const int64_t r = item / p.n_head;
        const int64_t head = item % p.n_head * d;
        const double* q = c.in[0] + r * 3 * width + head;
        const auto score = [&](int64_t t) { return dot(q, c.in[0] + t * 3 * width + width + head, d) * scale; };
        double best = -INFINITY;
        for (int64_t t = 0; t < c.n_rows; ++t) {
            const double s = score(t);
            best = s <= best ? best : s;  // lets NaN through
        }
        double* out = c.out + r * width + head;
        std::fill_n(out, d, 0.0);
        double sum = 0;
        for (int64_t t = 0; t < c.n_rows; ++t) {
            const double weight = std::exp(score(t) - best);
            const double* v = c.in[0] + t * 3 * width + 2 * width + head;
            sum += weight;
            for (int64_t i = 0; i < d; ++i) {
                out[i] += weight * v[i];
            }
        }
        for (int64_t i = 0; i < d; ++i) {
            out[i] /= sum;
        }
    }
}

void gelu(const WideCall& c, WideDot, int64_t begin, int64_t end, void*) {
    const int64_t n = c.op->out.cols;
    const bool exact = c.op->get<GeluParams>().kind == GeluParams::Erf;
    for (int64_t i = begin * n; i < end * n; ++i) {
        const double x = c.out[i];
        c.out[i] = exact ? gelu_erf(x) : 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
    }
}

void merge_squares(const WideCall& c, WideDot, int64_t begin, int64_t end, void*) {
    const ImageGrid& image = c.step->image;
    const int64_t side = c.op->get<MergeParams>().side;
    const int64_t n = c.op->in[0].cols;
    const int64_t across = image.width / side;
    for (int64_t r = begin; r < end; ++r) {
        for (int64_t part = 0; part < side * side; ++part) {
            const int64_t y = r / across * side + part / side;
            const int64_t x = r % across * side + part % side;
            for (int64_t i = 0; i < n; ++i) {
                double sum = 0;
                for (int64_t f = 0; f < image.frames; ++f) {
                    sum += c.in[0][((f * image.height + y) * image.width + x) * n + i];
                }
                c.out[(r * side * side + part) * n + i] = sum / image.frames;
            }
        }
    }
}

}  // namespace delta
