#include "base/log.h"

#include <cstdarg>
#include <cstdio>
#include <mutex>

namespace delta {
namespace {

// Recursive: a callback may itself replace the callback.
std::recursive_mutex log_mutex;
delta_log_fn log_fn = nullptr;
void* log_user = nullptr;

}  // namespace

void set_log(delta_log_fn fn, void* user) {
    const std::lock_guard lock(log_mutex);
    log_fn = fn;
    log_user = user;
}

void log(LogLevel level, const char* pattern, ...) {
    const std::lock_guard lock(log_mutex);
    if (log_fn == nullptr) {
        return;
    }
    char line[2048];
    va_list args;
    va_start(args, pattern);
    std::vsnprintf(line, sizeof line, pattern, args);
    va_end(args);
    log_fn(static_cast<int>(level), line, log_user);
}

}  // namespace delta
