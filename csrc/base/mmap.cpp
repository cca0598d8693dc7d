#include "base/mmap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <memory>
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

// The value of "Name:  123 kB" in /proc/meminfo in bytes; 0 if there is none.
uint64_t meminfo(const char* name) {
    const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen("/proc/meminfo", "re"), std::fclose);
    const std::string pattern = std::string(name) + ": %" SCNu64 " kB";
    char line[256];
    uint64_t kib = 0;
    while (file != nullptr && std::fgets(line, sizeof line, file.get()) != nullptr) {
        if (std::sscanf(line, pattern.c_str(), &kib) == 1) {
            return kib * 1024;
        }
    }
    return 0;
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
    HostMemory memory;
    memory.bytes_total = meminfo("MemTotal");
    memory.bytes_free = std::min(meminfo("MemAvailable"), memory.bytes_total);
    return memory;
}

}  // namespace delta
