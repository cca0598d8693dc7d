// Reads the header of one GGUF file from front to back. Nothing is believed before it is compared with the bytes that are left.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "base/error.h"

namespace delta {

class Cursor {
   public:
    Cursor(const uint8_t* data, uint64_t size, const std::string& path) : data_(data), size_(size), path_(path) {}

    uint64_t offset() const { return offset_; }
    uint64_t left() const { return size_ - offset_; }
    const uint8_t* here() const { return data_ + offset_; }

    // `what` names the field in messages.
    template <class T>
    T read(const char* what) {
        T value;
        std::memcpy(&value, take(sizeof value, what), sizeof value);
        return value;
    }

    // Length (64 bits), then that many bytes.
    std::string_view string(const char* what) {
        const auto length = read<uint64_t>(what);
        return {reinterpret_cast<const char*>(take(length, what)), static_cast<size_t>(length)};
    }

    const uint8_t* take(uint64_t n_bytes, const char* what) {
        if (n_bytes > left()) {
            fail(DELTA_FORMAT, format("%s at byte %llu needs %llu bytes, %llu are left (is the file truncated?)", what,
                                      static_cast<unsigned long long>(offset_), static_cast<unsigned long long>(n_bytes),
                                      static_cast<unsigned long long>(left())));
        }
        const uint8_t* at = here();
        offset_ += n_bytes;
        return at;
    }

    // `count` things of at least `each` bytes must still fit.
    void expect(uint64_t count, uint64_t each, const char* what) const {
        if (count > left() / each) {
            fail(DELTA_FORMAT, format("%s is %llu, but only %llu bytes are left", what, static_cast<unsigned long long>(count),
                                      static_cast<unsigned long long>(left())));
        }
    }

    [[noreturn]] void fail(delta_status status, const std::string& text) const {
        throw Error(status, quoted(path_) + ": " + text);
    }

   private:
    const uint8_t* data_;
    uint64_t size_;
    const std::string& path_;
    uint64_t offset_ = 0;
};

}  // namespace delta
