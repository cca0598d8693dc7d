#include "models/binder.h"

#include <vector>

#include "base/error.h"

namespace delta {
namespace {

std::string dims(int64_t mats, int64_t rows, int64_t cols) {
    return format("{%lld, %lld, %lld}", static_cast<long long>(cols), static_cast<long long>(rows), static_cast<long long>(mats));
}

// The dimensions that are not 1, slowest first: how files of different ages agree on {4, 1, n} and {4, n}.
std::vector<int64_t> essence(int64_t mats, int64_t rows, int64_t cols) {
    std::vector<int64_t> out;
    for (const int64_t n : {mats, rows, cols}) {
        if (n != 1) {
            out.push_back(n);
        }
    }
    return out;
}

}  // namespace

Weight& Binder::add(Weight weight) {
    bound_.weights.push_back(std::move(weight));
    return bound_.weights.back();
}

const Weight& Binder::get(const std::string& name, int64_t mats, int64_t rows, int64_t cols, Want want) {
    const GgufTensor* t = file_.find_tensor(name);
    if (t == nullptr) {
        throw Error(DELTA_FORMAT, format("%s: tensor %s is missing; expected dimensions %s", file_.path().c_str(), name.c_str(),
                                         dims(mats, rows, cols).c_str()));
    }
    if (essence(t->mats, t->rows, t->cols) != essence(mats, rows, cols)) {
        throw Error(DELTA_FORMAT, format("%s: tensor %s has dimensions %s, expected %s", file_.path().c_str(), name.c_str(),
                                         dims(t->mats, t->rows, t->cols).c_str(), dims(mats, rows, cols).c_str()));
    }
    if (want == Want::F32 && std::string_view(t->type->name) != "F32") {
        throw Error(DELTA_FORMAT,
                    format("%s: tensor %s has type %s, expected F32", file_.path().c_str(), name.c_str(), t->type->name));
    }
    if (cols % t->type->block != 0) {
        throw Error(DELTA_FORMAT, format("%s: tensor %s has rows of %lld, which blocks of %d of type %s do not divide",
                                         file_.path().c_str(), name.c_str(), static_cast<long long>(cols), t->type->block,
                                         t->type->name));
    }
    used_.insert(name);
    Weight w;
    w.name = name;
    w.type = t->type;
    w.mats = mats;
    w.rows = rows;
    w.cols = cols;
    w.mat_stride = static_cast<size_t>(rows) * w.row_bytes();
    w.data = t->data;
    return add(std::move(w));
}

const Weight& Binder::flattened(const std::string& name, int64_t mats, int64_t rows, int64_t cols, int64_t n_rows, Want want) {
    Weight w = get(name, mats, rows, cols, want);
    if (w.type->block != 1) {
        throw Error(DELTA_UNSUPPORTED, format("%s: tensor %s has type %s; supported here: F32, F16, BF16", file_.path().c_str(), name.c_str(),
                                              w.type->name));
    }
    w.cols = mats * rows * cols / n_rows;
    w.rows = n_rows;
    w.mats = 1;
    w.mat_stride = static_cast<size_t>(w.rows) * w.row_bytes();
    return add(std::move(w));
}

const Weight& Binder::rows_of(const Weight& whole, const std::string& name, int64_t first, int64_t n_rows) {
    Weight w = whole;
    w.name = name;
    w.rows = n_rows;
    w.data = whole.row(0, first);
    w.mat_stride = static_cast<size_t>(n_rows) * w.row_bytes();
    return add(std::move(w));
}

Binder::SplitKvB Binder::split_kv_b(const std::string& name, int64_t n_head, int64_t nope, int64_t v, int64_t latent) {
    const Weight& whole = get(name, 1, n_head * (nope + v), latent);

    const size_t n_bytes = static_cast<size_t>(n_head * latent * nope) * sizeof(float);
    bound_.owned.push_back(std::make_unique<uint8_t[]>(n_bytes));
    bound_.owned_bytes += n_bytes;
    auto* transposed = reinterpret_cast<float*>(bound_.owned.back().get());
    std::vector<float> row(static_cast<size_t>(latent));
    for (int64_t h = 0; h < n_head; ++h) {
        for (int64_t n = 0; n < nope; ++n) {
            whole.type->to_float(whole.row(0, h * (nope + v) + n), row.data(), latent);
            for (int64_t c = 0; c < latent; ++c) {
                transposed[(h * latent + c) * nope + n] = row[static_cast<size_t>(c)];
            }
        }
    }
    Weight k_b;
    k_b.name = name + " (k part)";
    k_b.type = find_type("F32");
    k_b.mats = n_head;
    k_b.rows = latent;
    k_b.cols = nope;
    k_b.mat_stride = static_cast<size_t>(latent) * k_b.row_bytes();
    k_b.data = bound_.owned.back().get();

    Weight v_b = whole;
    v_b.name = name + " (v part)";
    v_b.mats = n_head;
    v_b.rows = v;
    v_b.data = whole.row(0, nope);
    v_b.mat_stride = static_cast<size_t>(nope + v) * whole.row_bytes();

    const Weight* k = &add(std::move(k_b));
    return {k, &add(std::move(v_b))};
}

void Binder::check_closure() const {
    std::string extra;
    size_t n_extra = 0;
    for (const GgufTensor& t : file_.tensors()) {
        if (used_.count(std::string(t.name)) == 0) {
            if (n_extra < 5) {
                extra += (n_extra == 0 ? "" : ", ") + std::string(t.name);
            }
            ++n_extra;
        }
    }
    if (n_extra > 0) {
        throw Error(DELTA_FORMAT, format("%s: %zu tensors have no place in %s: %s%s", file_.path().c_str(), n_extra,
                                         architecture_.c_str(), extra.c_str(), n_extra > 5 ? ", ..." : ""));
    }
}

}  // namespace delta
