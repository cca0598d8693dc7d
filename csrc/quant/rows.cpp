#include "quant/rows.h"

#include <algorithm>
#include <atomic>
#include <cinttypes>

#include "base/error.h"
#include "base/half.h"
#include "base/threads.h"
#include "quant/quant.h"

namespace delta {
namespace {

const TypeInfo& checked_type(uint32_t id, const void* src, const void* dst, int64_t n_rows, int64_t n_cols, int32_t n_threads) {
    ThreadPool::check_size(n_threads);
    const TypeInfo* type = find_type(id);
    if (type == nullptr) {
        throw Error(DELTA_UNSUPPORTED, format("type id %u is unknown, this build has %s", id, type_names()));
    }
    if (n_rows < 0 || n_cols < 0) {
        throw Error(DELTA_ARG, format("%" PRId64 " rows of %" PRId64 " columns: a size is negative", n_rows, n_cols));
    }
    if (n_cols % type->block != 0) {
        throw Error(DELTA_ARG, format("rows of %" PRId64 " columns are not made of whole %s blocks of %d", n_cols, type->name,
                                      type->block));
    }
    int64_t n_values = 0, n_bytes = 0;
    if (__builtin_mul_overflow(n_rows, n_cols, &n_values) || __builtin_mul_overflow(n_values, int64_t{sizeof(float)}, &n_bytes)) {
        throw Error(DELTA_ARG, format("%" PRId64 " rows of %" PRId64 " columns are too many", n_rows, n_cols));
    }
    if (n_values != 0 && (src == nullptr || dst == nullptr)) {
        throw Error(DELTA_ARG, format("%s is null", src == nullptr ? "src" : "dst"));
    }
    return *type;
}

// About this many values make a chunk: enough to hide handing it out, few enough to balance.
constexpr int64_t kChunkValues = 16384;

template <class RowFn>
void for_each_row(int64_t n_rows, int64_t n_cols, int32_t n_threads, RowFn fn) {
    const int64_t chunk = std::max<int64_t>(1, kChunkValues / std::max<int64_t>(n_cols, 1));
    const auto run = [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t row = begin; row < end; ++row) {
            fn(row);
        }
    };
    ThreadPool pool(n_rows <= chunk ? 1 : n_threads);  // no threads for what one does in microseconds
    pool.parallel_for(n_rows, chunk, run);
}

// Whether encoding loses a value altogether: a finite one beyond the largest; in block types, where one value spoils its
// neighbours, also NaN and infinity.
bool is_lost(const TypeInfo& type, float value) {
    const uint32_t magnitude = f32_bits(value) & 0x7fffffff;
    return magnitude > f32_bits(type.largest) && (type.block > 1 || magnitude < 0x7f800000);
}

bool any_lost(const TypeInfo& type, const float* x, int64_t n) {
    bool lost = false;
    for (int64_t i = 0; i < n; ++i) {  // no early exit: this way the compiler makes vectors of it
        lost |= is_lost(type, x[i]);
    }
    return lost;
}

}  // namespace

void quantize_rows(uint32_t type_id, const float* src, void* dst, int64_t n_rows, int64_t n_cols, int32_t n_threads) {
    const TypeInfo& type = checked_type(type_id, src, dst, n_rows, n_cols, n_threads);
    if (type.from_float == nullptr) {
        throw Error(DELTA_UNSUPPORTED, format("this build can read %s but not encode it", type.name));
    }
    const size_t bytes = row_bytes(type, n_cols);
    std::atomic<int64_t> bad_row{n_rows};  // the first of them, whatever the order of threads
    for_each_row(n_rows, n_cols, n_threads, [&](int64_t row) {
        const float* x = src + row * n_cols;
        if (any_lost(type, x, n_cols)) {
            for (int64_t seen = bad_row.load(); row < seen && !bad_row.compare_exchange_weak(seen, row);) {
            }
            return;
        }
        type.from_float(x, static_cast<uint8_t*>(dst) + static_cast<size_t>(row) * bytes, n_cols);
    });
    if (const int64_t row = bad_row.load(); row != n_rows) {
        const float* x = src + row * n_cols;
        const float* lost = std::find_if(x, x + n_cols, [&](float value) { return is_lost(type, value); });
        throw Error(DELTA_NUMERIC, format("row %" PRId64 ", column %td is %g, which %s cannot hold", row, lost - x,
                                          static_cast<double>(*lost), type.name));
    }
}

void dequantize_rows(uint32_t type_id, const void* src, float* dst, int64_t n_rows, int64_t n_cols, int32_t n_threads) {
    const TypeInfo& type = checked_type(type_id, src, dst, n_rows, n_cols, n_threads);
    const size_t bytes = row_bytes(type, n_cols);
    for_each_row(n_rows, n_cols, n_threads, [&](int64_t row) {
        type.to_float(static_cast<const uint8_t*>(src) + static_cast<size_t>(row) * bytes, dst + row * n_cols, n_cols);
    });
}

}  // namespace delta
