// Typed access to the metadata keys that models are built from.
#pragma once

#include <cmath>
#include <string>
#include <utility>

#include "base/error.h"
#include "gguf/gguf.h"

namespace delta {

// Reads keys of one prefix with range checks; every message names key, value and what is allowed.
class Keys {
   public:
    Keys(const GgufSet& file, std::string prefix) : file_(file), prefix_(std::move(prefix) + ".") {}

    std::string key(const char* name) const { return prefix_ + name; }
    bool has(const char* name) const { return file_.has(key(name)); }

    int32_t count(const char* name, int64_t least = 1, int64_t most = 1 << 26) const {
        const int64_t v = file_.integer(key(name));
        if (v < least || v > most) {
            fail(name, format("is %lld, expected %lld to %lld", static_cast<long long>(v), static_cast<long long>(least),
                              static_cast<long long>(most)));
        }
        return static_cast<int32_t>(v);
    }

    float real(const char* name) const {
        const double v = file_.real(key(name));
        if (!std::isfinite(v)) {
            fail(name, format("is %g, expected a finite number", v));
        }
        return static_cast<float>(v);
    }

    float positive(const char* name) const {
        const float v = real(name);
        if (!(v > 0)) {
            fail(name, format("is %g, expected a positive number", double{v}));
        }
        return v;
    }

    bool flag(const char* name) const { return file_.boolean(key(name)); }

    [[noreturn]] void fail(const char* name, const std::string& what) const {
        throw Error(DELTA_FORMAT, format("%s: key %s %s", file_.path().c_str(), key(name).c_str(), what.c_str()));
    }

    const GgufSet& file() const { return file_; }

   private:
    const GgufSet& file_;
    std::string prefix_;
};

}  // namespace delta
