#include "runtime/session.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "runtime/sampler.h"

namespace delta {

namespace {

// A prompt gets a checkpoint this far before its end: the last token must be computed again to have its logits, and the next turn
// often renders the opening of the reply a little differently.
constexpr size_t kTail = 16;

void check_tokens(std::span<const int32_t> tokens, size_t n_vocab) {
    for (size_t i = 0; i < tokens.size(); ++i) {
        if (tokens[i] < 0 || static_cast<size_t>(tokens[i]) >= n_vocab) {
            throw Error(DELTA_ARG, format("token %d at index %zu is not in 0..%zu", tokens[i], i, n_vocab - 1));
        }
    }
}

void check_length(size_t before, size_t added, uint32_t n_ctx) {
    if (added > n_ctx - before) {
        throw Error(
            DELTA_CONTEXT_FULL,
            format("a timeline of %zu tokens and %zu more exceed the %u positions of a session (n_ctx)", before, added, n_ctx));
    }
}

}  // namespace

SessionPool::SessionPool(std::unique_ptr<Model> opened)
    : model(std::move(opened)),
      slots(*model),
      checkpoints(*model->backend, model->n_checkpoints == 0 ? nullptr : model->checkpoint_memory->data,
                  model->layout.recurrent_bytes(), model->n_checkpoints) {}

delta_stats SessionPool::stats() const {
    const std::lock_guard lock(mutex);
    delta_stats stats = totals;
    stats.size = sizeof stats;
    stats.n_checkpoints = checkpoints.count();
    stats.checkpoint_bytes = stats.n_checkpoints * checkpoints.bytes_each();
    return stats;
}

// -- steps ----------------------------------------------------------------------------------------------------------------------

// Appends tokens to sessions, step by step.
class Computation {
   public:
    struct Work {
        Session* session;
        std::span<const int32_t> tokens;
        delta_logits_mode logits;
        size_t n_replay = 0;             // leading tokens that had been evaluated before
        size_t checkpoint_at = 0;        // a position to keep beside those of the interval; 0: none
        size_t interval_end = SIZE_MAX;  // no checkpoints of the interval beyond this position
        size_t n_done = 0;
        size_t n_now = 0;  // rows in the present step
    };

    Computation(SessionPool& pool, std::vector<Work> works) : pool_(pool), model_(*pool.model), works_(std::move(works)) {}

    // On failure the sessions have the tokens of the steps that ran, and no logits.
    void run(Progress progress) {
        begin();
        size_t done = 0, total = 0;
        for (const Work& work : works_) {
            total += work.tokens.size();
        }
        while (done < total) {
            if (model_.cancel.load()) {
                cancelled(done, total);
            }
            plan_step();
            try {
                const auto start = std::chrono::steady_clock::now();
                model_.run(Step{step_tokens_, seqs_, output_rows_, model_.state_memory()});
                check_logits();
                elapsed_ns_ = static_cast<uint64_t>((std::chrono::steady_clock::now() - start) / std::chrono::nanoseconds(1));
            } catch (const Error& error) {
                mark_failed(error.status == DELTA_NUMERIC);
                throw;
            } catch (...) {
                mark_failed(false);
                throw;
            }
            done += step_tokens_.size();
            commit();
            if (progress.fn != nullptr && progress.fn(done, total, progress.user) != 0 && done < total) {
                cancelled(done, total);
            }
        }
        finish();
    }

   private:
    [[noreturn]] static void cancelled(size_t done, size_t total) {
        throw Error(DELTA_CANCELLED, format("cancelled after %zu of %zu tokens", done, total));
    }

    void begin() {
        for (Work& work : works_) {
            Session& session = *work.session;
            const std::lock_guard lock(session.mutex_);
            session.drop_logits();
            if (work.logits != DELTA_LOGITS_ALL) {
                continue;
            }
            const size_t n = work.tokens.size() * session.n_vocab();
            try {
                session.all_rows_.resize(n);
            } catch (const std::bad_alloc&) {
                throw Error(DELTA_MEMORY,
                            format("no memory for the logits of %zu rows (%zu bytes)", work.tokens.size(), n * sizeof(float)));
            }
        }
    }

    // Gives every session in turn as many rows as fit. The first with work left always gets one, so every step does something.
    void plan_step() {
        step_tokens_.clear();
        seqs_.clear();
        output_rows_.clear();
        size_t rows_left = model_.params.n_batch;
        size_t outputs_left = model_.params.n_outputs;
        for (Work& work : works_) {
            work.n_now = rows_of(work, rows_left, outputs_left);
            if (work.n_now == 0) {
                continue;
            }
            const Session& session = *work.session;
            if (session.tokens_.empty()) {
                pool_.slots.clear(session.slot_);
            }
            const size_t first = step_tokens_.size();
            const auto begin = work.tokens.begin() + static_cast<std::ptrdiff_t>(work.n_done);
            step_tokens_.insert(step_tokens_.end(), begin, begin + static_cast<std::ptrdiff_t>(work.n_now));
            seqs_.push_back({session.slot_, static_cast<int32_t>(first), static_cast<int32_t>(work.n_now),
                             static_cast<int32_t>(session.tokens_.size())});
            const size_t n_outputs = outputs_of(work, work.n_now);
            for (size_t i = work.n_now - n_outputs; i < work.n_now; ++i) {
                output_rows_.push_back(static_cast<int32_t>(first + i));
            }
            rows_left -= work.n_now;
            outputs_left -= n_outputs;
        }
    }

    size_t rows_of(const Work& work, size_t rows_left, size_t outputs_left) const {
        const size_t position = work.session->tokens_.size();
        size_t n = std::min(work.tokens.size() - work.n_done, rows_left);
        if (pool_.checkpoints.n_places() > 0) {
            if (due(work) > position) {
                n = std::min(n, due(work) - position);
            }
            if (work.checkpoint_at > position) {
                n = std::min(n, work.checkpoint_at - position);
            }
        }
        if (work.logits == DELTA_LOGITS_ALL) {
            n = std::min(n, outputs_left);
        }
        if (n > 0 && outputs_of(work, n) > outputs_left) {
            --n;
        }
        return n;
    }

    // Where the next checkpoint of the interval belongs.
    size_t due(const Work& work) const {
        const size_t position = work.session->last_checkpoint_ + model_.params.checkpoint_every;
        return position <= work.interval_end ? position : SIZE_MAX;
    }

    // Of the next `n` rows of `work` the last that many keep their logits.
    static size_t outputs_of(const Work& work, size_t n) {
        if (work.logits == DELTA_LOGITS_ALL) {
            return n;
        }
        return work.logits == DELTA_LOGITS_LAST && work.n_done + n == work.tokens.size() ? 1 : 0;
    }

    void check_logits() const {
        const size_t n_vocab = static_cast<size_t>(model_.bound.hparams.n_vocab);
        const float* logits = model_.logits();
        size_t row = 0;
        for (const Work& work : works_) {
            const size_t n_outputs = work.n_now == 0 ? 0 : outputs_of(work, work.n_now);
            for (size_t i = work.n_now - n_outputs; i < work.n_now; ++i, ++row) {
                for (size_t t = 0; t < n_vocab; ++t) {
                    const float x = logits[row * n_vocab + t];
                    if (std::isfinite(x)) {
                        continue;
                    }
                    throw Error(DELTA_NUMERIC, format("the logit of token %zu after position %zu is %g", t,
                                                      work.session->tokens_.size() + i, static_cast<double>(x)));
                }
            }
        }
    }

    void commit() {
        const float* logits = model_.logits();
        for (Work& work : works_) {
            if (work.n_now == 0) {
                continue;
            }
            Session& session = *work.session;
            const size_t n_outputs = outputs_of(work, work.n_now);
            const size_t n_replayed = std::min(work.n_done + work.n_now, work.n_replay) - std::min(work.n_done, work.n_replay);
            {
                const std::lock_guard lock(session.mutex_);
                const auto first = work.tokens.begin() + static_cast<std::ptrdiff_t>(work.n_done);
                session.tokens_.insert(session.tokens_.end(), first, first + static_cast<std::ptrdiff_t>(work.n_now));
                const size_t n_vocab = session.n_vocab();
                if (work.logits == DELTA_LOGITS_ALL) {
                    std::memcpy(&session.all_rows_[work.n_done * n_vocab], logits, n_outputs * n_vocab * sizeof(float));
                }
                if (n_outputs > 0) {
                    std::memcpy(pool_.slots.logits(session.slot_), logits + (n_outputs - 1) * n_vocab, n_vocab * sizeof(float));
                }
                logits += n_outputs * n_vocab;
                session.stats_.n_computed += work.n_now;
                session.stats_.n_replayed += n_replayed;
                session.stats_.n_steps += 1;
                session.stats_.compute_ns += elapsed_ns_;
            }
            work.n_done += work.n_now;
            const std::lock_guard lock(pool_.mutex);
            pool_.totals.n_computed += work.n_now;
            pool_.totals.n_replayed += n_replayed;
        }
        {
            const std::lock_guard lock(pool_.mutex);
            pool_.totals.n_steps += 1;
            pool_.totals.compute_ns += elapsed_ns_;
        }
        for (Work& work : works_) {
            Session& session = *work.session;
            const size_t position = session.tokens_.size();
            if (work.n_now == 0) {
                continue;
            }
            if (position == work.checkpoint_at || position >= due(work)) {
                session.keep_checkpoint();
            }
        }
    }

    void finish() {
        for (const Work& work : works_) {
            const std::lock_guard lock(work.session->mutex_);
            const size_t n_last = work.logits == DELTA_LOGITS_LAST ? 1 : 0;
            work.session->n_rows_ = work.logits == DELTA_LOGITS_ALL ? work.tokens.size() : n_last;
        }
    }

    // What the slots hold after a failed step is unknown. NaN may be older than the first row that shows it, so then the checkpoints
    // are not to be trusted either.
    void mark_failed(bool numeric) {
        for (const Work& work : works_) {
            if (work.n_now == 0) {
                continue;
            }
            work.session->live_ = false;
            const std::lock_guard lock(pool_.mutex);
            if (numeric) {
                pool_.checkpoints.drop_all(work.session->slot_);
            }
        }
    }

    SessionPool& pool_;
    Model& model_;
    std::vector<Work> works_;
    std::vector<int32_t> step_tokens_;
    std::vector<SeqRows> seqs_;
    std::vector<int32_t> output_rows_;
    uint64_t elapsed_ns_ = 0;
};

void Session::check_append(std::span<const int32_t> tokens) const {
    if (tokens.empty()) {
        throw Error(DELTA_ARG, "eval needs at least one token");
    }
    require_live("eval");
    check_length(tokens_.size(), tokens.size(), pool_.model->params.n_ctx);
    check_tokens(tokens, n_vocab());
}

void eval(SessionPool& pool, std::span<const EvalItem> items) {
    std::vector<Computation::Work> works;
    for (const EvalItem& item : items) {
        for (const Computation::Work& other : works) {
            if (other.session == item.session) {
                throw Error(DELTA_ARG, format("item %zu: its session occurs twice in the batch", works.size()));
            }
        }
        try {
            item.session->check_append(item.tokens);
        } catch (const Error& error) {
            if (items.size() == 1) {
                throw;
            }
            throw Error(error.status, format("item %zu: %s", works.size(), error.what()));
        }
        works.push_back({.session = item.session, .tokens = item.tokens, .logits = item.logits});
    }
    Computation(pool, std::move(works)).run({});
}

// -- session --------------------------------------------------------------------------------------------------------------------

Session::Session(SessionPool& pool) : pool_(pool) {
    const std::lock_guard lock(pool_.mutex);
    tokens_.reserve(pool_.model->params.n_ctx);  // appending never fails
    slot_ = pool_.slots.acquire();
}

Session::~Session() {
    const std::lock_guard lock(pool_.mutex);
    pool_.checkpoints.drop_all(slot_);
    pool_.slots.release(slot_);
}

// Goes back to the longest prefix of `tokens` whose state there is, at most `keep_at_most` tokens long.
Session::Rewind Session::rewind(std::span<const int32_t> tokens, size_t keep_at_most) {
    const size_t common = static_cast<size_t>(
        std::mismatch(tokens_.begin(), tokens_.end(), tokens.begin(), tokens.end()).first - tokens_.begin());
    const size_t limit = std::min(common, keep_at_most);
    const std::lock_guard lock(mutex_);
    drop_logits();
    if (live_ && tokens_.size() <= limit) {
        return {common, tokens_.size()};
    }

    const std::lock_guard pool_lock(pool_.mutex);
    const size_t start = pool_.checkpoints.newest(slot_, limit);
    if (start > 0) {
        pool_.checkpoints.restore(slot_, start, pool_.slots.recurrent(slot_));
    }
    pool_.checkpoints.drop_beyond(slot_, start);
    tokens_.resize(start);
    last_checkpoint_ = start;
    live_ = true;
    return {common, start};
}

delta_sync_result Session::sync(std::span<const int32_t> tokens, Progress progress) {
    if (tokens.empty()) {
        throw Error(DELTA_ARG, "sync needs at least one token");
    }
    check_length(0, tokens.size(), pool_.model->params.n_ctx);
    check_tokens(tokens, n_vocab());

    const auto [common, start] = rewind(tokens, tokens.size() - 1);
    count_reused(start);
    const size_t n = tokens.size();
    const size_t tail = n > kTail ? n - kTail : 0;
    // A caller may well generate by calling sync with one more token each time: no copy per token then.
    const bool one_more = n - start == 1;
    if (start > last_checkpoint_ && (!one_more || start >= last_checkpoint_ + kTail)) {
        keep_checkpoint();  // the end of a turn
    }
    Computation(pool_, {{.session = this,
                         .tokens = tokens.subspan(start),
                         .logits = DELTA_LOGITS_LAST,
                         .n_replay = common - start,
                         .checkpoint_at = start < tail ? tail : 0,
                         .interval_end = one_more ? SIZE_MAX : tail}})
        .run(progress);
    if (!one_more) {
        // With a single place per session the checkpoint before the end serves more wishes than one at the end.
        if (pool_.checkpoints.n_places() >= 2 * size_t{pool_.model->params.n_sessions}) {
            keep_checkpoint();
        }
        last_checkpoint_ = n;
    }
    return {.size = sizeof(delta_sync_result), .n_reused = start, .n_computed = n - start, .n_replayed = common - start};
}

void Session::truncate(size_t length) {
    if (length > tokens_.size()) {
        throw Error(DELTA_ARG, format("cannot shorten a timeline of %zu tokens to %zu", tokens_.size(), length));
    }
    const std::vector<int32_t> tokens(tokens_.begin(), tokens_.begin() + static_cast<std::ptrdiff_t>(length));
    const auto [common, start] = rewind(tokens, length);
    if (start == length) {
        return;
    }
    Computation(pool_, {{.session = this,
                         .tokens = std::span(tokens).subspan(start),
                         .logits = DELTA_LOGITS_LAST,
                         .n_replay = common - start}})
        .run({});
}

void Session::drop_logits() {
    n_rows_ = 0;
    std::vector<float>().swap(all_rows_);
}

void Session::checkpoint() {
    require_live("a checkpoint");
    if (pool_.checkpoints.n_places() == 0) {
        throw Error(DELTA_STATE, format("there is no room for checkpoints: one takes %zu bytes, checkpoint_bytes is %llu",
                                        pool_.checkpoints.bytes_each(),
                                        static_cast<unsigned long long>(pool_.model->params.checkpoint_bytes)));
    }
    if (!tokens_.empty()) {
        keep_checkpoint();  // the empty timeline needs none
    }
}

void Session::keep_checkpoint() {
    const std::lock_guard lock(pool_.mutex);
    pool_.checkpoints.save(slot_, tokens_.size(), pool_.slots.recurrent(slot_));
    last_checkpoint_ = tokens_.size();
}

void Session::count_reused(size_t n) {
    const std::lock_guard lock(mutex_);
    stats_.n_reused += n;
    const std::lock_guard pool_lock(pool_.mutex);
    pool_.totals.n_reused += n;
}

std::unique_ptr<Session> Session::fork() {
    require_live("a fork");
    auto fork = std::make_unique<Session>(pool_);
    pool_.slots.copy(slot_, fork->slot_, tokens_.size());
    fork->tokens_ = tokens_;
    fork->last_checkpoint_ = last_checkpoint_;
    if (n_rows_ > 0) {
        std::memcpy(pool_.slots.logits(fork->slot_), pool_.slots.logits(slot_), n_vocab() * sizeof(float));
        fork->n_rows_ = 1;
    }
    const std::lock_guard lock(pool_.mutex);
    pool_.checkpoints.share(slot_, fork->slot_);
    return fork;
}

void Session::require_live(const char* wish) const {
    if (live_ || tokens_.empty()) {
        return;
    }
    throw Error(
        DELTA_STATE,
        format("%s is not possible: a step of this session failed and its state is lost; sync or truncate first", wish));
}

// -- queries --------------------------------------------------------------------------------------------------------------------

size_t Session::length() const {
    const std::lock_guard lock(mutex_);
    return tokens_.size();
}

std::vector<int32_t> Session::tokens() const {
    const std::lock_guard lock(mutex_);
    return tokens_;
}

size_t Session::n_logits() const {
    const std::lock_guard lock(mutex_);
    return n_rows_;
}

std::span<const float> Session::row(int64_t index) const {
    if (n_rows_ == 0) {
        throw Error(DELTA_STATE, "there are no logits: the last computation of this session kept none");
    }
    const auto n = static_cast<int64_t>(n_rows_);
    if (index < -1 || index >= n) {
        throw Error(DELTA_ARG, format("row %lld is not in 0..%lld (-1: the last)", static_cast<long long>(index),
                                      static_cast<long long>(n - 1)));
    }
    if (index == -1 || index == n - 1) {
        return {pool_.slots.logits(slot_), n_vocab()};
    }
    return {all_rows_.data() + static_cast<size_t>(index) * n_vocab(), n_vocab()};
}

std::span<const float> Session::logits(int64_t index) const {
    const std::lock_guard lock(mutex_);
    return row(index);
}

void Session::top(int64_t index, std::span<delta_top_token> best) const {
    if (best.empty() || best.size() > n_vocab()) {
        throw Error(DELTA_ARG, format("n is %zu, not in 1..%zu", best.size(), n_vocab()));
    }
    const std::lock_guard lock(mutex_);
    top_tokens(row(index), best);
}

int32_t Session::sample(const delta_sampling_params& params) {
    check_sampling(params, static_cast<int32_t>(n_vocab()));
    const std::lock_guard lock(mutex_);
    return sample_token(row(-1), tokens_, params, scratch_);
}

delta_stats Session::stats() const {
    const std::lock_guard lock(mutex_);
    delta_stats stats = stats_;
    stats.size = sizeof stats;
    const std::lock_guard pool_lock(pool_.mutex);
    stats.n_checkpoints = pool_.checkpoints.count(slot_);
    stats.checkpoint_bytes = stats.n_checkpoints * pool_.checkpoints.bytes_each();
    return stats;
}

}  // namespace delta
