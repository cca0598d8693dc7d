// delta_test_gguf: the parser alone, every byte it promised read.
#include <cstdio>
#include <string>

#include "base/checksum.h"
#include "base/error.h"
#include "gguf/gguf.h"
#include "include/deltallama_test.h"

using namespace delta;

delta_status delta_test_gguf(const char* path, delta_test_gguf_info* info) {
    try {
        if (path == nullptr || info == nullptr || info->size != sizeof *info) {
            throw Error(DELTA_ARG, "delta_test_gguf: a null pointer or another struct size");
        }
        const auto set = GgufSet::open(path);
        delta_test_gguf_info found{};
        found.size = sizeof found;
        found.n_files = static_cast<uint32_t>(set->n_files());
        found.n_values = set->values().size();
        found.n_tensors = set->tensors().size();
        Checksum values, data;
        for (const GgufValue& value : set->values()) {
            values.update(value.key.data(), value.key.size());
            const std::string text = set->text(value);
            values.update(text.data(), text.size());
        }
        for (const GgufTensor& tensor : set->tensors()) {
            found.n_bytes += tensor.n_bytes;
            data.update(tensor.name.data(), tensor.name.size());
            data.update(tensor.data, tensor.n_bytes);
        }
        found.values_checksum = values.digest();
        found.data_checksum = data.digest();
        *info = found;
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
