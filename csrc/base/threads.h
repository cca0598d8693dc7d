// The engine's thread pool: fork and join. Each thread has a stretch of the items of its own, so that it reads memory in one direction,
// and takes from the stretches of others when that is done. Which thread gets which chunk varies; a caller whose chunks do not depend
// on each other gets the same result for every number of threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace delta {

struct ThreadOptions {
    int32_t n_threads = 0;    // 0: physical cores
    bool pin = false;         // each thread but the caller's on a processor of its own
    bool interleave = false;  // what these threads are the first to touch is spread over the memory nodes
};

class ThreadPool {
   public:
    // Items begin .. end - 1 on thread `thread` (0 .. n_threads - 1, for per-thread scratch). Must not throw.
    using Fn = void (*)(void* context, int64_t begin, int64_t end, int32_t thread);

    static constexpr int32_t kMaxThreads = 1024;
    // Throws Error(ARG) unless 0 <= n_threads <= kMaxThreads.
    static void check_size(int32_t n_threads);

    // 0: physical cores. The calling thread is one of them. Throws Error (ARG, DEVICE).
    explicit ThreadPool(const ThreadOptions& options);
    explicit ThreadPool(int32_t n_threads) : ThreadPool(ThreadOptions{.n_threads = n_threads}) {}
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int32_t n_threads() const { return static_cast<int32_t>(workers_.size()) + 1; }
    // From now on only this many threads work, at most n_threads(). Not while a job runs.
    void use(int32_t n_threads) { n_used_ = n_threads; }
    int32_t n_used() const { return n_used_; }

    // Calls `fn` until all of 0 .. n_items - 1 are done, at most `chunk` items at a time. Returns when every call has returned.
    // Called from inside `fn`, it runs on the calling thread alone. Two callers at once take turns.
    void parallel_for(int64_t n_items, int64_t chunk, Fn fn, void* context);

    // The same for anything callable as fn(begin, end, thread).
    template <class Callable>
    void parallel_for(int64_t n_items, int64_t chunk, Callable&& fn) {
        using Plain = std::remove_reference_t<Callable>;
        parallel_for(
            n_items, chunk,
            [](void* context, int64_t begin, int64_t end, int32_t thread) { (*static_cast<Plain*>(context))(begin, end, thread); },
            const_cast<void*>(static_cast<const void*>(&fn)));
    }

   private:
    // Items that one thread begins with; anybody may take the next chunk.
    struct alignas(64) Stretch {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };

    static int32_t size(const ThreadOptions& options);
    void worker(int32_t thread, const ThreadOptions& options);
    void run_chunks(int32_t thread);
    void stop();

    std::vector<std::thread> workers_;
    int32_t spin_limit_;
    int32_t n_used_;
    std::mutex caller_mutex_;  // held by the caller of a job

    // The job. Written while no job is open and no worker is inside; read by workers that entered an open one.
    Fn fn_ = nullptr;
    void* context_ = nullptr;
    int64_t chunk_ = 1;
    uint64_t last_job_ = 0;
    std::vector<Stretch> stretches_;                // [n_threads]
    alignas(64) std::atomic<uint64_t> open_{0};     // number of the open job; 0: none; kStop: leave
    alignas(64) std::atomic<int32_t> active_{0};    // workers inside the job

    // Sleeping. A sleeper announces itself before it looks a last time, a waker publishes before it looks for sleepers.
    std::mutex sleep_mutex_;
    std::condition_variable work_;  // a job was opened
    std::condition_variable done_;  // the last worker left
    std::atomic<int32_t> sleepers_{0};
    std::atomic<bool> caller_sleeps_{false};
};

}  // namespace delta
