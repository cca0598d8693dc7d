// Many threads on one model, for the thread sanitizer: workers that compute as soon as nobody else does, others that query and cancel
// all the time. Every answer must be the one of a serial run.
//
//     delta-stress MODEL [REQUESTS]
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "include/deltallama.h"

namespace {

constexpr uint32_t kSessions = 4;  // shared by the workers; two more come and go
constexpr int kWorkers = 16;
constexpr size_t kPrompts = 24;

struct Answer {
    int32_t token;
    float logit;
};

[[noreturn]] void die(const char* what) {
    std::fprintf(stderr, "delta-stress: %s: %s\n", what, delta_last_error());
    std::exit(1);
}

void check(delta_status status, const char* what) {
    if (status != DELTA_OK) {
        die(what);
    }
}

// Prompts that share prefixes: each continues a random part of an earlier one.
std::vector<std::vector<int32_t>> make_prompts(int32_t n_vocab) {
    std::mt19937 random(1);
    std::vector<std::vector<int32_t>> prompts;
    for (size_t i = 0; i < kPrompts; ++i) {
        std::vector<int32_t> tokens;
        if (i > 0) {
            tokens = prompts[random() % i];
            tokens.resize(random() % (tokens.size() + 1));
        }
        const size_t n = std::min<size_t>(tokens.size() + 1 + random() % 12, 40);
        while (tokens.size() < n) {
            tokens.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(n_vocab)));
        }
        prompts.push_back(std::move(tokens));
    }
    return prompts;
}

Answer best_of(delta_session* session) {
    delta_top_token top{};
    check(delta_session_top(session, -1, &top, 1), "top");
    return {top.token, top.logit};
}

struct Stress {
    delta_model* model = nullptr;
    std::vector<std::vector<int32_t>> prompts;
    std::vector<Answer> expected;
    std::vector<delta_session*> sessions;

    std::mutex mutex;
    std::vector<delta_session*> idle;
    std::atomic<int> requests_left{0};
    std::atomic<int> n_busy{0}, n_cancelled{0}, n_wrong{0};
    std::atomic<bool> done{false};

    delta_session* take() {
        for (;;) {
            {
                const std::lock_guard lock(mutex);
                if (!idle.empty()) {
                    delta_session* session = idle.back();
                    idle.pop_back();
                    return session;
                }
            }
            std::this_thread::yield();
        }
    }

    void give(delta_session* session) {
        const std::lock_guard lock(mutex);
        idle.push_back(session);
    }

    // Repeats a computation until it is neither refused nor cancelled.
    template <class Call>
    void insist(const char* what, Call call) {
        for (;;) {
            const delta_status status = call();
            if (status == DELTA_BUSY) {
                ++n_busy;
                std::this_thread::yield();
            } else if (status == DELTA_CANCELLED) {
                ++n_cancelled;
            } else {
                check(status, what);
                return;
            }
        }
    }

    void compare(size_t i, const Answer& found) {
        if (found.token != expected[i].token || std::fabs(found.logit - expected[i].logit) > 1e-3F) {
            ++n_wrong;
        }
    }

    void serve(uint32_t seed) {
        std::mt19937 random(seed);
        while (requests_left.fetch_sub(1) > 0) {
            const size_t i = random() % prompts.size();
            const std::vector<int32_t>& prompt = prompts[i];
            delta_session* session = take();
            insist("sync",
                   [&] { return delta_session_sync(session, prompt.data(), prompt.size(), nullptr, nullptr, nullptr); });
            compare(i, best_of(session));
            switch (random() % 4) {
                case 0:
                    insist("truncate", [&] { return delta_session_truncate(session, delta_session_length(session) / 2); });
                    break;
                case 1:
                    insist("checkpoint", [&] { return delta_session_checkpoint(session); });
                    break;
                case 2: {
                    delta_session* fork = nullptr;
                    delta_status status;
                    do {
                        status = delta_session_fork(session, &fork);
                    } while (status == DELTA_BUSY);
                    if (status == DELTA_STATE) {
                        break;  // both spare slots are taken
                    }
                    check(status, "fork");
                    compare(i, best_of(fork));
                    check(delta_session_free(fork), "free");
                    break;
                }
                default:
                    break;
            }
            give(session);
        }
    }

    void query(uint32_t seed) {
        std::mt19937 random(seed);
        delta_stats stats{};
        stats.size = sizeof stats;
        delta_model_info info{};
        info.size = sizeof info;
        std::vector<int32_t> tokens(64);
        while (!done.load()) {
            const delta_session* session = sessions[random() % sessions.size()];
            size_t n = 0;
            check(delta_session_tokens(session, tokens.data(), tokens.size(), &n), "tokens");
            if (n > tokens.size() || delta_session_length(session) > tokens.size() || delta_session_logits_count(session) > 1) {
                ++n_wrong;
            }
            check(delta_session_stats(session, &stats), "session stats");
            check(delta_model_stats(model, &stats), "model stats");
            check(delta_model_info_get(model, &info), "info");
            std::this_thread::yield();
        }
    }

    void cancel() {
        while (!done.load()) {
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
            delta_model_cancel(model);
        }
    }
};

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: delta-stress MODEL [REQUESTS]\n");
        return 1;
    }
    const int n_requests = argc > 2 ? std::atoi(argv[2]) : 1000;
    delta_model_params params;
    delta_model_params_init(&params);
    params.n_ctx = 64;
    params.n_batch = 8;
    params.n_sessions = kSessions + 2;
    params.n_threads = 2;
    params.activations = DELTA_EXACT;
    params.cache_type = 0;
    params.checkpoint_every = 8;

    Stress stress;
    check(delta_model_open(argv[1], &params, &stress.model), "open");
    delta_model_info info{};
    info.size = sizeof info;
    check(delta_model_info_get(stress.model, &info), "info");
    stress.prompts = make_prompts(static_cast<int32_t>(info.n_vocab));
    for (const std::vector<int32_t>& prompt : stress.prompts) {
        delta_session* session = nullptr;
        check(delta_session_create(stress.model, &session), "create");
        check(delta_session_sync(session, prompt.data(), prompt.size(), nullptr, nullptr, nullptr), "sync");
        stress.expected.push_back(best_of(session));
        check(delta_session_free(session), "free");
    }
    for (uint32_t i = 0; i < kSessions; ++i) {
        delta_session* session = nullptr;
        check(delta_session_create(stress.model, &session), "create");
        stress.sessions.push_back(session);
    }
    stress.idle = stress.sessions;
    stress.requests_left = n_requests;

    std::vector<std::thread> workers, others;
    for (uint32_t i = 0; i < kWorkers; ++i) {
        workers.emplace_back([&stress, i] { stress.serve(i); });
    }
    others.emplace_back([&stress] { stress.query(100); });
    others.emplace_back([&stress] { stress.query(101); });
    others.emplace_back([&stress] { stress.cancel(); });
    for (std::thread& worker : workers) {
        worker.join();
    }
    stress.done = true;
    for (std::thread& other : others) {
        other.join();
    }
    for (delta_session* session : stress.sessions) {
        check(delta_session_free(session), "free");
    }
    check(delta_model_close(stress.model), "close");
    std::printf("requests %d busy %d cancelled %d wrong %d\n", n_requests, stress.n_busy.load(), stress.n_cancelled.load(),
                stress.n_wrong.load());
    return stress.n_wrong.load() == 0 ? 0 : 1;
}
