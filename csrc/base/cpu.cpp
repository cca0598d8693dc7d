#include "base/cpu.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include "base/error.h"

namespace delta {
namespace {

CpuFeatures detect() {
    CpuFeatures features{};
#if defined(__x86_64__)
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) {
        return features;
    }
    const auto bit = [](uint32_t word, int index) { return (word >> index & 1) != 0; };
    const bool fma = bit(ecx, 12), osxsave = bit(ecx, 27), avx = bit(ecx, 28), f16c = bit(ecx, 29);
    if (!osxsave || !avx || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) {
        return features;
    }
    uint32_t xcr0 = 0, xcr0_high = 0;
    asm volatile("xgetbv" : "=a"(xcr0), "=d"(xcr0_high) : "c"(0));
    constexpr uint32_t kYmm = 0x06;  // SSE and AVX state
    constexpr uint32_t kZmm = 0xe6;  // and mask registers, upper halves, upper 16 registers
    features.avx2 = fma && f16c && bit(ebx, 5) && (xcr0 & kYmm) == kYmm;
    features.avx512 = features.avx2 && bit(ebx, 16) && bit(ebx, 30) && bit(ebx, 31) && bit(ecx, 11) && (xcr0 & kZmm) == kZmm;
#elif defined(__aarch64__)
    // Bits of the kernel's interface: ASIMDDP of AT_HWCAP, I8MM of AT_HWCAP2.
    features.neon = true;
    features.neon_dot = (getauxval(AT_HWCAP) >> 20 & 1) != 0;
    features.neon_i8mm = features.neon_dot && (getauxval(AT_HWCAP2) >> 13 & 1) != 0;
#endif
    return features;
}

struct IsaRow {
    Isa isa;
    const char* name;
    bool usable;
};

// Worst first.
std::vector<IsaRow> isas() {
    std::vector<IsaRow> rows{{Isa::Generic, "generic", true}};
#if defined(__x86_64__)
    rows.push_back({Isa::Avx2, "avx2", cpu_features().avx2});
    rows.push_back({Isa::Avx512, "avx512", cpu_features().avx512});
#elif defined(__aarch64__)
    rows.push_back({Isa::Neon, "neon", cpu_features().neon});
    rows.push_back({Isa::NeonDot, "neon_dot", cpu_features().neon_dot});
    rows.push_back({Isa::NeonI8mm, "neon_i8mm", cpu_features().neon_i8mm});
#endif
    return rows;
}

std::string first_line(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

// Ids of the processors in the affinity mask.
std::vector<int> affinity() {
    std::vector<int> ids;
    // The mask must be at least as large as the kernel's; its size is not known beforehand.
    for (int capacity = 1024; capacity <= 1 << 20; capacity *= 2) {
        cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(capacity));
        if (set == nullptr) {
            break;
        }
        const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(capacity));
        CPU_ZERO_S(bytes, set);
        const bool ok = sched_getaffinity(0, bytes, set) == 0;
        const bool too_small = !ok && errno == EINVAL;
        for (int i = 0; ok && i < capacity; ++i) {
            if (CPU_ISSET_S(static_cast<size_t>(i), bytes, set)) {
                ids.push_back(i);
            }
        }
        CPU_FREE(set);
        if (!too_small) {
            break;
        }
    }
    return ids;
}

// A name of the core that processor `id` belongs to: the list of all its threads, equal for each of them.
std::string core_of(int id) {
    const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(id) + "/topology/";
    const std::string siblings = first_line(folder + "thread_siblings_list");
    return siblings.empty() ? "cpu" + std::to_string(id) : siblings;
}

// Processors' worth of time a container may use; INT32_MAX without a limit.
int32_t quota() {
    std::istringstream line(first_line("/sys/fs/cgroup/cpu.max"));  // "200000 100000" or "max 100000"
    int64_t allowed = 0, period = 0;
    if (line >> allowed >> period && allowed > 0 && period > 0) {
        return static_cast<int32_t>(std::min<int64_t>((allowed + period - 1) / period, INT32_MAX));
    }
    return INT32_MAX;
}

int32_t limited(size_t count) {
    return std::max(1, std::min(static_cast<int32_t>(count), quota()));
}

}  // namespace

const CpuFeatures& cpu_features() {
    static const CpuFeatures features = detect();
    return features;
}

const char* isa_name(Isa isa) {
    for (const IsaRow& row : isas()) {
        if (row.isa == isa) {
            return row.name;
        }
    }
    return "generic";
}

Isa choose_isa() {
    const std::vector<IsaRow> rows = isas();
    const char* wish = std::getenv("DELTALLAMA_CPU");
    if (wish == nullptr || *wish == '\0') {
        const auto best = std::find_if(rows.rbegin(), rows.rend(), [](const IsaRow& row) { return row.usable; });
        return best->isa;
    }
    std::string names;
    for (const IsaRow& row : rows) {
        if (std::strcmp(row.name, wish) == 0) {
            if (!row.usable) {
                throw Error(DELTA_UNSUPPORTED, format("DELTALLAMA_CPU is %s, which this processor (%s) lacks", quoted(wish).c_str(),
                                                      processor_name().c_str()));
            }
            return row.isa;
        }
        names += names.empty() ? row.name : std::string(", ") + row.name;
    }
    throw Error(DELTA_UNSUPPORTED, format("DELTALLAMA_CPU is %s, this build has %s", quoted(wish).c_str(), names.c_str()));
}

int32_t usable_cpus() { return limited(affinity().size()); }

int32_t physical_cores() {
    std::set<std::string> cores;
    for (const int id : affinity()) {
        cores.insert(core_of(id));
    }
    return limited(cores.size());
}

std::vector<int> processors_by_core() {
    std::vector<int> order, seconds;
    std::set<std::string> cores;
    for (const int id : affinity()) {
        (cores.insert(core_of(id)).second ? order : seconds).push_back(id);
    }
    order.insert(order.end(), seconds.begin(), seconds.end());
    return order;
}

std::string processor_name() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
        if (line.starts_with("model name")) {
            const size_t start = line.find_first_not_of(" \t", line.find(':') + 1);
            return start == std::string::npos ? "unknown processor" : line.substr(start);
        }
    }
    return "unknown processor";
}

}  // namespace delta
