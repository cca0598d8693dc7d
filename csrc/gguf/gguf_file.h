// The parser: one GGUF file in memory to keys and tensors. Internal to gguf/ and its fuzzer; everybody else uses GgufSet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "gguf/gguf.h"

namespace delta {

struct GgufFile {
    std::vector<GgufValue> values;
    std::unordered_map<std::string_view, size_t> index;  // key to values
    std::vector<GgufTensor> tensors;

    const GgufValue* find(std::string_view key) const;  // null if absent
};

// Bytes of one item; 0 for strings and arrays.
size_t item_bytes(GgufType type);
// `path` is for messages. The result points into `data`. Throws Error (FORMAT, UNSUPPORTED).
GgufFile parse_gguf(const uint8_t* data, size_t size, const std::string& path);

}  // namespace delta
