#include "gguf/gguf.h"

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <optional>
#include <utility>

#include "base/error.h"
#include "gguf/gguf_file.h"

namespace delta {
namespace {

// "{stem}-00001-of-00003.gguf"
struct SplitName {
    std::string stem;
    uint32_t number;  // from 1
    uint32_t count;
};

std::string split_path(const std::string& stem, int64_t number, int64_t count) {
    return format("%s-%05" PRId64 "-of-%05" PRId64 ".gguf", stem.c_str(), number, count);
}

std::optional<SplitName> parse_split_name(const std::string& path) {
    constexpr size_t kTail = std::string_view("-00001-of-00003.gguf").size();
    if (path.size() <= kTail) {
        return std::nullopt;
    }
    SplitName name{path.substr(0, path.size() - kTail), 0, 0};
    if (std::sscanf(path.c_str() + name.stem.size(), "-%5u-of-%5u.gguf", &name.number, &name.count) != 2 ||
        split_path(name.stem, name.number, name.count) != path) {
        return std::nullopt;
    }
    return name;
}

// The numbers that every piece of a split set carries.
struct SplitKeys {
    int64_t number;   // split.no, from 0
    int64_t count;    // pieces
    int64_t tensors;  // in all pieces together
};

int64_t split_key(const GgufFile& file, const std::string& path, const char* key) {
    const GgufValue* value = file.find(key);
    const std::optional<int64_t> number = value == nullptr ? std::nullopt : integer_of(*value);
    if (!number.has_value() || *number < 0) {
        throw Error(DELTA_FORMAT, format("%s: key '%s' of a split set is %s, expected a count", quoted(path).c_str(), key,
                                         value == nullptr ? "missing" : "not a non-negative integer"));
    }
    return *number;
}

SplitKeys split_keys(const GgufFile& file, const std::string& path) {
    return {split_key(file, path, "split.no"), split_key(file, path, "split.count"), split_key(file, path, "split.tensors.count")};
}

// The stem of a set whose first piece is `path`.
std::string split_stem(const std::string& path, const SplitKeys& keys) {
    const std::optional<SplitName> name = parse_split_name(path);
    const std::string tail = split_path("", 1, keys.count);
    if (keys.number != 0) {
        const std::string first = name.has_value() ? quoted(split_path(name->stem, 1, keys.count)) : "the file that ends in " + quoted(tail);
        throw Error(DELTA_FORMAT, format("%s is piece %" PRId64 " of a split set of %" PRId64 ", open the first piece: %s",
                                         quoted(path).c_str(), keys.number + 1, keys.count, first.c_str()));
    }
    if (!name.has_value() || name->number != 1 || name->count != keys.count) {
        throw Error(DELTA_FORMAT, format("%s is the first piece of a split set of %" PRId64 ", so its name must end in %s",
                                         quoted(path).c_str(), keys.count, quoted(tail).c_str()));
    }
    return name->stem;
}

// A key that another piece has too must mean the same there.
void check_same_keys(const GgufFile& piece, const GgufFile& first, const std::string& path) {
    for (const GgufValue& value : piece.values) {
        const GgufValue* other = value.key == "split.no" ? nullptr : first.find(value.key);
        if (other != nullptr && (value.type != other->type || value.is_array != other->is_array || value.n_bytes != other->n_bytes ||
                                 std::memcmp(value.data, other->data, value.n_bytes) != 0)) {
            throw Error(DELTA_FORMAT, format("%s: key %s differs from the first piece of the split set", quoted(path).c_str(),
                                             quoted(value.key).c_str()));
        }
    }
}

}  // namespace

std::unique_ptr<GgufSet> GgufSet::open(const std::string& path) {
    std::unique_ptr<GgufSet> set(new GgufSet());
    set->files_.emplace_back(path);
    GgufFile first = parse_gguf(set->files_[0].data(), set->files_[0].size(), path);
    set->add_tensors(first.tensors, path);

    const GgufValue* count = first.find("split.count");
    if (count != nullptr) {
        const SplitKeys keys = split_keys(first, path);
        if (keys.count == 0) {
            throw Error(DELTA_FORMAT, format("%s: split.count is 0, expected at least 1", quoted(path).c_str()));
        }
        const std::string stem = keys.count > 1 ? split_stem(path, keys) : "";
        for (int64_t number = 2; number <= keys.count; ++number) {
            const std::string piece_path = split_path(stem, number, keys.count);
            set->add_piece(piece_path, number, keys.count, first);
        }
        if (std::cmp_not_equal(set->tensors_.size(), keys.tensors)) {
            throw Error(DELTA_FORMAT, format("%s: the split set has %zu tensors, split.tensors.count says %" PRId64,
                                             quoted(path).c_str(), set->tensors_.size(), keys.tensors));
        }
    }
    set->values_ = std::move(first.values);
    set->value_index_ = std::move(first.index);
    return set;
}

void GgufSet::add_piece(const std::string& path, int64_t number, int64_t count, const GgufFile& first) {
    try {
        files_.emplace_back(path);
    } catch (const Error& error) {
        throw Error(error.status, format("piece %" PRId64 " of %" PRId64 " of a split set: %s", number, count, error.what()));
    }
    const GgufFile piece = parse_gguf(files_.back().data(), files_.back().size(), path);
    const SplitKeys keys = split_keys(piece, path);
    if (keys.number != number - 1) {
        throw Error(DELTA_FORMAT, format("%s: split.no is %" PRId64 ", expected %" PRId64, quoted(path).c_str(), keys.number, number - 1));
    }
    check_same_keys(piece, first, path);
    add_tensors(piece.tensors, path);
}

void GgufSet::add_tensors(std::span<const GgufTensor> tensors, const std::string& path) {
    for (const GgufTensor& tensor : tensors) {
        if (!tensor_index_.emplace(tensor.name, tensors_.size()).second) {
            throw Error(DELTA_FORMAT, format("%s: tensor %s occurs twice", quoted(path).c_str(), quoted(tensor.name).c_str()));
        }
        tensors_.push_back(tensor);
    }
}

const GgufValue* GgufSet::find(std::string_view key) const {
    const auto found = value_index_.find(key);
    return found == value_index_.end() ? nullptr : &values_[found->second];
}

const GgufTensor* GgufSet::find_tensor(std::string_view name) const {
    const auto found = tensor_index_.find(name);
    return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

}  // namespace delta
