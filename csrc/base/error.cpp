#include "base/error.h"

#include <cstdarg>
#include <cstdio>
#include <new>

namespace delta {
namespace {

// A plain buffer, because reporting that memory ran out must not allocate.
thread_local char last_message[2048];

void keep(const char* text) noexcept { std::snprintf(last_message, sizeof last_message, "%s", text); }

}  // namespace

std::string format(const char* pattern, ...) {
    va_list args;
    va_start(args, pattern);
    va_list again;
    va_copy(again, args);
    const int length = std::vsnprintf(nullptr, 0, pattern, args);
    va_end(args);
    std::string text(length > 0 ? static_cast<size_t>(length) : 0, '\0');
    std::vsnprintf(text.data(), text.size() + 1, pattern, again);
    va_end(again);
    return text;
}

std::string quoted(std::string_view text) {
    constexpr size_t kLongest = 200;
    std::string out = "'";
    for (const char c : text.substr(0, kLongest)) {
        const auto byte = static_cast<unsigned char>(c);
        if (byte >= 0x20 && byte < 0x7f) {
            out += c;
        } else {
            out += format("\\x%02x", byte);
        }
    }
    out += text.size() > kLongest ? "...'" : "'";
    return out;
}

delta_status translate_exception() noexcept {
    try {
        throw;
    } catch (const Error& error) {
        keep(error.what());
        return error.status;
    } catch (const std::bad_alloc&) {
        keep("out of memory");
        return DELTA_MEMORY;
    } catch (const std::exception& error) {
        return set_last_error(DELTA_STATE, "internal error: %s", error.what());
    } catch (...) {
        keep("internal error");
        return DELTA_STATE;
    }
}

delta_status set_last_error(delta_status status, const char* pattern, ...) noexcept {
    va_list args;
    va_start(args, pattern);
    std::vsnprintf(last_message, sizeof last_message, pattern, args);
    va_end(args);
    return status;
}

const char* last_error() noexcept { return last_message; }

}  // namespace delta
