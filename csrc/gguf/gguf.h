// A checked view of a GGUF file or a split set. The files are mapped; names, strings and tensor data are borrowed from the map and
// live as long as the GgufSet. Dimensions are turned into (mats, rows, cols), row-major, here and nowhere else.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quant/quant.h"

namespace delta {

enum class GgufType : uint32_t { U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64 };

struct GgufValue {
    std::string_view key;
    GgufType type;          // of a scalar, or of the items of an array
    bool is_array = false;
    uint64_t count = 1;     // items
    const uint8_t* data;    // first item in the map; strings are length-prefixed, already checked
    uint64_t n_bytes;
};

struct GgufTensor {
    std::string_view name;
    const TypeInfo* type;
    int64_t mats, rows, cols;  // GGUF {cols, rows, mats...}; absent dimensions are 1
    const uint8_t* data;       // mats * rows * row_bytes(type, cols)
    uint64_t n_bytes;
};

class GgufSet {
   public:
    // Opens `path`; the first file of a split set (`-00001-of-000NN`) opens all of them. Throws Error (IO, FORMAT, UNSUPPORTED).
    static std::unique_ptr<GgufSet> open(const std::string& path);
    virtual ~GgufSet() = default;

    virtual const std::string& path() const = 0;
    virtual std::span<const GgufValue> values() const = 0;
    virtual std::span<const GgufTensor> tensors() const = 0;
    virtual const GgufValue* find(std::string_view key) const = 0;             // null if absent
    virtual const GgufTensor* find_tensor(std::string_view name) const = 0;    // null if absent

    // Typed access; an absent key or another type is an Error(FORMAT) that names the key, the expected and the found type. Integers
    // are accepted in any integer width if they fit; F32 also from F64.
    int64_t integer(std::string_view key) const;
    double real(std::string_view key) const;
    bool boolean(std::string_view key) const;
    std::string_view string(std::string_view key) const;
    std::vector<int64_t> integers(std::string_view key) const;  // an array of integers; a scalar is an error
    bool has(std::string_view key) const { return find(key) != nullptr; }
    // Calls `fn(index, text)` for each string of an array.
    void each_string(std::string_view key, const std::function<void(uint64_t, std::string_view)>& fn) const;
    // The value as text, arrays as [a, b, ...].
    std::string text(const GgufValue& value) const;
};

}  // namespace delta
