// The one exception type of load-time code, and its way to C. Kernels and steps do not throw.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "include/deltallama.h"

namespace delta {

struct Error : std::runtime_error {
    delta_status status;
    Error(delta_status status_, const std::string& text) : std::runtime_error(text), status(status_) {}
};

// printf-style text; every message says what, where, expected, found.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

// 'text' for messages: bytes that do not print become \xNN, long text is cut. For everything that was read from a file.
std::string quoted(std::string_view text);

// For extern "C" functions: `try { ...; return DELTA_OK; } catch (...) { return translate_exception(); }`. Keeps the message for
// last_error() and gives the status.
delta_status translate_exception() noexcept;
// Keeps a message without an exception and returns `status`.
[[gnu::format(printf, 2, 3)]] delta_status set_last_error(delta_status status, const char* pattern, ...) noexcept;
// The calling thread's last message; empty when there was none.
const char* last_error() noexcept;

}  // namespace delta
