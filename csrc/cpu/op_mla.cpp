// latent_append and mla_attention.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <span>

#include "cpu/ops.h"

namespace delta {
namespace {

size_t append_scratch_bytes(const Op& op) {
    Workspace space;
    space.take<float>(static_cast<size_t>(op.in[0].cols));
    return space.used();
}

// The sequence that a row of the step belongs to.
const SeqRows& sequence_of(const Step& step, int64_t row) {
    const auto after = std::upper_bound(step.seqs.begin(), step.seqs.end(), row,
                                        [](int64_t r, const SeqRows& seq) { return r < seq.first_row; });
    return *(after - 1);
}

}  // namespace

void cpu_latent_append(CpuBackend& self, const FloatCall& c) {
    const NormParams& p = c.op->get<NormParams>();
    const StateLayout& layout = *c.step->state.layout;
    const int64_t latent = c.op->w[0]->cols;
    const int64_t width = c.op->in[0].cols;
    const size_t scratch_bytes = append_scratch_bytes(*c.op);
    self.parallel(c.n_rows, 8 * width, [&](int64_t begin, int64_t end, int32_t thread) {
        auto* row = reinterpret_cast<float*>(static_cast<uint8_t*>(c.workspace) + static_cast<size_t>(thread) * scratch_bytes);
        for (int64_t r = begin; r < end; ++r) {
            const SeqRows& seq = sequence_of(*c.step, r);
            const float* kv = c.in[0] + r * width;
            self.kernels.rms_norm(kv, reinterpret_cast<const float*>(c.op->w[0]->data), latent, p.eps, row);
            std::memcpy(row + latent, kv + latent, static_cast<size_t>(width - latent) * sizeof(float));
            const auto position = static_cast<size_t>(seq.position + r - seq.first_row);
            layout.cache_type->from_float(row, c.step->state.latents(seq.slot, p.mla) + position * layout.latent_row_bytes(), width);
        }
    });
}

size_t cpu_latent_append_workspace(const CpuBackend& self, const Op& op) {
    return append_scratch_bytes(op) * static_cast<size_t>(self.n_threads());
}

// mla_attention. The result of a query depends on nothing but its query and the keys it sees: these come in blocks, which `attend`
// sums up, and in chunks of blocks, whose results are merged in their order. Both begin at fixed positions.
namespace {

constexpr int32_t kKeyChunk = 256;  // positions that one thread works through; whole blocks
static_assert(kKeyChunk % kKeyBlock == 0);
constexpr int64_t kPartsPerThread = 4;  // chunks in flight, for tiles of kMaxQueries queries

// Queries that meet every block of keys together, while it is in the cache: some heads of consecutive rows of a sequence.
struct Tile {
    const SeqRows* seq = nullptr;
    int64_t row = 0;  // of the step
    int32_t n_rows = 0;
    int32_t head = 0;
    int32_t n_heads = 0;

    int32_t n_queries() const { return n_rows * n_heads; }
    // Keys that row i of the tile sees.
    int64_t visible(int64_t i) const { return seq->position + (row + i - seq->first_row) + 1; }
    int64_t n_keys() const { return visible(n_rows - 1); }
    // Where query i of the tile is among all of the step.
    int64_t index(int32_t i, int32_t n_head) const { return (row + i / n_heads) * n_head + head + i % n_heads; }
};

// All queries of a step as tiles.
struct Tiles {
    std::span<const SeqRows> seqs;
    int32_t n_head;
    int32_t groups;   // of heads
    int32_t heads;    // of a tile, at most
    int32_t rows;     // of a tile, at most

    Tiles(std::span<const SeqRows> of, int32_t n_heads) : seqs(of), n_head(n_heads) {
        groups = (n_head + kMaxQueries - 1) / kMaxQueries;
        heads = (n_head + groups - 1) / groups;
        rows = 1;
        for (const SeqRows& seq : seqs) {
            rows = std::clamp(seq.n_rows, rows, kMaxQueries / heads);
        }
    }
    int64_t count(const SeqRows& seq) const { return int64_t{groups} * ((seq.n_rows + rows - 1) / rows); }
    int64_t count() const {
        return std::accumulate(seqs.begin(), seqs.end(), int64_t{0}, [&](int64_t n, const SeqRows& seq) { return n + count(seq); });
    }
    Tile operator[](int64_t index) const {
        const SeqRows* seq = seqs.data();
        for (; index >= count(*seq); ++seq) {
            index -= count(*seq);
        }
        Tile tile;
        tile.seq = seq;
        const int64_t first = index / groups * rows;
        tile.row = seq->first_row + first;
        tile.n_rows = static_cast<int32_t>(std::min<int64_t>(rows, seq->n_rows - first));
        tile.head = static_cast<int32_t>(index % groups) * heads;
        tile.n_heads = std::min(heads, n_head - tile.head);
        return tile;
    }
};

// What a step needs while it runs. The results so far of all its queries, too: their y is the output.
struct AttendSpace {
    float* keys;         // [n_threads, kKeyBlock, pad] decoded
    float* queries;      // [n_threads, kMaxQueries, pad]
    float* scores;       // [n_threads, kMaxQueries, kKeyBlock]
    AttendPart parts;    // [kPartsPerThread * n_threads * kMaxQueries], y with rows of `pad`
    AttendPart results;  // [n_rows * n_head], y not used

    AttendSpace(Workspace& space, const AttentionParams& p, int32_t n_threads, int32_t n_rows) {
        const auto threads = static_cast<size_t>(n_threads);
        const auto pad = static_cast<size_t>(pad_to_lanes(p.latent + p.rope));
        keys = space.take<float>(threads * kKeyBlock * pad);
        queries = space.take<float>(threads * kMaxQueries * pad);
        scores = space.take<float>(threads * kMaxQueries * kKeyBlock);
        const size_t n_parts = kPartsPerThread * threads * kMaxQueries;
        parts = {space.take<float>(n_parts * pad), space.take<float>(n_parts), space.take<float>(n_parts)};
        const size_t n_results = static_cast<size_t>(n_rows) * static_cast<size_t>(p.n_head);
        results = {nullptr, space.take<float>(n_results), space.take<float>(n_results)};
    }
};

class Attention {
   public:
    Attention(CpuBackend& backend, const FloatCall& call, Workspace workspace)
        : self_(backend),
          c_(call),
          p_(call.op->get<AttentionParams>()),
          pad_(pad_to_lanes(p_.latent + p_.rope)),
          tiles_(call.step->seqs, p_.n_head),
          n_tiles_(tiles_.count()),
          space_(workspace, p_, backend.n_threads(), call.n_rows) {}

    void run() {
        int64_t longest = 0;
        for (const SeqRows& seq : c_.step->seqs) {
            longest = std::max<int64_t>(longest, seq.position + seq.n_rows);
        }
        const int64_t n_chunks = (longest + kKeyChunk - 1) / kKeyChunk;
        const int64_t n_threads = self_.pool.n_used();
        // Parts cost memory traffic: only where there are too few tiles for the threads.
        if (n_chunks > 1 && n_threads > 1 && n_tiles_ < 4 * n_threads) {
            by_chunks(n_chunks);
        } else {
            by_tiles();
        }
    }

   private:
    void by_tiles() {
        self_.pool.parallel_for(n_tiles_, 1, [&](int64_t begin, int64_t end, int32_t thread) {
            const int64_t part = int64_t{thread} * kMaxQueries;
            for (int64_t i = begin; i < end; ++i) {
                const Tile tile = tiles_[i];
                gather(tile, thread);
                for (int64_t chunk = 0; chunk * kKeyChunk < tile.n_keys(); ++chunk) {
                    attend(tile, chunk, thread, part);
                    for (int32_t q = 0; q < tile.n_queries(); ++q) {
                        merge(tile, chunk, q, part + q);
                    }
                }
                for (int32_t q = 0; q < tile.n_queries(); ++q) {
                    finish(tile, q);
                }
            }
        });
    }

    // Items are (tile, chunk); as many at a time as there are parts for.
    void by_chunks(int64_t n_chunks) {
        const int64_t size = int64_t{tiles_.rows} * tiles_.heads;  // queries of a part
        const int64_t n_parts = kPartsPerThread * self_.n_threads() * kMaxQueries / size;
        const int64_t n_items = n_tiles_ * n_chunks;
        for (int64_t first = 0; first < n_items; first += n_parts) {
            const int64_t last = std::min(first + n_parts, n_items);
            self_.pool.parallel_for(last - first, 1, [&](int64_t begin, int64_t end, int32_t thread) {
                for (int64_t i = begin; i < end; ++i) {
                    const Tile tile = tiles_[(first + i) / n_chunks];
                    const int64_t chunk = (first + i) % n_chunks;
                    if (chunk * kKeyChunk < tile.n_keys()) {
                        gather(tile, thread);
                        attend(tile, chunk, thread, i * size);
                    }
                }
            });
            const int64_t first_tile = first / n_chunks;
            const int64_t n_queries = ((last - 1) / n_chunks + 1 - first_tile) * size;
            self_.parallel(n_queries, int64_t{2} * p_.latent * std::min(n_parts, n_chunks), [&](int64_t begin, int64_t end, int32_t) {
                for (int64_t i = begin; i < end; ++i) {
                    const int64_t index = first_tile + i / size;
                    const Tile tile = tiles_[index];
                    const auto q = static_cast<int32_t>(i % size);
                    if (q >= tile.n_queries()) {
                        continue;
                    }
                    const int64_t item = index * n_chunks;  // the tile's first
                    for (int64_t at = std::max(first, item); at < std::min(last, item + n_chunks); ++at) {
                        merge(tile, at - item, q, (at - first) * size + q);
                    }
                    if (item + n_chunks <= last) {
                        finish(tile, q);
                    }
                }
            });
        }
    }

    float* queries(int32_t thread) const { return space_.queries + int64_t{thread} * kMaxQueries * pad_; }
    float* keys(int32_t thread) const { return space_.keys + int64_t{thread} * kKeyBlock * pad_; }
    AttendPart part(int64_t i) const { return {space_.parts.y + i * pad_, space_.parts.best + i, space_.parts.sum + i}; }
    AttendPart result(const Tile& tile, int32_t query) const {
        const int64_t i = tile.index(query, p_.n_head);
        return {c_.out + i * p_.latent, space_.results.best + i, space_.results.sum + i};
    }

    // The queries of a tile: the absorbed part, then the rest.
    void gather(const Tile& tile, int32_t thread) const {
        const int64_t q_stride = c_.op->in[1].cols / p_.n_head;
        for (int32_t q = 0; q < tile.n_queries(); ++q) {
            float* query = queries(thread) + int64_t{q} * pad_;
            const int64_t i = tile.index(q, p_.n_head);
            std::memcpy(query, c_.in[0] + i * p_.latent, static_cast<size_t>(p_.latent) * sizeof(float));
            std::memcpy(query + p_.latent, c_.in[1] + (i + 1) * q_stride - p_.rope, static_cast<size_t>(p_.rope) * sizeof(float));
            std::fill(query + p_.latent + p_.rope, query + pad_, 0.0F);
        }
    }

    // The gathered queries of a tile and the keys of a chunk, as far as each query sees them.
    void attend(const Tile& tile, int64_t chunk, int32_t thread, int64_t first_part) const {
        const StateLayout& layout = *c_.step->state.layout;
        const CpuType type = cpu_type(*layout.cache_type);
        const size_t row_bytes = layout.latent_row_bytes();
        const uint8_t* cache = c_.step->state.latents(tile.seq->slot, p_.mla);
        const int64_t width = p_.latent + p_.rope;
        // Vectors read whole rows of the cache. Others, and those that take long to decode, are copied.
        const bool direct = width == pad_ && type < kFloatTypes && (type != kF16 || self_.kernels.fast_half);
        const auto widen = type == kQ8_0 ? self_.kernels.widen_q8_0 : self_.kernels.widen[type];
        const AttendPart parts = part(first_part);
        std::fill_n(parts.y, int64_t{tile.n_queries()} * pad_, 0.0F);
        std::fill_n(parts.best, tile.n_queries(), -INFINITY);
        std::fill_n(parts.sum, tile.n_queries(), 0.0F);
        float* const block = keys(thread);
        for (int32_t k = 0; k < kKeyBlock && !direct; ++k) {
            std::fill(block + int64_t{k} * pad_ + width, block + int64_t{k + 1} * pad_, 0.0F);
        }

        const int64_t end = std::min((chunk + 1) * kKeyChunk, tile.n_keys());
        for (int64_t t = chunk * kKeyChunk; t < end; t += kKeyBlock) {
            const int64_t n_keys = std::min<int64_t>(kKeyBlock, end - t);
            const uint8_t* rows = cache + static_cast<size_t>(t) * row_bytes;
            for (int64_t k = 0; k < n_keys && !direct; ++k) {
                widen(rows + static_cast<size_t>(k) * row_bytes, block + k * pad_, width);
            }
            // Rows that see all of these keys go together, others one by one: what a row does not see, not even a NaN, may reach it.
            for (int32_t row = 0; row < tile.n_rows;) {
                const int64_t seen = std::min(tile.visible(row) - t, n_keys);
                const int32_t next = seen == n_keys ? tile.n_rows : row + 1;
                if (seen > 0) {
                    const int32_t q = row * tile.n_heads;
                    AttendCall call;
                    call.keys = direct ? rows : reinterpret_cast<const uint8_t*>(block);
                    call.key_stride = direct ? row_bytes : static_cast<size_t>(pad_) * sizeof(float);
                    call.queries = queries(thread) + int64_t{q} * pad_;
                    call.y = parts.y + int64_t{q} * pad_;
                    call.best = parts.best + q;
                    call.sum = parts.sum + q;
                    call.scores = space_.scores + int64_t{thread} * kMaxQueries * kKeyBlock;
                    call.n_keys = static_cast<int32_t>(seen);
                    call.n_queries = (next - row) * tile.n_heads;
                    call.latent = p_.latent;
                    call.pad = pad_;
                    call.scale = static_cast<float>(p_.scale);
                    // The next block, of this chunk or, as threads go through them in order, of the next; once.
                    if (row == 0 && t + kKeyBlock < tile.n_keys()) {
                        call.next = rows + kKeyBlock * row_bytes;
                        call.next_bytes = static_cast<size_t>(std::min<int64_t>(kKeyBlock, tile.n_keys() - t - kKeyBlock)) * row_bytes;
                    }
                    self_.kernels.attend[direct ? type : kF32](call);
                }
                row = next;
            }
        }
    }

    // Adds a chunk to the result of a query that sees some of it.
    void merge(const Tile& tile, int64_t chunk, int32_t query, int64_t from) const {
        const AttendPart result = this->result(tile, query);
        if (chunk == 0) {
            std::memcpy(result.y, part(from).y, static_cast<size_t>(p_.latent) * sizeof(float));
            *result.best = *part(from).best;
            *result.sum = *part(from).sum;
        } else if (chunk * kKeyChunk < tile.visible(query / tile.n_heads)) {
            self_.kernels.attend_merge(part(from), p_.latent, result);
        }
    }

    void finish(const Tile& tile, int32_t query) const {
        const AttendPart result = this->result(tile, query);
        for (int32_t i = 0; i < p_.latent; ++i) {
            result.y[i] /= *result.sum;
        }
    }

    CpuBackend& self_;
    const FloatCall& c_;
    const AttentionParams& p_;
    int32_t pad_;
    Tiles tiles_;
    int64_t n_tiles_;
    AttendSpace space_;
};

}  // namespace

void cpu_mla_attention(CpuBackend& self, const FloatCall& c) { Attention(self, c, Workspace(c.workspace)).run(); }

size_t cpu_mla_attention_workspace(const CpuBackend& self, const Op& op, int32_t n_rows) {
    Workspace space;
    AttendSpace(space, op.get<AttentionParams>(), self.n_threads(), n_rows);
    return space.used();
}

}  // namespace delta
