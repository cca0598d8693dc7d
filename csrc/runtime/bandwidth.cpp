#include "runtime/bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <span>
#include <vector>

#include "base/cpu.h"
#include "base/error.h"
#include "base/threads.h"

namespace delta {
namespace {

constexpr uint64_t kMostBytes = 4ULL << 30;
constexpr uint64_t kChunkBytes = 1ULL << 20;
constexpr int kPasses = 7;
constexpr size_t kChains = 8;  // sums that do not wait for each other

using Chunk = std::span<const uint8_t>;
// Unaligned: tensors begin where the file's alignment puts them.
using Lanes = uint64_t __attribute__((vector_size(32), aligned(1), may_alias));

std::vector<Chunk> chunks_of(const GgufSet& file) {
    std::vector<Chunk> chunks;
    uint64_t n_bytes = 0;
    for (const GgufTensor& tensor : file.tensors()) {
        for (uint64_t at = 0; at < tensor.n_bytes && n_bytes < kMostBytes; at += kChunkBytes) {
            chunks.emplace_back(tensor.data + at, std::min(kChunkBytes, tensor.n_bytes - at));
            n_bytes += chunks.back().size();
        }
    }
    return chunks;
}

[[gnu::always_inline]] inline uint64_t sum_lanes(Chunk chunk) {
    Lanes sums[kChains] = {};
    const auto* lanes = reinterpret_cast<const Lanes*>(chunk.data());
    const size_t n_lanes = chunk.size() / sizeof(Lanes);
    size_t i = 0;
    for (; i + kChains <= n_lanes; i += kChains) {
        for (size_t j = 0; j < kChains; ++j) {
            sums[j] += lanes[i + j];
        }
    }
    for (; i < n_lanes; ++i) {
        sums[0] += lanes[i];
    }
    uint64_t total = 0;
    for (const Lanes& sum : sums) {
        total += sum[0] + sum[1] + sum[2] + sum[3];
    }
    for (size_t at = n_lanes * sizeof(Lanes); at < chunk.size(); ++at) {
        total += chunk[at];
    }
    return total;
}

uint64_t sum_generic(Chunk chunk) { return sum_lanes(chunk); }

#if defined(__x86_64__)
[[gnu::target("avx2")]] uint64_t sum_avx2(Chunk chunk) { return sum_lanes(chunk); }
#endif

auto choose_sum() {
#if defined(__x86_64__)
    return cpu_features().avx2 ? sum_avx2 : sum_generic;
#else
    return sum_generic;
#endif
}

}  // namespace

double measure_read_bandwidth(const GgufSet& file, int32_t n_threads) {
    const std::vector<Chunk> chunks = chunks_of(file);
    uint64_t n_bytes = 0;
    for (const Chunk& chunk : chunks) {
        n_bytes += chunk.size();
    }
    if (n_bytes == 0) {
        throw Error(DELTA_FORMAT, format("%s: no tensor has any bytes to read", file.path().c_str()));
    }
    ThreadPool pool(n_threads);
    const auto sum = choose_sum();
    std::atomic<uint64_t> total{0};  // of no meaning, but the reads must not be left out
    const auto pass = [&] {
        const auto start = std::chrono::steady_clock::now();
        pool.parallel_for(static_cast<int64_t>(chunks.size()), 1, [&](int64_t begin, int64_t end, int32_t) {
            uint64_t part = 0;
            for (int64_t i = begin; i < end; ++i) {
                part += sum(chunks[static_cast<size_t>(i)]);
            }
            total.fetch_add(part, std::memory_order_relaxed);
        });
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    pass();
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < kPasses; ++i) {
        best = std::min(best, pass());
    }
    return static_cast<double>(n_bytes) / std::max(best, 1e-9);  // a clock that did not move is not infinitely fast memory
}

}  // namespace delta
