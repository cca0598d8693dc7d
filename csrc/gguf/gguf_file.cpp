#include "gguf/gguf_file.h"

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <iterator>

#include "base/error.h"
#include "gguf/cursor.h"

namespace delta {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF files are read in place");

constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kMinAlignment = 4;  // a float32 may be read in place
constexpr uint32_t kMaxDims = 4;
constexpr size_t kMaxTensorName = 63;

// Control characters have no place in a key or a name: they would hide in messages and listings.
void check_name(const Cursor& cursor, const char* what, std::string_view name) {
    for (const char c : name) {
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
            cursor.fail(DELTA_FORMAT, format("%s %s holds a control character", what, quoted(name).c_str()));
        }
    }
}

// Names of types that files may hold and this build may lack, for messages.
const char* known_type_name(uint32_t id) {
    static constexpr const char* kNames[] = {
        "F32",   "F16",   "Q4_0",  "Q4_1",  nullptr,   nullptr,  "Q5_0",    "Q5_1",   "Q8_0",  "Q8_1",   // 0
        "Q2_K",  "Q3_K",  "Q4_K",  "Q5_K",  "Q6_K",    "Q8_K",   "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S",  // 10
        "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8",    "I16",    "I32",     "I64",    "F64",   "IQ1_M",  // 20
        "BF16",  nullptr, nullptr, nullptr, "TQ1_0",   "TQ2_0",  nullptr,   nullptr,  nullptr, "MXFP4",  // 30
        "NVFP4", "Q1_0",  "Q2_0"};                                                                       // 40
    return id < std::size(kNames) && kNames[id] != nullptr ? kNames[id] : "unknown";
}

GgufType read_type(Cursor& cursor, std::string_view key) {
    const auto id = cursor.read<uint32_t>("value type");
    if (id > static_cast<uint32_t>(GgufType::F64)) {
        cursor.fail(DELTA_FORMAT, format("key %s has value type %u, known are 0 to 12", quoted(key).c_str(), id));
    }
    return static_cast<GgufType>(id);
}

GgufValue read_value(Cursor& cursor) {
    GgufValue value{};
    value.key = cursor.string("key");
    if (value.key.empty() || value.key.size() > 65535) {
        cursor.fail(DELTA_FORMAT, format("a key has %zu bytes, possible are 1 to 65535", value.key.size()));
    }
    check_name(cursor, "key", value.key);
    value.count = 1;
    value.type = read_type(cursor, value.key);
    if (value.type == GgufType::Array) {
        value.is_array = true;
        value.type = read_type(cursor, value.key);
        if (value.type == GgufType::Array) {
            cursor.fail(DELTA_UNSUPPORTED, format("key %s is an array of arrays", quoted(value.key).c_str()));
        }
        value.count = cursor.read<uint64_t>("array count");
    }
    const uint64_t start = cursor.offset();
    value.data = cursor.here();
    const std::string what = "value of key " + quoted(value.key);
    if (value.type == GgufType::String) {
        cursor.expect(value.count, sizeof(uint64_t), ("string count in the " + what).c_str());
        for (uint64_t i = 0; i < value.count; ++i) {
            cursor.string(what.c_str());
        }
    } else {
        const uint64_t each = item_bytes(value.type);
        cursor.expect(value.count, each, ("item count in the " + what).c_str());
        cursor.take(value.count * each, what.c_str());
    }
    value.n_bytes = cursor.offset() - start;
    if (value.type == GgufType::Bool) {
        for (uint64_t i = 0; i < value.count; ++i) {
            if (value.data[i] > 1) {
                cursor.fail(DELTA_FORMAT, format("%s is a boolean of byte value %u", what.c_str(), value.data[i]));
            }
        }
    }
    return value;
}

uint64_t read_alignment(const Cursor& cursor, const GgufFile& file) {
    const GgufValue* value = file.find("general.alignment");
    if (value == nullptr) {
        return kDefaultAlignment;
    }
    if (value->is_array || value->type != GgufType::U32) {
        cursor.fail(DELTA_FORMAT, format("general.alignment is a %s%s, expected u32", value->is_array ? "array of " : "",
                                         gguf_type_name(value->type)));
    }
    uint32_t alignment;
    std::memcpy(&alignment, value->data, sizeof alignment);
    if (!std::has_single_bit(alignment)) {
        cursor.fail(DELTA_FORMAT, format("general.alignment is %u, expected a power of two", alignment));
    }
    if (alignment < kMinAlignment) {
        cursor.fail(DELTA_UNSUPPORTED, format("general.alignment is %u, this build needs at least %" PRIu64, alignment, kMinAlignment));
    }
    return alignment;
}

GgufTensor read_tensor_info(Cursor& cursor, uint64_t& offset) {
    GgufTensor tensor{};
    tensor.name = cursor.string("tensor name");
    if (tensor.name.empty() || tensor.name.size() > kMaxTensorName) {
        cursor.fail(DELTA_FORMAT, format("a tensor name has %zu bytes, possible are 1 to %zu: %s", tensor.name.size(), kMaxTensorName,
                                         quoted(tensor.name).c_str()));
    }
    check_name(cursor, "tensor name", tensor.name);
    const std::string name = "tensor " + quoted(tensor.name);
    const auto n_dims = cursor.read<uint32_t>((name + ": number of dimensions").c_str());
    if (n_dims < 1 || n_dims > kMaxDims) {
        cursor.fail(DELTA_FORMAT, format("%s has %u dimensions, possible are 1 to %u", name.c_str(), n_dims, kMaxDims));
    }
    uint64_t dims[kMaxDims] = {1, 1, 1, 1};
    uint64_t n_values = 1;
    for (uint32_t i = 0; i < n_dims; ++i) {
        dims[i] = cursor.read<uint64_t>((name + ": dimensions").c_str());
        if (dims[i] == 0) {
            cursor.fail(DELTA_FORMAT, format("%s: dimension %u is 0", name.c_str(), i));
        }
        if (__builtin_mul_overflow(n_values, dims[i], &n_values) || n_values > INT64_MAX) {
            cursor.fail(DELTA_FORMAT, format("%s: its dimensions make more than 2^63 values", name.c_str()));
        }
    }
    const auto type_id = cursor.read<uint32_t>((name + ": type").c_str());
    tensor.type = find_type(type_id);
    if (tensor.type == nullptr) {
        cursor.fail(DELTA_UNSUPPORTED, format("%s has type %u (%s), this build reads %s", name.c_str(), type_id,
                                              known_type_name(type_id), type_names()));
    }
    tensor.cols = static_cast<int64_t>(dims[0]);
    tensor.rows = static_cast<int64_t>(dims[1]);
    tensor.mats = static_cast<int64_t>(dims[2] * dims[3]);
    if (tensor.cols % tensor.type->block != 0) {
        cursor.fail(DELTA_FORMAT, format("%s: rows of %" PRId64 " values are not made of whole %s blocks of %d", name.c_str(),
                                         tensor.cols, tensor.type->name, tensor.type->block));
    }
    const uint64_t n_blocks = n_values / static_cast<uint64_t>(tensor.type->block);
    if (__builtin_mul_overflow(n_blocks, static_cast<uint64_t>(tensor.type->block_bytes), &tensor.n_bytes)) {
        cursor.fail(DELTA_FORMAT, format("%s: its dimensions make more than 2^64 bytes", name.c_str()));
    }
    offset = cursor.read<uint64_t>((name + ": offset").c_str());
    return tensor;
}

// False if the result does not fit.
bool pad(uint64_t value, uint64_t alignment, uint64_t& padded) {
    if (__builtin_add_overflow(value, alignment - 1, &padded)) {
        return false;
    }
    padded &= ~(alignment - 1);
    return true;
}

}  // namespace

size_t item_bytes(GgufType type) {
    switch (type) {
        case GgufType::U8:
        case GgufType::I8:
        case GgufType::Bool:
            return 1;
        case GgufType::U16:
        case GgufType::I16:
            return 2;
        case GgufType::U32:
        case GgufType::I32:
        case GgufType::F32:
            return 4;
        case GgufType::U64:
        case GgufType::I64:
        case GgufType::F64:
            return 8;
        case GgufType::String:
        case GgufType::Array:
            break;
    }
    return 0;
}

const GgufValue* GgufFile::find(std::string_view key) const {
    const auto found = index.find(key);
    return found == index.end() ? nullptr : &values[found->second];
}

GgufFile parse_gguf(const uint8_t* data, size_t size, const std::string& path) {
    Cursor cursor(data, size, path);
    if (size == 0) {
        cursor.fail(DELTA_FORMAT, "the file is empty");
    }
    const std::string_view magic(reinterpret_cast<const char*>(cursor.take(4, "magic")), 4);
    if (magic != "GGUF") {
        const std::string_view start(magic.data(), std::min<size_t>(size, 24));
        cursor.fail(DELTA_FORMAT, start == "version https://git-lfs."
                                      ? "not a GGUF file but a Git LFS pointer to one: fetch the file itself"
                                      : "not a GGUF file: it starts with " + quoted(magic) + ", expected 'GGUF'");
    }
    const auto version = cursor.read<uint32_t>("version");
    if (version != 0 && (version & 0xffff) == 0) {
        cursor.fail(DELTA_UNSUPPORTED, "a big-endian GGUF file, this build reads little-endian ones");
    }
    if (version != 2 && version != 3) {
        cursor.fail(DELTA_UNSUPPORTED, format("GGUF version %u, this build reads 2 and 3", version));
    }
    const auto n_tensors = cursor.read<uint64_t>("number of tensors");
    const auto n_values = cursor.read<uint64_t>("number of keys");
    constexpr uint64_t kMinValueBytes = 8 + 1 + 4 + 1;             // key length, key, type, value
    constexpr uint64_t kMinTensorBytes = 8 + 1 + 4 + 8 + 4 + 8;    // name length, name, n_dims, one dimension, type, offset
    cursor.expect(n_tensors, kMinTensorBytes, "number of tensors");
    cursor.expect(n_values, kMinValueBytes, "number of keys");

    GgufFile file;
    for (uint64_t i = 0; i < n_values; ++i) {
        file.values.push_back(read_value(cursor));
        const std::string_view key = file.values.back().key;
        if (!file.index.emplace(key, i).second) {
            cursor.fail(DELTA_FORMAT, format("key %s occurs twice", quoted(key).c_str()));
        }
    }
    const uint64_t alignment = read_alignment(cursor, file);

    uint64_t expected = 0;  // offset of the next tensor: tensors follow each other without holes
    for (uint64_t i = 0; i < n_tensors; ++i) {
        uint64_t offset = 0;
        file.tensors.push_back(read_tensor_info(cursor, offset));
        GgufTensor& tensor = file.tensors.back();
        if (offset != expected) {
            cursor.fail(DELTA_FORMAT, format("tensor %s: data offset is %" PRIu64 ", expected %" PRIu64, quoted(tensor.name).c_str(),
                                             offset, expected));
        }
        if (__builtin_add_overflow(offset, tensor.n_bytes, &expected) || !pad(expected, alignment, expected)) {
            cursor.fail(DELTA_FORMAT, format("tensor %s: its data ends beyond 2^64", quoted(tensor.name).c_str()));
        }
    }
    if (n_tensors == 0) {
        return file;
    }
    uint64_t start = 0;
    pad(cursor.offset(), alignment, start);  // cannot overflow: both are far below 2^63
    uint64_t offset = 0;
    for (GgufTensor& tensor : file.tensors) {
        if (start > size || offset > size - start || tensor.n_bytes > size - start - offset) {
            cursor.fail(DELTA_FORMAT, format("tensor %s needs %" PRIu64 " bytes at %" PRIu64 ", but the file ends at %zu (truncated?)",
                                             quoted(tensor.name).c_str(), tensor.n_bytes, start + offset, size));
        }
        tensor.data = data + start + offset;
        pad(offset + tensor.n_bytes, alignment, offset);
    }
    return file;
}

}  // namespace delta
