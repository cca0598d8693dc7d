// A checked view of a GGUF file or a split set. The files are mapped; names, strings and tensor data are borrowed from the map and
// live as long as the GgufSet. Dimensions are turned into (mats, rows, cols), row-major, here and nowhere else.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/mmap.h"
#include "quant/quant.h"

namespace delta {

// Numbered as in the file; Array is 9 there and never the type of an item here.
enum class GgufType : uint32_t { U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64 };
const char* gguf_type_name(GgufType type);  // "u32", "str"

struct GgufValue {
    std::string_view key;
    GgufType type;          // of a scalar, or of the items of an array
    bool is_array = false;
    uint64_t count = 1;     // items
    const uint8_t* data;    // first item in the map, at any address; strings are length-prefixed, already checked
    uint64_t n_bytes;
};
// The number of an integer scalar; none for other types and beyond int64.
std::optional<int64_t> integer_of(const GgufValue& value);

struct GgufTensor {
    std::string_view name;
    const TypeInfo* type;
    int64_t mats, rows, cols;  // GGUF {cols, rows, mats...}; absent dimensions are 1
    const uint8_t* data;       // mats * rows * row_bytes(type, cols), at least 4-byte aligned
    uint64_t n_bytes;
};

struct GgufFile;

class GgufSet {
   public:
    // Opens `path`; the first file of a split set (`-00001-of-000NN`) opens all of them. Throws Error (IO, FORMAT, UNSUPPORTED).
    static std::unique_ptr<GgufSet> open(const std::string& path);

    const std::string& path() const { return files_.front().path(); }
    size_t n_files() const { return files_.size(); }
    // Of the first file, in file order. The other files of a split set can only repeat them.
    std::span<const GgufValue> values() const { return values_; }
    // Of all files, in file order.
    std::span<const GgufTensor> tensors() const { return tensors_; }
    const GgufValue* find(std::string_view key) const;             // null if absent
    const GgufTensor* find_tensor(std::string_view name) const;    // null if absent

    // Typed access; an absent key or another type is an Error(FORMAT) that names the key, the expected and the found type. Integers
    // are accepted in any integer width if they fit; F32 also from F64.
    int64_t integer(std::string_view key) const;
    double real(std::string_view key) const;
    bool boolean(std::string_view key) const;
    std::string_view string(std::string_view key) const;
    std::vector<int64_t> integers(std::string_view key) const;  // an array of integers; a scalar is an error
    std::vector<double> reals(std::string_view key) const;      // an array of F32 or F64
    bool has(std::string_view key) const { return find(key) != nullptr; }
    // Calls `fn(index, text)` for each string of an array.
    void each_string(std::string_view key, const std::function<void(uint64_t, std::string_view)>& fn) const;
    // The value as text, arrays as [a, b, ...]; numbers in the shortest form that reads back equal.
    static std::string text(const GgufValue& value);

   private:
    GgufSet() = default;
    const GgufValue& require(std::string_view key, bool array, bool (*fits)(GgufType), const char* expected) const;
    void add_piece(const std::string& path, int64_t number, int64_t count, const GgufFile& first);
    void add_tensors(std::span<const GgufTensor> tensors, const std::string& path);

    std::vector<MappedFile> files_;
    std::vector<GgufValue> values_;
    std::vector<GgufTensor> tensors_;
    std::unordered_map<std::string_view, size_t> value_index_;
    std::unordered_map<std::string_view, size_t> tensor_index_;
};

}  // namespace delta
