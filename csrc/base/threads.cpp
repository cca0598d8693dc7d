#include "base/threads.h"

#include <algorithm>
#include <optional>
#include <system_error>
#include <utility>

#include "base/cpu.h"
#include "base/error.h"
#include "base/placement.h"

namespace delta {
namespace {

constexpr uint64_t kStop = UINT64_MAX;
constexpr int32_t kSpins = 4000;  // some tens of microseconds: longer than the gap between two ops, short beside a token

// The pool whose job this thread is running, and its number there.
thread_local const ThreadPool* current_pool = nullptr;
thread_local int32_t current_thread = 0;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

void ThreadPool::check_size(int32_t n_threads) {
    if (n_threads < 0 || n_threads > kMaxThreads) {
        throw Error(DELTA_ARG, format("%d threads asked for, possible are 1 to %d (0: physical cores)", n_threads, kMaxThreads));
    }
}

int32_t ThreadPool::size(const ThreadOptions& options) {
    check_size(options.n_threads);
    return options.n_threads == 0 ? std::min(physical_cores(), kMaxThreads) : options.n_threads;
}

ThreadPool::ThreadPool(const ThreadOptions& options) : stretches_(static_cast<size_t>(size(options))) {
    const auto n = static_cast<int32_t>(stretches_.size());
    n_used_ = n;
    // With more threads than processors a spinning thread only keeps a working one away.
    spin_limit_ = n <= usable_cpus() ? kSpins : 0;
    workers_.reserve(static_cast<size_t>(n) - 1);
    try {
        for (int32_t i = 1; i < n; ++i) {
            workers_.emplace_back(&ThreadPool::worker, this, i, options);
        }
    } catch (const std::system_error& error) {
        const auto started = workers_.size();
        stop();
        throw Error(DELTA_DEVICE, format("cannot start thread %zu of %d: %s", started + 2, n, error.what()));
    }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
    {
        const std::lock_guard lock(sleep_mutex_);
        open_.store(kStop);
    }
    work_.notify_all();
    for (std::thread& worker : workers_) {
        worker.join();
    }
}

void ThreadPool::run_chunks(int32_t thread) {
    for (int32_t i = 0; i < n_used_; ++i) {
        Stretch& stretch = stretches_[static_cast<size_t>((thread + i) % n_used_)];
        for (;;) {
            const int64_t begin = stretch.next.fetch_add(chunk_, std::memory_order_relaxed);
            if (begin >= stretch.end) {
                break;
            }
            fn_(context_, begin, begin + std::min(chunk_, stretch.end - begin), thread);
        }
    }
}

void ThreadPool::parallel_for(int64_t n_items, int64_t chunk, Fn fn, void* context) {
    if (n_items <= 0) {
        return;
    }
    chunk = std::max<int64_t>(chunk, 1);
    const bool nested = current_pool == this;
    if (nested || n_used_ <= 1 || chunk >= n_items) {
        const int32_t thread = nested ? current_thread : 0;
        std::unique_lock<std::mutex> turn;
        if (!nested) {
            turn = std::unique_lock(caller_mutex_);
        }
        const ThreadPool* outer_pool = std::exchange(current_pool, this);
        const int32_t outer_thread = std::exchange(current_thread, thread);
        for (int64_t begin = 0; begin < n_items; begin += chunk) {
            fn(context, begin, begin + std::min(chunk, n_items - begin), thread);
        }
        current_pool = outer_pool;
        current_thread = outer_thread;
        return;
    }

    const std::lock_guard turn(caller_mutex_);
    fn_ = fn;
    context_ = context;
    chunk_ = chunk;
    int64_t first = 0;
    for (int32_t i = 0; i < n_used_; ++i) {
        // n_items / n_used_ each, and one more for the first of them, so that nothing overflows.
        const int64_t end = first + n_items / n_used_ + (i < n_items % n_used_ ? 1 : 0);
        stretches_[static_cast<size_t>(i)].next.store(first, std::memory_order_relaxed);
        stretches_[static_cast<size_t>(i)].end = end;
        first = end;
    }
    open_.store(++last_job_);
    if (sleepers_.load() != 0) {
        const std::lock_guard lock(sleep_mutex_);
        work_.notify_all();
    }

    const ThreadPool* outer_pool = std::exchange(current_pool, this);
    const int32_t outer_thread = std::exchange(current_thread, 0);
    run_chunks(0);
    current_pool = outer_pool;
    current_thread = outer_thread;

    // Nobody enters any more; wait only for those inside. A worker that never woke up is not waited for.
    open_.store(0);
    for (int32_t i = 0; i < spin_limit_ && active_.load() != 0; ++i) {
        pause();
    }
    if (active_.load() != 0) {
        std::unique_lock lock(sleep_mutex_);
        caller_sleeps_.store(true);
        done_.wait(lock, [this] { return active_.load() == 0; });
        caller_sleeps_.store(false);
    }
}

void ThreadPool::worker(int32_t thread, const ThreadOptions& options) {
    std::optional<InterleavedMemory> interleaved;
    if (options.interleave) {
        interleaved.emplace();
    }
    if (options.pin) {
        pin_this_thread(thread);
    }
    current_pool = this;
    current_thread = thread;
    uint64_t finished = 0;
    for (;;) {
        uint64_t job = open_.load();
        for (int32_t i = 0; i < spin_limit_ && (job == 0 || job == finished); ++i) {
            pause();
            job = open_.load();
        }
        if (job == 0 || job == finished) {
            std::unique_lock lock(sleep_mutex_);
            sleepers_.fetch_add(1);
            work_.wait(lock, [&] {
                job = open_.load();
                return job != 0 && job != finished;
            });
            sleepers_.fetch_sub(1);
        }
        if (job == kStop) {
            return;
        }
        active_.fetch_add(1);
        if (open_.load() == job) {
            if (thread < n_used_) {
                run_chunks(thread);
            }
            finished = job;
        }
        if (active_.fetch_sub(1) == 1 && caller_sleeps_.load()) {
            const std::lock_guard lock(sleep_mutex_);
            done_.notify_one();
        }
    }
}

}  // namespace delta
