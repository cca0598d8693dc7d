#include "quant/rows.h"

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/half.h"
#include "base/threads.h"
#include "quant/codecs.h"

namespace delta {
namespace {

const TypeInfo& known_type(const Codecs& codecs, uint32_t id) {
    for (size_t i = 0; i < codecs.n_types; ++i) {
        if (codecs.types[i].id == id) {
            return codecs.types[i];
        }
    }
    throw Error(DELTA_UNSUPPORTED, format("type id %u is unknown, this build has %s", id, type_names()));
}

void check_shape(const TypeInfo& type, RowsShape shape, const void* src, const void* dst) {
    ThreadPool::check_size(shape.n_threads);
    if (shape.n_rows < 0 || shape.n_cols < 0) {
        throw Error(DELTA_ARG, format("%" PRId64 " rows of %" PRId64 " columns: a size is negative", shape.n_rows, shape.n_cols));
    }
    if (shape.n_cols % type.block != 0) {
        throw Error(DELTA_ARG, format("rows of %" PRId64 " columns are not made of whole %s blocks of %d", shape.n_cols, type.name,
                                      type.block));
    }
    int64_t n_values = 0, n_bytes = 0;
    if (__builtin_mul_overflow(shape.n_rows, shape.n_cols, &n_values) ||
        __builtin_mul_overflow(n_values, int64_t{sizeof(float)}, &n_bytes)) {
        throw Error(DELTA_ARG, format("%" PRId64 " rows of %" PRId64 " columns are too many", shape.n_rows, shape.n_cols));
    }
    if (n_values != 0 && (src == nullptr || dst == nullptr)) {
        throw Error(DELTA_ARG, format("%s is null", src == nullptr ? "src" : "dst"));
    }
}

// About this many values make a chunk: enough to hide handing it out, few enough to balance.
constexpr int64_t kChunkValues = 16384;

template <class RowFn>
void for_each_row(RowsShape shape, RowFn fn) {
    if (shape.n_cols == 0) {
        return;  // the pointers may be null
    }
    const int64_t chunk = std::max<int64_t>(1, kChunkValues / shape.n_cols);
    const auto run = [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t row = begin; row < end; ++row) {
            fn(row);
        }
    };
    ThreadPool pool(shape.n_rows <= chunk ? 1 : shape.n_threads);  // no threads for what one does in microseconds
    pool.parallel_for(shape.n_rows, chunk, run);
}

// The smallest of the numbers that threads find, whatever their order.
class First {
   public:
    void found(int64_t index) {
        for (int64_t seen = first_.load(); index < seen && !first_.compare_exchange_weak(seen, index);) {
        }
    }
    bool before(int64_t index) const { return first_.load(std::memory_order_relaxed) < index; }
    int64_t get() const { return first_.load() == kNone ? -1 : first_.load(); }

   private:
    static constexpr int64_t kNone = INT64_MAX;
    std::atomic<int64_t> first_{kNone};
};

// Importance with mean one, and a little for the columns that have none: their codes are to be sensible too. All zero: all alike.
std::vector<float> weights(const float* importance, int64_t n_cols) {
    constexpr double kLeast = 1e-6;
    double total = 0;
    for (int64_t i = 0; i < n_cols; ++i) {
        if (!(importance[i] >= 0 && std::isfinite(importance[i]))) {
            throw Error(DELTA_ARG, format("importance of column %" PRId64 " is %g, expected a number of at least 0", i,
                                          static_cast<double>(importance[i])));
        }
        total += static_cast<double>(importance[i]);
    }
    std::vector<float> result(static_cast<size_t>(n_cols), 1.0f);
    for (int64_t i = 0; i < n_cols && total > 0; ++i) {
        const double relative = static_cast<double>(importance[i]) * static_cast<double>(n_cols) / total;
        result[static_cast<size_t>(i)] = static_cast<float>(std::max(relative, kLeast));
    }
    return result;
}

// Values converted at a time: whole blocks of every type, and little enough to stay in the first cache.
constexpr int64_t kTile = 2048;

constexpr uint32_t kMXFP4Id = 39;

}  // namespace

void quantize_rows(uint32_t type_id, void* dst, uint32_t src_type, const void* src, const float* importance, RowsShape shape,
                   int64_t* bad_value) {
    const Codecs& codecs = best_codecs();
    const TypeInfo& type = known_type(codecs, type_id);
    const TypeInfo& from = known_type(codecs, src_type);
    check_shape(type, shape, src, dst);
    if (from.block != 1) {
        throw Error(DELTA_UNSUPPORTED, format("rows of type %s cannot be quantized, expected F32, F16 or BF16", from.name));
    }
    if (type.from_float == nullptr) {
        throw Error(DELTA_UNSUPPORTED, format("this build can read %s but not encode it", type.name));
    }
    const std::vector<float> weight = importance != nullptr ? weights(importance, shape.n_cols) : std::vector<float>();
    const bool weighted = !weight.empty() && type.from_weighted != nullptr;
    const uint32_t largest = f32_bits(type.largest);
    const size_t src_bytes = row_bytes(from, shape.n_cols), dst_bytes = row_bytes(type, shape.n_cols);
    First lost;
    for_each_row(shape, [&](int64_t row) {
        const auto* in = static_cast<const uint8_t*>(src) + static_cast<size_t>(row) * src_bytes;
        auto* out = static_cast<uint8_t*>(dst) + static_cast<size_t>(row) * dst_bytes;
        alignas(64) float tile[kTile];
        for (int64_t first = 0; first < shape.n_cols && !lost.before(row * shape.n_cols); first += kTile) {
            const int64_t n = std::min(kTile, shape.n_cols - first);
            from.to_float(in + row_bytes(from, first), tile, n);
            if (codecs.largest_bits(tile, n) > largest) {
                const auto is_lost = [largest](float value) { return (f32_bits(value) & 0x7fffffff) > largest; };
                lost.found(row * shape.n_cols + first + (std::find_if(tile, tile + n, is_lost) - tile));
                return;
            }
            if (weighted) {
                type.from_weighted(tile, weight.data() + first, out + row_bytes(type, first), n);
            } else {
                type.from_float(tile, out + row_bytes(type, first), n);
            }
        }
    });
    if (const int64_t at = lost.get(); at >= 0) {
        if (bad_value != nullptr) {
            *bad_value = at;
        }
        float value = 0;
        from.to_float(static_cast<const uint8_t*>(src) + static_cast<size_t>(at) * static_cast<size_t>(from.block_bytes), &value, 1);
        throw Error(DELTA_NUMERIC, format("row %" PRId64 ", column %" PRId64 " is %g, which %s cannot hold", at / shape.n_cols,
                                          at % shape.n_cols, static_cast<double>(value), type.name));
    }
}

void dequantize_rows(uint32_t type_id, const void* src, float* dst, RowsShape shape) {
    const TypeInfo& type = known_type(best_codecs(), type_id);
    check_shape(type, shape, src, dst);
    const size_t bytes = row_bytes(type, shape.n_cols);
    for_each_row(shape, [&](int64_t row) {
        type.to_float(static_cast<const uint8_t*>(src) + static_cast<size_t>(row) * bytes, dst + row * shape.n_cols, shape.n_cols);
    });
}

void repack_mxfp4(const uint8_t* packed, const uint8_t* scales, void* dst, RowsShape shape, int64_t* bad_block) {
    const Codecs& codecs = best_codecs();
    const TypeInfo& type = known_type(codecs, kMXFP4Id);
    check_shape(type, shape, packed, dst);
    const int64_t n_blocks = shape.n_cols / type.block;
    if (shape.n_rows * n_blocks != 0 && scales == nullptr) {
        throw Error(DELTA_ARG, "scales is null");
    }
    First bad;
    for_each_row(shape, [&](int64_t row) {
        const int64_t at = row * n_blocks;
        if (const void* found = std::memchr(scales + at, 255, static_cast<size_t>(n_blocks)); found != nullptr) {
            bad.found(static_cast<const uint8_t*>(found) - scales);
            return;
        }
        codecs.repack_mxfp4(packed + 16 * at, scales + at, static_cast<uint8_t*>(dst) + row_bytes(type, at * type.block), n_blocks);
    });
    if (const int64_t at = bad.get(); at >= 0) {
        if (bad_block != nullptr) {
            *bad_block = at;
        }
        throw Error(DELTA_NUMERIC, format("row %" PRId64 ", block %" PRId64 ": scale 255 is no number", at / n_blocks, at % n_blocks));
    }
}

}  // namespace delta
