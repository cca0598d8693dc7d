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

void check_ids(std::span<const int32_t> tokens, size_t n_vocab) {
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

// Pieces as one timeline, with their rows. Throws Error.
struct Pieces {
    std::vector<int32_t> tokens;
    std::vector<FeatureRun> runs;

    Pieces(std::span<const delta_piece> pieces, const Model& model) {
        const auto n_embd = static_cast<size_t>(model.bound.hparams.n_embd);
        for (size_t i = 0; i < pieces.size(); ++i) {
            const delta_piece& piece = pieces[i];
            if (piece.n == 0 || (piece.tokens == nullptr) == (piece.features == nullptr)) {
                throw Error(DELTA_ARG, format("piece %zu: expected tokens or features, at least one, and not both", i));
            }
            check_length(tokens.size(), piece.n, model.params.n_ctx);
            if (piece.tokens != nullptr) {
                check_ids({piece.tokens, piece.n}, static_cast<size_t>(model.bound.hparams.n_vocab));
                tokens.insert(tokens.end(), piece.tokens, piece.tokens + piece.n);
                continue;
            }
            if (!std::all_of(piece.features, piece.features + piece.n * n_embd, [](float x) { return std::isfinite(x); })) {
                throw Error(DELTA_ARG, format("piece %zu: a feature is NaN or infinite", i));
            }
            runs.push_back({tokens.size(), tokens.size() + piece.n, piece.digest, 0, piece.features});
            tokens.insert(tokens.end(), piece.n, DELTA_FEATURE);
        }
    }
};

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

// Appends tokens, or features, to sessions, step by step.
class Computation {
   public:
    struct Work {
        Session* session;
        TimelineView input;              // of which positions `first` and following are to be appended
        size_t first;
        delta_logits_mode logits;
        size_t n_replay = 0;             // of those, leading ones that had been evaluated before
        size_t checkpoint_at = 0;        // a position to keep beside those of the interval; 0: none
        size_t interval_end = SIZE_MAX;  // no checkpoints of the interval beyond this position
        size_t n_done = 0;
        size_t n_now = 0;  // rows in the present step

        size_t n_rows() const { return input.tokens.size() - first; }
        size_t next() const { return first + n_done; }
    };

    Computation(SessionPool& pool, std::vector<Work> works) : pool_(pool), model_(*pool.model), works_(std::move(works)) {}

    // On failure the sessions have the tokens of the steps that ran, and no logits.
    void run(Progress progress) {
        begin();
        size_t done = 0, total = 0;
        for (const Work& work : works_) {
            total += work.n_rows();
        }
        while (done < total) {
            if (model_.cancel.load()) {
                cancelled(done, total);
            }
            plan_step();
            try {
                const auto start = std::chrono::steady_clock::now();
                model_.run(Step{step_tokens_, seqs_, output_rows_, model_.state_memory(), features_});
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
            session.runs_.reserve(session.runs_.size() + work.input.runs.size());  // appending never fails
            if (work.logits != DELTA_LOGITS_ALL) {
                continue;
            }
            const size_t n = work.n_rows() * session.n_vocab();
            try {
                session.all_rows_.resize(n);
            } catch (const std::bad_alloc&) {
                throw Error(DELTA_MEMORY,
                            format("no memory for the logits of %zu rows (%zu bytes)", work.n_rows(), n * sizeof(float)));
            }
        }
    }

    // Gives every session in turn as many rows as fit. The first with work left always gets one, so every step does something.
    void plan_step() {
        step_tokens_.clear();
        features_.clear();
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
            for (size_t i = work.next(); i < work.next() + work.n_now; ++i) {
                int32_t token = work.input.tokens[i];
                if (token == DELTA_FEATURE) {
                    token = feature_token(static_cast<int32_t>(features_.size()));
                    features_.push_back(feature_row(work.input.runs, i, static_cast<size_t>(model_.bound.hparams.n_embd)));
                }
                step_tokens_.push_back(token);
            }
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
        size_t n = std::min(work.n_rows() - work.n_done, rows_left);
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
        return work.logits == DELTA_LOGITS_LAST && work.n_done + n == work.n_rows() ? 1 : 0;
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
                const auto first = work.input.tokens.begin() + static_cast<std::ptrdiff_t>(work.next());
                session.tokens_.insert(session.tokens_.end(), first, first + static_cast<std::ptrdiff_t>(work.n_now));
                append_runs(session.runs_, work.input.runs, work.next(), work.next() + work.n_now);
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
            work.session->n_rows_ = work.logits == DELTA_LOGITS_ALL ? work.n_rows() : n_last;
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
    std::vector<const float*> features_;
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
    check_ids(tokens, n_vocab());
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
        works.push_back({.session = item.session, .input = {item.tokens}, .first = 0, .logits = item.logits});
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

size_t Session::restorable(size_t limit) const {
    if (live_ && tokens_.size() <= limit) {
        return tokens_.size();
    }
    const std::lock_guard pool_lock(pool_.mutex);
    return pool_.checkpoints.newest(slot_, limit);
}

// Goes back to the longest prefix of `wish` whose state there is, at most `keep_at_most` positions long.
Session::Rewind Session::rewind(const TimelineView& wish, size_t keep_at_most) {
    const size_t common = common_prefix(view(), wish);
    const size_t start = restorable(std::min(common, keep_at_most));
    const std::lock_guard lock(mutex_);
    drop_logits();
    if (live_ && start == tokens_.size()) {
        return {common, start};
    }

    const std::lock_guard pool_lock(pool_.mutex);
    if (start > 0) {
        pool_.checkpoints.restore(slot_, start, pool_.slots.recurrent(slot_));
    }
    pool_.checkpoints.drop_beyond(slot_, start);
    tokens_.resize(start);
    cut_runs(runs_, start);
    last_checkpoint_ = start;
    live_ = true;
    return {common, start};
}

TimelineView Session::check_tokens(std::span<const int32_t> tokens) const {
    if (tokens.empty()) {
        throw Error(DELTA_ARG, "sync needs at least one token");
    }
    check_length(0, tokens.size(), pool_.model->params.n_ctx);
    check_ids(tokens, n_vocab());
    return {tokens};
}

delta_sync_result Session::sync(std::span<const delta_piece> pieces, Progress progress) {
    if (pieces.empty()) {
        throw Error(DELTA_ARG, "sync needs at least one piece");
    }
    const Pieces wish(pieces, *pool_.model);
    return sync_checked({wish.tokens, wish.runs}, progress);
}

delta_sync_result Session::sync_checked(const TimelineView& wish, Progress progress) {
    const size_t n = wish.tokens.size();
    const auto [common, start] = rewind(wish, n - 1);
    count_reused(start);
    const size_t tail = n > kTail ? n - kTail : 0;
    // A caller may well generate by calling sync with one more token each time: no copy per token then.
    const bool one_more = n - start == 1;
    if (start > last_checkpoint_ && (!one_more || start >= last_checkpoint_ + kTail)) {
        keep_checkpoint();  // the end of a turn
    }
    Computation(pool_, {{.session = this,
                         .input = wish,
                         .first = start,
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
    if (const size_t from = restorable(length); has_features(runs_, from, length)) {
        throw Error(DELTA_STATE, format("cannot shorten the timeline to %zu: positions from %zu on would have to be computed again, and the features "
                                        "among them are not kept; use sync with pieces",
                                        length, from));
    }
    const std::vector<int32_t> tokens(tokens_.begin(), tokens_.begin() + static_cast<std::ptrdiff_t>(length));
    std::vector<FeatureRun> runs = runs_;
    cut_runs(runs, length);
    const TimelineView wish{tokens, runs};
    const auto [common, start] = rewind(wish, length);
    if (start == length) {
        return;
    }
    Computation(pool_, {{.session = this,
                         .input = wish,
                         .first = start,
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
    fork->runs_ = runs_;
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
