// The one exception type of load-time code. api/ turns it into a status and a message; kernels and steps do not throw.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "include/deltallama.h"

namespace delta {

struct Error : std::runtime_error {
    delta_status status;
    Error(delta_status status_, const std::string& text) : std::runtime_error(text), status(status_) {}
};

// printf-style text; every message says what, where, expected, found.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

}  // namespace delta
