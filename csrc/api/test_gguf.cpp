// delta_test_gguf: the parser alone, every byte it promised read.
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "base/error.h"
#include "gguf/gguf.h"
#include "gguf/gguf_file.h"
#include "include/deltallama_test.h"

using namespace delta;

namespace {

delta_test_gguf_info read_all(std::span<const GgufValue> values, std::span<const GgufTensor> tensors) {
    delta_test_gguf_info info{};
    info.size = sizeof info;
    info.n_values = values.size();
    info.n_tensors = tensors.size();
    Checksum text, data;
    for (const GgufValue& value : values) {
        const std::string line = GgufSet::text(value);
        text.update(value.key.data(), value.key.size());
        text.update(line.data(), line.size());
    }
    for (const GgufTensor& tensor : tensors) {
        info.n_bytes += tensor.n_bytes;
        data.update(tensor.name.data(), tensor.name.size());
        data.update(tensor.data, tensor.n_bytes);
    }
    info.values_checksum = text.digest();
    info.data_checksum = data.digest();
    return info;
}

}  // namespace

delta_status delta_test_gguf(const char* path, delta_test_gguf_info* info) {
    try {
        const auto set = GgufSet::open(path);
        *info = read_all(set->values(), set->tensors());
        info->n_files = static_cast<uint32_t>(set->n_files());
        return DELTA_OK;
    } catch (...) {
        return translate_exception();
    }
}

delta_status delta_test_gguf_bytes(const void* data, size_t n_bytes, delta_test_gguf_info* info) {
    try {
        // A copy of its own, so that a sanitizer sees one byte too many.
        const auto* bytes = static_cast<const uint8_t*>(data);
        const std::vector<uint8_t> copy(bytes, bytes + n_bytes);
        const GgufFile file = parse_gguf(copy.data(), copy.size(), "memory");
        *info = read_all(file.values, file.tensors);
        info->n_files = 1;
        return DELTA_OK;
    } catch (...) {
        return translate_exception();
    }
}

delta_status delta_test_gguf_text(const char* path, const char* key, char* buffer, size_t capacity) {
    try {
        const auto set = GgufSet::open(path);
        const GgufValue* value = set->find(key);
        if (value == nullptr) {
            throw Error(DELTA_FORMAT, "no key " + quoted(key));
        }
        const std::string text = set->text(*value);
        if (text.size() >= capacity) {
            throw Error(DELTA_ARG, format("the text has %zu bytes", text.size()));
        }
        std::snprintf(buffer, capacity, "%s", text.c_str());
        return DELTA_OK;
    } catch (...) {
        return translate_exception();
    }
}

uint64_t delta_test_checksum(const void* data, size_t n_bytes) { return checksum(data, n_bytes); }
