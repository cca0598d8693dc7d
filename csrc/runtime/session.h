// A session: one timeline of tokens in one slot, and the ways to change it. Every change is made of steps; a step happens whole or
// not at all, so a timeline is always a valid prefix of what was asked for.
//
// Threads: one thread at a time computes (the caller holds Model::busy). Queries may come from any thread; they and the moments at
// which the computation changes what they read are under Session::mutex_. SessionPool::mutex comes after it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "runtime/checkpoints.h"
#include "runtime/model.h"
#include "runtime/state.h"
#include "runtime/timeline.h"

namespace delta {

// A model and what its sessions share.
struct SessionPool {
    explicit SessionPool(std::unique_ptr<Model> opened);
    delta_stats stats() const;  // totals over all sessions, closed ones included

    std::unique_ptr<Model> model;
    StatePool slots;
    CheckpointStore checkpoints;
    delta_stats totals{};
    int32_t n_visions = 0;     // towers opened beside the model
    mutable std::mutex mutex;  // slots, checkpoints, totals, n_visions
};

struct Progress {
    delta_progress_fn fn = nullptr;  // called after every step with the tokens evaluated so far and to evaluate in all
    void* user = nullptr;
};

class Session;

struct EvalItem {
    Session* session;
    std::span<const int32_t> tokens;
    delta_logits_mode logits;
};

// Appends to each session its tokens, all computed together. Each session at most once. Throws Error.
void eval(SessionPool& pool, std::span<const EvalItem> items);

class Session {
   public:
    explicit Session(SessionPool& pool);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    // Computation. Throws Error; what holds afterwards is in deltallama.h.
    delta_sync_result sync(std::span<const int32_t> tokens, Progress progress) { return sync_checked(check_tokens(tokens), progress); }
    delta_sync_result sync(std::span<const delta_piece> pieces, Progress progress);
    void truncate(size_t length);
    void checkpoint();
    std::unique_ptr<Session> fork();

    // Queries.
    size_t length() const;
    std::vector<int32_t> tokens() const;  // DELTA_FEATURE where there are features
    size_t n_logits() const;
    std::span<const float> logits(int64_t row) const;  // [n_vocab], borrowed
    void top(int64_t row, std::span<delta_top_token> best) const;
    int32_t sample(const delta_sampling_params& params);
    delta_stats stats() const;

    std::atomic<bool> computing{false};  // set by who holds Model::busy for this session: it cannot be freed meanwhile

   private:
    friend class Computation;
    friend void eval(SessionPool& pool, std::span<const EvalItem> items);
    friend void save_session(Session& session, const char* path);
    friend void load_session(Session& session, const char* path);

    struct Rewind {
        size_t common;  // leading positions that agree
        size_t start;   // of those, positions whose state there is
    };
    TimelineView view() const { return {tokens_, runs_}; }
    TimelineView check_tokens(std::span<const int32_t> tokens) const;  // throws Error
    delta_sync_result sync_checked(const TimelineView& wish, Progress progress);
    void check_append(std::span<const int32_t> tokens) const;  // throws Error
    void drop_logits();                                        // mutex_ is held
    size_t restorable(size_t limit) const;                     // longest prefix of at most that length whose state there is
    Rewind rewind(const TimelineView& wish, size_t keep_at_most);
    void keep_checkpoint();
    void count_reused(size_t n);
    void require_live(const char* wish) const;        // throws Error(STATE)
    std::span<const float> row(int64_t index) const;  // mutex_ is held
    size_t n_vocab() const { return static_cast<size_t>(pool_.model->bound.hparams.n_vocab); }

    SessionPool& pool_;
    int32_t slot_;
    mutable std::mutex mutex_;
    std::vector<int32_t> tokens_;   // the timeline, and where in it features are
    std::vector<FeatureRun> runs_;
    size_t n_rows_ = 0;            // rows with logits: 0, 1, or the rows of all_rows_
    std::vector<float> all_rows_;  // [n_rows_, n_vocab] when all rows were asked for
    std::vector<float> scratch_;   // of the sampler
    bool live_ = true;             // the slot holds the state after tokens_; false once a step has failed
    size_t last_checkpoint_ = 0;   // position the next checkpoint of the interval counts from
    delta_stats stats_{};
};

}  // namespace delta
