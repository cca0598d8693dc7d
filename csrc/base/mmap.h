// Memory from the operating system: files mapped read-only, committed anonymous pages, and how much there is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace delta {

// A whole file, read-only. The descriptor is closed after mapping. Whoever shortens the file meanwhile ends the process.
class MappedFile {
   public:
    // Throws Error(IO) naming the file. An empty file gives size() 0.
    explicit MappedFile(const std::string& path);
    ~MappedFile();
    MappedFile(MappedFile&& other) noexcept;
    MappedFile& operator=(MappedFile&&) = delete;

    const std::string& path() const { return path_; }
    const uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

   private:
    std::string path_;
    const uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

// Zeroed anonymous pages, every one touched: what is planned is what is resident, and running out shows here, not in a step.
class CommittedMemory {
   public:
    // Throws Error(MEMORY) naming `purpose` and the size. 0 bytes: data() is null.
    CommittedMemory(size_t bytes, const char* purpose);
    ~CommittedMemory();
    CommittedMemory(const CommittedMemory&) = delete;
    CommittedMemory& operator=(const CommittedMemory&) = delete;

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

   private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

struct HostMemory {
    uint64_t bytes_free;   // what can be allocated without swapping
    uint64_t bytes_total;  // 0: the system does not say
};
// Of the machine, or of the container if that has less.
HostMemory host_memory();

// "No such file or directory" for an errno value, thread-safe.
std::string system_message(int error_number);

}  // namespace delta
