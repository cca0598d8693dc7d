// Tests of base/ that need C++: conversions at every border, the thread pool, processor detection, memory, messages. Run by pytest
// and, built with the thread sanitizer, by hand and in CI.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/checksum.h"
#include "base/cpu.h"
#include "base/error.h"
#include "base/half.h"
#include "base/log.h"
#include "base/mmap.h"
#include "base/threads.h"
#include "quant/quant.h"

using namespace delta;

namespace {

std::atomic<int> n_failed{0};

[[gnu::format(printf, 3, 4)]] void failed(int line, const char* condition, const char* pattern, ...) {
    if (++n_failed < 50) {
        va_list args;
        va_start(args, pattern);
        std::printf("selftest.cpp:%d: %s:", line, condition);
        std::vprintf(pattern, args);
        std::printf("\n");
        va_end(args);
    }
}

#define CHECK(condition, ...)                                  \
    do {                                                       \
        if (!(condition)) {                                    \
            failed(__LINE__, #condition, " " __VA_ARGS__);     \
        }                                                      \
    } while (false)

// Runs `body` and gives the Error it must throw.
template <class Body>
Error error_of(Body body) {
    try {
        body();
    } catch (const Error& error) {
        return error;
    }
    return Error(DELTA_OK, "nothing was thrown");
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// -- half.h ----------------------------------------------------------------------------------------------------------------

// The value of a finite half by its definition.
double f16_value(uint16_t half) {
    const int exponent = half >> 10 & 31, fraction = half & 0x3ff;
    const double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    return half & 0x8000 ? -magnitude : magnitude;
}

void test_f16() {
    for (uint32_t i = 0; i < 65536; ++i) {
        const auto half = static_cast<uint16_t>(i);
        const float value = f16_to_f32(half);
        if ((half & 0x7c00) != 0x7c00) {
            CHECK(static_cast<double>(value) == f16_value(half) && std::signbit(value) == (half >> 15 != 0), "half %04x", i);
            CHECK(f32_to_f16(value) == half, "half %04x", i);
        } else if ((half & 0x3ff) == 0) {
            CHECK(std::isinf(value) && std::signbit(value) == (half >> 15 != 0), "half %04x", i);
            CHECK(f32_to_f16(value) == half, "half %04x", i);
        } else {
            CHECK(std::isnan(value) && (f32_bits(value) & 0x00400000) != 0, "half %04x", i);
            CHECK(f32_to_f16(value) == (half | 0x200), "half %04x", i);
        }
    }
    // Between two neighbours: below the middle down, above it up, in the middle to the even one.
    for (uint16_t half = 0; half < 0x7bff; ++half) {
        const double low = f16_value(half), high = f16_value(static_cast<uint16_t>(half + 1));
        const auto middle = static_cast<float>((low + high) / 2);  // exact: one more bit
        const uint16_t even = (half & 1) == 0 ? half : static_cast<uint16_t>(half + 1);
        CHECK(f32_to_f16(middle) == even, "half %04x", half);
        CHECK(f32_to_f16(std::nextafter(middle, 0.0f)) == half, "half %04x", half);
        CHECK(f32_to_f16(std::nextafter(middle, INFINITY)) == half + 1, "half %04x", half);
        CHECK(f32_to_f16(-middle) == (even | 0x8000), "half %04x", half);
    }
    CHECK(f32_to_f16(65519.996f) == 0x7bff);
    CHECK(f32_to_f16(65520.0f) == 0x7c00);
    CHECK(f32_to_f16(-1e30f) == 0xfc00);
    CHECK(f32_to_f16(std::numeric_limits<float>::denorm_min()) == 0);
    CHECK(f32_to_f16(-0x1p-25f) == 0x8000);
}

void test_bf16() {
    for (uint32_t i = 0; i < 65536; ++i) {
        const auto value = static_cast<uint16_t>(i);
        const bool nan = (value & 0x7fff) > 0x7f80;
        CHECK(f32_bits(bf16_to_f32(value)) == i << 16, "bf16 %04x", i);
        CHECK(f32_to_bf16(bf16_to_f32(value)) == (nan ? value | 0x40 : value), "bf16 %04x", i);
        if (!nan && (value & 0x7fff) < 0x7f80) {
            const uint32_t even = (i + 1) & ~1u;
            CHECK(f32_to_bf16(f32_from_bits(i << 16 | 0x7fff)) == i, "bf16 %04x", i);
            CHECK(f32_to_bf16(f32_from_bits(i << 16 | 0x8000)) == even, "bf16 %04x", i);
            CHECK(f32_to_bf16(f32_from_bits(i << 16 | 0x8001)) == i + 1, "bf16 %04x", i);
        }
    }
    // The payload of this NaN is in the lower half only: plain truncation would make it infinite.
    CHECK(f32_to_bf16(f32_from_bits(0x7f800001)) == 0x7fc0);
    CHECK(f32_to_bf16(f32_from_bits(0xffffffff)) == 0xffff);
}

void test_e8m0() {
    for (int code = 0; code < 255; ++code) {
        CHECK(e8m0_half_to_f32(static_cast<uint8_t>(code)) == std::ldexp(1.0f, code - 128), "code %d", code);
    }
    CHECK(std::isnan(e8m0_half_to_f32(255)));
}

// `largest` of each type survives in whatever company. In types without a search the next float does not.
void test_largest() {
    const std::string_view exact = "F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, TQ1_0, TQ2_0";
    for (uint32_t id = 0; id < 64; ++id) {
        const TypeInfo* type = find_type(id);
        if (type == nullptr || type->from_float == nullptr) {
            continue;
        }
        CHECK(find_type(type->name) == type, "%s", type->name);
        const auto n = static_cast<size_t>(type->block);
        std::vector<float> x(n), back(n);
        std::vector<uint8_t> bytes(static_cast<size_t>(type->block_bytes));
        const auto survives = [&] {
            type->from_float(x.data(), bytes.data(), type->block);
            type->to_float(bytes.data(), back.data(), type->block);
            return std::all_of(back.begin(), back.end(), [](float value) { return std::isfinite(value); });
        };
        for (const float other : {0.0f, 1.0f, type->largest, -type->largest}) {
            std::fill(x.begin(), x.end(), other);
            x[0] = type->largest;
            CHECK(survives(), "%s beside %g", type->name, static_cast<double>(other));
            CHECK(type->block == 1 || std::fabs(back[0] / type->largest - 1) < 0.26f, "%s beside %g: %g", type->name,
                  static_cast<double>(other), static_cast<double>(back[0]));
        }
        std::fill(x.begin(), x.end(), 0.0f);
        x[0] = -std::nextafter(type->largest, INFINITY);
        if (!std::isinf(x[0]) && (", " + std::string(exact) + ",").find(std::string(" ") + type->name + ",") != std::string::npos) {
            CHECK(!survives(), "%s", type->name);
        }
    }
    CHECK(find_type(uint32_t{4}) == nullptr && find_type("Q4_2") == nullptr);
    CHECK(std::string(type_names()).find("F32, F16, Q4_0, ") == 0, "%s", type_names());
}

// -- threads.h -------------------------------------------------------------------------------------------------------------

void test_pool() {
    for (const int32_t n_threads : {1, 2, 3, 8}) {
        ThreadPool pool(n_threads);
        CHECK(pool.n_threads() == n_threads);
        std::vector<int64_t> per_thread(static_cast<size_t>(n_threads));  // plain: one thread per number at a time
        for (const int64_t n : {0, 1, 2, 7, 64, 1000}) {
            for (const int64_t chunk : {0, 1, 3, 64, 5000}) {
                std::vector<uint8_t> seen(static_cast<size_t>(n));
                pool.parallel_for(n, chunk, [&](int64_t begin, int64_t end, int32_t thread) {
                    CHECK(begin < end && end - begin <= std::max<int64_t>(chunk, 1) && thread >= 0 && thread < n_threads);
                    for (int64_t i = begin; i < end; ++i) {
                        ++seen[static_cast<size_t>(i)];
                        ++per_thread[static_cast<size_t>(thread)];
                    }
                });
                CHECK(std::accumulate(seen.begin(), seen.end(), int64_t{0}) == n, "%d threads, %d items", n_threads,
                      static_cast<int>(n));
            }
        }
        CHECK(std::accumulate(per_thread.begin(), per_thread.end(), int64_t{0}) == 5 * (1 + 2 + 7 + 64 + 1000));
    }
}

void test_pool_many_short_jobs() {
    ThreadPool pool(4);
    int64_t total = 0;
    std::vector<int64_t> partial(64);
    for (int job = 0; job < 20000; ++job) {
        pool.parallel_for(64, 1, [&](int64_t begin, int64_t, int32_t) { partial[static_cast<size_t>(begin)] = job; });
        total += std::accumulate(partial.begin(), partial.end(), int64_t{0});
        if (job % 1000 == 0) {  // long enough for the workers to fall asleep
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
    }
    CHECK(total == 64 * (int64_t{20000} * 19999 / 2));
}

void test_pool_nested() {
    ThreadPool pool(3);
    std::vector<int64_t> sum(40);
    pool.parallel_for(40, 1, [&](int64_t i, int64_t, int32_t outer) {
        pool.parallel_for(10, 2, [&](int64_t begin, int64_t end, int32_t inner) {
            CHECK(inner == outer);
            for (int64_t j = begin; j < end; ++j) {
                sum[static_cast<size_t>(i)] += j;
            }
        });
    });
    CHECK(std::accumulate(sum.begin(), sum.end(), int64_t{0}) == 40 * 45);

    // Another pool inside is no nesting: it works with its own threads.
    ThreadPool other(2);
    std::atomic<int64_t> count{0};
    pool.parallel_for(6, 1, [&](int64_t, int64_t, int32_t) {
        other.parallel_for(5, 1, [&](int64_t, int64_t, int32_t thread) {
            CHECK(thread < 2);
            count.fetch_add(1);
        });
    });
    CHECK(count.load() == 30);
}

void test_pool_two_callers() {
    ThreadPool pool(3);
    std::vector<std::thread> callers;
    std::vector<int64_t> sums(4);
    for (size_t c = 0; c < sums.size(); ++c) {
        callers.emplace_back([&, c] {
            for (int job = 0; job < 500; ++job) {
                std::vector<int64_t> part(9);
                pool.parallel_for(9, 2, [&](int64_t begin, int64_t end, int32_t) {
                    for (int64_t i = begin; i < end; ++i) {
                        part[static_cast<size_t>(i)] = i;
                    }
                });
                sums[c] += std::accumulate(part.begin(), part.end(), int64_t{0});
            }
        });
    }
    for (std::thread& caller : callers) {
        caller.join();
    }
    for (const int64_t sum : sums) {
        CHECK(sum == 500 * 36);
    }
}

void test_pool_limits() {
    for (int i = 0; i < 50; ++i) {
        ThreadPool pool(3);  // shut down before or after its threads got to run
    }
    CHECK(error_of([] { ThreadPool pool(-1); }).status == DELTA_ARG);
    CHECK(error_of([] { ThreadPool pool(ThreadPool::kMaxThreads + 1); }).status == DELTA_ARG);
    CHECK(ThreadPool(0).n_threads() == physical_cores());
}

// -- cpu.h -----------------------------------------------------------------------------------------------------------------

Isa best_isa() {
    const CpuFeatures& has = cpu_features();
    return has.neon_i8mm ? Isa::NeonI8mm : has.neon_dot ? Isa::NeonDot : has.neon ? Isa::Neon : has.avx512 ? Isa::Avx512
           : has.avx2    ? Isa::Avx2     : Isa::Generic;
}

void test_cpu() {
    CHECK(physical_cores() >= 1 && physical_cores() <= usable_cpus(), "%d of %d", physical_cores(), usable_cpus());
    CHECK(!processor_name().empty());
    CHECK(!cpu_features().avx512 || cpu_features().avx2);
    CHECK(!cpu_features().neon_i8mm || cpu_features().neon_dot);

    unsetenv("DELTALLAMA_CPU");
    CHECK(choose_isa() == best_isa());
    setenv("DELTALLAMA_CPU", "", 1);
    CHECK(choose_isa() == best_isa());
    setenv("DELTALLAMA_CPU", "generic", 1);
    CHECK(choose_isa() == Isa::Generic && std::string(isa_name(choose_isa())) == "generic");
    for (const char* wrong : {"avx9000", "AVX2", "generic ", "avx2,generic"}) {
        setenv("DELTALLAMA_CPU", wrong, 1);
        const Error error = error_of(choose_isa);
        CHECK(error.status == DELTA_UNSUPPORTED && contains(error.what(), quoted(wrong)) && contains(error.what(), "generic"), "%s",
              error.what());
    }
    setenv("DELTALLAMA_CPU", "avx2", 1);
    const Error error = error_of([] { CHECK(choose_isa() == Isa::Avx2); });
    CHECK(error.status == (cpu_features().avx2 ? DELTA_OK : DELTA_UNSUPPORTED), "%s", error.what());
    unsetenv("DELTALLAMA_CPU");
}

// -- checksum.h ------------------------------------------------------------------------------------------------------------

void test_checksum() {
    std::vector<uint8_t> ramp(1000);
    for (size_t i = 0; i < ramp.size(); ++i) {
        ramp[i] = static_cast<uint8_t>(i % 251);
    }
    // Answers of the xxhash package.
    CHECK(checksum("", 0) == 0xef46db3751d8e999);
    CHECK(checksum("a", 1) == 0xd24ec4f1a98c6e5b);
    CHECK(checksum("abc", 3) == 0x44bc2cf5ad770999);
    CHECK(checksum(ramp.data(), 37) == 0xd93fa2dfee5c24c9);
    CHECK(checksum(ramp.data(), 1000) == 0xf306f04aa88b54d3);
    for (const size_t piece : {1, 7, 31, 32, 33, 500}) {
        Checksum sum;
        for (size_t at = 0; at < ramp.size(); at += piece) {
            sum.update(ramp.data() + at, std::min(piece, ramp.size() - at));
        }
        CHECK(sum.digest() == 0xf306f04aa88b54d3, "pieces of %zu", piece);
    }
}

// -- mmap.h ----------------------------------------------------------------------------------------------------------------

void test_memory() {
    char folder[] = P_tmpdir "/selftest-XXXXXX";
    CHECK(mkdtemp(folder) != nullptr);
    const std::string path = std::string(folder) + "/file", empty = std::string(folder) + "/empty", pipe = std::string(folder) + "/pipe";
    for (const auto& [name, text] : {std::pair(path, "contents"), std::pair(empty, "")}) {
        FILE* file = std::fopen(name.c_str(), "w");
        std::fputs(text, file);
        std::fclose(file);
    }
    CHECK(mkfifo(pipe.c_str(), 0600) == 0);
    const MappedFile mapped(path);
    CHECK(mapped.size() == 8 && std::memcmp(mapped.data(), "contents", 8) == 0 && mapped.path() == path);
    CHECK(MappedFile(empty).size() == 0);
    for (const auto& [name, reason] : {std::pair(std::string(folder), "directory"), std::pair(path + "x", "No such file"),
                                       std::pair(pipe, "not a regular file"), std::pair(path + "/x", "Not a directory")}) {
        const Error error = error_of([&] { MappedFile file(name); });
        CHECK(error.status == DELTA_IO && contains(error.what(), name) && contains(error.what(), reason), "%s", error.what());
    }
    for (const std::string& name : {path, empty, pipe}) {
        unlink(name.c_str());
    }
    rmdir(folder);

    const CommittedMemory memory(1 << 20, "a test");
    CHECK(std::all_of(memory.data(), memory.data() + memory.size(), [](uint8_t byte) { return byte == 0; }));
    memory.data()[memory.size() - 1] = 1;
    CHECK(CommittedMemory(0, "nothing").data() == nullptr);
    for (const size_t bytes : {size_t{1} << 50, SIZE_MAX}) {
        const Error error = error_of([&] { CommittedMemory too_much(bytes, "the state of 7 slots"); });
        CHECK(error.status == DELTA_MEMORY && contains(error.what(), "the state of 7 slots") &&
                  contains(error.what(), std::to_string(bytes)), "%s", error.what());
    }
    CHECK(host_memory().bytes_total >= host_memory().bytes_free && host_memory().bytes_free > 0);
}

// -- error.h, log.h --------------------------------------------------------------------------------------------------------

void test_messages() {
    CHECK(format("%d of %s", 3, "x") == "3 of x");
    CHECK(format("%s", std::string(5000, 'y').c_str()).size() == 5000);
    CHECK(quoted("a\tb\xff'") == "'a\\x09b\\xff''");
    CHECK(quoted(std::string(1000, 'z')).size() < 300);
    const auto status_of = [](auto thrown) {
        try {
            throw thrown;
        } catch (...) {
            return translate_exception();
        }
    };
    CHECK(status_of(Error(DELTA_IO, "disk on fire")) == DELTA_IO && std::string(last_error()) == "disk on fire");
    CHECK(status_of(std::bad_alloc()) == DELTA_MEMORY && std::string(last_error()) == "out of memory");
    CHECK(status_of(std::runtime_error("x")) == DELTA_STATE && std::string(last_error()) == "internal error: x");
    std::thread([] { CHECK(*last_error() == '\0'); }).join();

    std::vector<std::string> lines;
    const auto keep = [](int level, const char* message, void* user) {
        static_cast<std::vector<std::string>*>(user)->push_back(std::to_string(level) + message);
    };
    log(LogLevel::Warning, "nobody listens");
    set_log(keep, &lines);
    log(LogLevel::Info, "line %d", 1);
    set_log([](int, const char*, void*) { set_log(nullptr, nullptr); }, nullptr);
    log(LogLevel::Info, "the callback takes itself out");
    log(LogLevel::Info, "nobody listens");
    CHECK(lines == std::vector<std::string>{"1line 1"});
}

}  // namespace

int main() {
    test_f16();
    test_bf16();
    test_e8m0();
    test_largest();
    test_pool();
    test_pool_many_short_jobs();
    test_pool_nested();
    test_pool_two_callers();
    test_pool_limits();
    test_cpu();
    test_checksum();
    test_memory();
    test_messages();
    std::printf("selftest: %d checks failed\n", n_failed.load());
    return n_failed == 0 ? 0 : 1;
}
