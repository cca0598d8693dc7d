// linear and head_linear, and what other products share with them.
#include <algorithm>

#include "cpu/ops.h"
#include "cpu/product.h"

namespace delta {
namespace {

constexpr int64_t kRowBlock = 256;             // input rows of one item
constexpr int64_t kWeightBytes = 256 * 1024;   // weights of one item: they are read once per kRowBlock input rows
constexpr int64_t kRowStep = 32;               // weight rows come in multiples of this, as wide as the widest panel
constexpr int64_t kFloatRowStep = 64;          // of about this in floating point, with as many inputs at least

// One encoded row per token and head; linear is head_linear with one head.
struct LinearCall {
    const Weight& w;
    int64_t stride;  // floats from one head's input to the next

    explicit LinearCall(const Op& op)
        : w(*op.w[0]), stride(op.kind == OpKind::HeadLinear ? op.get<HeadLinearParams>().stride : w.cols) {}
};

}  // namespace

size_t rounded_row_bytes(CpuInput kind, int64_t n) {
    constexpr size_t kBank = 8;
    if (!rounds_input(kind)) {
        return 0;
    }
    // An odd number of banks of the first cache: the kernels read one place of several rows at once, which then are in different banks.
    // Those of one bank would have to wait for each other.
    const size_t bytes = static_cast<size_t>(n / kInputBlock) * kRoundedBlockBytes;
    return ((bytes + kBank - 1) / kBank | 1) * kBank;
}

Inputs round_inputs(CpuBackend& self, CpuInput kind, const float* x, int64_t n_rows, int64_t x_stride, int64_t n, uint8_t* buffer) {
    if (!rounds_input(kind)) {
        return {reinterpret_cast<const uint8_t*>(x), static_cast<size_t>(x_stride) * sizeof(float), kind};
    }
    const size_t row_bytes = rounded_row_bytes(kind, n);
    self.parallel(n_rows, n, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t i = begin; i < end; ++i) {
            self.kernels.quantize[kind](x + i * x_stride, n, rounded_row(buffer + static_cast<size_t>(i) * row_bytes, n));
        }
    });
    return {buffer, row_bytes, kind};
}

namespace {

struct LinearScratch {
    uint8_t* inputs;
    float* decoded;  // [n_threads, decoded_floats(w)]
};

LinearScratch linear_scratch(Workspace& space, const CpuBackend& self, const Weight& w, int32_t n_rows) {
    LinearScratch s;
    s.inputs = space.take<uint8_t>(static_cast<size_t>(n_rows * w.mats) * rounded_row_bytes(self.input_kind(w), w.cols));
    s.decoded = space.take<float>(static_cast<size_t>(self.n_threads()) * decoded_floats(w));
    return s;
}

}  // namespace

namespace {

// The input of a product, rounded if need be; as another product of the group has rounded it, if one has.
Inputs input_of(CpuBackend& self, const LinearCall& call, const FloatCall& c, const LinearScratch& s) {
    const CpuInput kind = self.input_kind(call.w);
    const CpuBackend::Rounded wanted{c.in[0], c.n_rows * call.w.mats, call.stride, call.w.cols, kind, s.inputs};
    const size_t row_bytes = rounded_row_bytes(kind, wanted.n);
    if (rounds_input(kind)) {
        for (const CpuBackend::Rounded& r : self.rounded) {
            if (r.x == wanted.x && r.n_rows == wanted.n_rows && r.stride == wanted.stride && r.n == wanted.n && r.kind == wanted.kind) {
                return {r.data, row_bytes, kind};
            }
        }
    }
    // Ops that do not run at once share their scratch.
    std::erase_if(self.rounded, [&](const CpuBackend::Rounded& r) { return r.data == s.inputs; });
    if (rounds_input(kind)) {
        self.rounded.push_back(wanted);
    }
    return round_inputs(self, kind, wanted.x, wanted.n_rows, wanted.stride, wanted.n, s.inputs);
}

}  // namespace

Items cpu_linear_items(CpuBackend& self, const FloatCall& c) {
    const LinearCall call(*c.op);
    const Weight& w = call.w;
    Workspace space(c.workspace);
    const LinearScratch s = linear_scratch(space, self, w, c.n_rows);
    const Inputs x = input_of(self, call, c, s);

    // Items are (matrix, weight rows, input rows): all input rows meet a stretch of weights before the next stretch is begun.
    const int64_t row_blocks = (c.n_rows + kRowBlock - 1) / kRowBlock;
    const int64_t fair = w.mats * w.rows * row_blocks / (int64_t{16} * self.pool.n_used());
    const int64_t cached = std::max<int64_t>(kWeightBytes / static_cast<int64_t>(w.row_bytes()), 1);
    const bool rounds = rounds_input(self.input_kind(w));
    const int64_t least = rounds || c.n_rows < kFloatRowStep ? kRowStep : kFloatRowStep;
    // In floating point a panel may have another number of rows, and a part of one costs as much as a whole.
    const int64_t panel = rounds ? kRowStep : std::min<int64_t>(self.kernels.float_rows, least);
    const int64_t step = (least + panel - 1) / panel * panel;
    const int64_t chunk = (std::clamp<int64_t>(fair, 1, cached) + step - 1) / step * step;
    const int64_t chunks = (w.rows + chunk - 1) / chunk;
    const int64_t rows_per_item = std::min<int64_t>(c.n_rows, kRowBlock);
    const auto run = [&self, &w, x, s, row_blocks, chunk, chunks, n_rows = c.n_rows, out = c.out](int64_t begin, int64_t end, int32_t thread) {
        float* decoded = s.decoded + static_cast<size_t>(thread) * decoded_floats(w);
        for (int64_t item = begin; item < end; ++item) {
            const int64_t mat = item / (chunks * row_blocks);
            const int64_t first = item / row_blocks % chunks * chunk;
            const int64_t row = item % row_blocks * kRowBlock;
            multiply_rows(
                self.kernels, w, mat, first, std::min(chunk, w.rows - first), x, std::min<int64_t>(kRowBlock, n_rows - row),
                [&](int64_t j) { return (row + j) * w.mats + mat; },
                [&](int64_t j) { return out + ((row + j) * w.mats + mat) * w.rows + first; }, decoded);
        }
    };
    return {w.mats * chunks * row_blocks, chunk * rows_per_item * w.cols, run};
}

size_t cpu_linear_workspace(const CpuBackend& self, const Op& op, int32_t n_rows) {
    Workspace space;
    linear_scratch(space, self, *op.w[0], n_rows);
    return space.used();
}

}  // namespace delta
