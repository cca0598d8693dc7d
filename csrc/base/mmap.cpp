#include "base/mmap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <fstream>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace delta {
namespace {

[[noreturn]] void io_error(const char* action, const std::string& path, int error_number) {
    throw Error(DELTA_IO, format("cannot %s %s: %s", action, quoted(path).c_str(), system_message(error_number).c_str()));
}

struct Descriptor {
    int fd;
    ~Descriptor() {
        if (fd >= 0) {
            close(fd);
        }
    }
};

// The first number in `path` that follows `name` at the start of a line; none if there is no such line.
std::optional<uint64_t> number_after(const std::string& name, const char* path) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        std::istringstream rest(line.starts_with(name) ? line.substr(name.size()) : "");
        if (uint64_t number = 0; rest >> number) {
            return number;
        }
    }
    return std::nullopt;
}

}  // namespace

std::string system_message(int error_number) { return std::generic_category().message(error_number); }

MappedFile::MappedFile(const std::string& path) : path_(path) {
    // O_NONBLOCK: opening a pipe must fail below, not wait for a writer.
    const Descriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    if (file.fd < 0) {
        io_error("open", path, errno);
    }
    struct stat info;
    if (fstat(file.fd, &info) != 0) {
        io_error("examine", path, errno);
    }
    if (S_ISDIR(info.st_mode)) {
        io_error("open", path, EISDIR);
    }
    if (!S_ISREG(info.st_mode)) {
        throw Error(DELTA_IO, format("cannot open %s: not a regular file", quoted(path).c_str()));
    }
    size_ = static_cast<size_t>(info.st_size);
    if (size_ == 0) {
        return;
    }
    void* address = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd, 0);
    if (address == MAP_FAILED) {
        io_error("map", path, errno);
    }
    data_ = static_cast<const uint8_t*>(address);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile::~MappedFile() {
    if (data_ != nullptr) {
        munmap(const_cast<uint8_t*>(data_), size_);
    }
}

CommittedMemory::CommittedMemory(size_t bytes, const char* purpose) {
    if (bytes == 0) {
        return;
    }
    // Linux promises memory it does not have and kills the process that touches it; asking first turns that into a message.
    const HostMemory host = host_memory();
    if (host.bytes_total != 0 && bytes > host.bytes_free) {
        throw Error(DELTA_MEMORY, format("%s needs %zu bytes of memory, %" PRIu64 " are free", purpose, bytes, host.bytes_free));
    }
    void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) {
        throw Error(DELTA_MEMORY, format("%s needs %zu bytes of memory: %s", purpose, bytes, system_message(errno).c_str()));
    }
    data_ = static_cast<uint8_t*>(address);
    size_ = bytes;
    // Fewer page-table entries for states of hundreds of megabytes; a refusal changes nothing but speed.
    madvise(address, bytes, MADV_HUGEPAGE);
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    for (size_t at = 0; at < bytes; at += page) {
        static_cast<volatile uint8_t*>(data_)[at] = 0;
    }
}

CommittedMemory::~CommittedMemory() {
    if (data_ != nullptr) {
        munmap(data_, size_);
    }
}

HostMemory host_memory() {
    const auto kib = [](const char* name) { return number_after(name, "/proc/meminfo").value_or(0) * 1024; };
    HostMemory memory{kib("MemAvailable:"), kib("MemTotal:")};
    // A container may have less than the machine. Its file cache counts as used there, though it gives way.
    const auto limit = number_after("", "/sys/fs/cgroup/memory.max");
    const auto used = number_after("", "/sys/fs/cgroup/memory.current");
    if (limit.has_value() && used.has_value()) {
        const uint64_t cache = number_after("inactive_file ", "/sys/fs/cgroup/memory.stat").value_or(0);
        const uint64_t kept = *used - std::min(cache, *used);
        memory.bytes_total = std::min(memory.bytes_total, *limit);
        memory.bytes_free = std::min(memory.bytes_free, *limit - std::min(kept, *limit));
    }
    return memory;
}

}  // namespace delta
