// Log lines for the caller's callback. Without one nothing is printed.
#pragma once

#include "include/deltallama.h"

namespace delta {

enum class LogLevel : int { Debug = 0, Info = 1, Warning = 2 };

// When this returns, no other thread is inside the previous callback.
void set_log(delta_log_fn fn, void* user);
[[gnu::format(printf, 2, 3)]] void log(LogLevel level, const char* pattern, ...);

}  // namespace delta
