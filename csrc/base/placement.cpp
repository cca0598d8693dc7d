#include "base/placement.h"

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <fstream>
#include <sstream>
#include <string>

#include "base/cpu.h"

namespace delta {

#if defined(__linux__)
namespace {

constexpr int kInterleave = 3;  // MPOL_INTERLEAVE of linux/mempolicy.h
constexpr size_t kNodes = 1024;
constexpr size_t kWordBits = 8 * sizeof(unsigned long);

// A set of nodes as "0-3,8".
std::vector<unsigned long> online_nodes() {
    std::vector<unsigned long> mask(kNodes / kWordBits);
    std::ifstream file("/sys/devices/system/node/online");
    std::string part;
    while (std::getline(file, part, ',')) {
        std::istringstream range(part);
        size_t first = 0, last = 0;
        char dash = 0;
        if (!(range >> first)) {
            continue;
        }
        last = range >> dash >> last ? last : first;
        for (size_t node = first; node <= last && node < kNodes; ++node) {
            mask[node / kWordBits] |= 1UL << node % kWordBits;
        }
    }
    return mask;
}

int count(const std::vector<unsigned long>& mask) {
    int n = 0;
    for (const unsigned long word : mask) {
        n += __builtin_popcountl(word);
    }
    return n;
}

}  // namespace

void pin_this_thread(int32_t index) {
    const std::vector<int> order = processors_by_core();
    if (order.empty()) {
        return;
    }
    const int cpu = order[static_cast<size_t>(index) % order.size()];
    cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(cpu) + 1);
    if (set != nullptr) {
        const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(cpu) + 1);
        CPU_ZERO_S(bytes, set);
        CPU_SET_S(static_cast<size_t>(cpu), bytes, set);
        sched_setaffinity(0, bytes, set);
        CPU_FREE(set);
    }
}

InterleavedMemory::InterleavedMemory() : nodes_(kNodes / kWordBits) {
    const std::vector<unsigned long> all = online_nodes();
    if (count(all) < 2 || syscall(SYS_get_mempolicy, &mode_, nodes_.data(), kNodes, nullptr, 0UL) != 0) {
        return;
    }
    changed_ = syscall(SYS_set_mempolicy, kInterleave, all.data(), kNodes) == 0;
}

InterleavedMemory::~InterleavedMemory() {
    if (changed_) {
        syscall(SYS_set_mempolicy, mode_, nodes_.data(), kNodes);
    }
}
#else
void pin_this_thread(int32_t) {}
InterleavedMemory::InterleavedMemory() = default;
InterleavedMemory::~InterleavedMemory() = default;
#endif

}  // namespace delta
