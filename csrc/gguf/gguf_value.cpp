// Typed access to the values of a GGUF file, and their text.
#include <charconv>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "gguf/gguf.h"
#include "gguf/gguf_file.h"

namespace delta {
namespace {

// Values are at any address in the file.
template <class T>
T load(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

bool is_integer(GgufType type) {
    return type <= GgufType::I32 || type == GgufType::U64 || type == GgufType::I64;
}
bool is_real(GgufType type) { return type == GgufType::F32 || type == GgufType::F64; }
bool is_bool(GgufType type) { return type == GgufType::Bool; }
bool is_string(GgufType type) { return type == GgufType::String; }

// An item of integer type; none if it is beyond int64.
std::optional<int64_t> load_integer(GgufType type, const uint8_t* at) {
    switch (type) {
        case GgufType::U8:
            return load<uint8_t>(at);
        case GgufType::I8:
            return load<int8_t>(at);
        case GgufType::U16:
            return load<uint16_t>(at);
        case GgufType::I16:
            return load<int16_t>(at);
        case GgufType::U32:
            return load<uint32_t>(at);
        case GgufType::I32:
            return load<int32_t>(at);
        case GgufType::I64:
            return load<int64_t>(at);
        case GgufType::U64: {
            const auto number = load<uint64_t>(at);
            return std::in_range<int64_t>(number) ? std::optional(static_cast<int64_t>(number)) : std::nullopt;
        }
        default:
            return std::nullopt;
    }
}

std::string type_text(const GgufValue& value) {
    return value.is_array ? std::string("arr[") + gguf_type_name(value.type) + "]" : gguf_type_name(value.type);
}

// Calls fn(index, text) for each string of a checked value.
template <class Fn>
void for_each_string(const GgufValue& value, Fn fn) {
    const uint8_t* at = value.data;
    for (uint64_t i = 0; i < value.count; ++i) {
        const auto length = load<uint64_t>(at);
        fn(i, std::string_view(reinterpret_cast<const char*>(at + sizeof length), static_cast<size_t>(length)));
        at += sizeof length + length;
    }
}

template <class T>
void append_number(std::string& out, const uint8_t* at) {
    char digits[64];
    const auto result = std::to_chars(digits, digits + sizeof digits, load<T>(at));
    out.append(digits, result.ptr);
}

// Appends one item that is no string and returns its size.
size_t append_item(std::string& out, GgufType type, const uint8_t* at) {
    switch (type) {
        case GgufType::F32:
            append_number<float>(out, at);
            return sizeof(float);
        case GgufType::F64:
            append_number<double>(out, at);
            return sizeof(double);
        case GgufType::U64:
            append_number<uint64_t>(out, at);
            return sizeof(uint64_t);
        case GgufType::Bool:
            out += *at != 0 ? "true" : "false";
            return 1;
        default:
            out += std::to_string(*load_integer(type, at));
            return item_bytes(type);
    }
}

}  // namespace

const char* gguf_type_name(GgufType type) {
    static constexpr const char* kNames[] = {"u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "str", "arr", "u64", "i64", "f64"};
    return kNames[static_cast<uint32_t>(type)];
}

std::optional<int64_t> integer_of(const GgufValue& value) {
    return value.is_array || !is_integer(value.type) ? std::nullopt : load_integer(value.type, value.data);
}

const GgufValue& GgufSet::require(std::string_view key, bool array, bool (*fits)(GgufType), const char* expected) const {
    const GgufValue* value = find(key);
    if (value == nullptr) {
        throw Error(DELTA_FORMAT, format("%s: key %s is missing, expected %s", quoted(path()).c_str(), quoted(key).c_str(), expected));
    }
    if (value->is_array != array || !fits(value->type)) {
        throw Error(DELTA_FORMAT, format("%s: key %s has type %s, expected %s", quoted(path()).c_str(), quoted(key).c_str(),
                                         type_text(*value).c_str(), expected));
    }
    return *value;
}

int64_t GgufSet::integer(std::string_view key) const {
    const GgufValue& value = require(key, false, is_integer, "an integer");
    const std::optional<int64_t> number = load_integer(value.type, value.data);
    if (!number.has_value()) {
        throw Error(DELTA_FORMAT, format("%s: key %s is %s, which is too large", quoted(path()).c_str(), quoted(key).c_str(),
                                         text(value).c_str()));
    }
    return *number;
}

double GgufSet::real(std::string_view key) const {
    const GgufValue& value = require(key, false, is_real, "a real number");
    return value.type == GgufType::F32 ? static_cast<double>(load<float>(value.data)) : load<double>(value.data);
}

std::vector<double> GgufSet::reals(std::string_view key) const {
    const GgufValue& value = require(key, true, is_real, "an array of real numbers");
    const size_t each = item_bytes(value.type);
    std::vector<double> numbers;
    numbers.reserve(value.count);
    for (uint64_t i = 0; i < value.count; ++i) {
        const uint8_t* at = value.data + i * each;
        numbers.push_back(value.type == GgufType::F32 ? static_cast<double>(load<float>(at)) : load<double>(at));
    }
    return numbers;
}

bool GgufSet::boolean(std::string_view key) const { return *require(key, false, is_bool, "a boolean").data != 0; }

std::string_view GgufSet::string(std::string_view key) const {
    const GgufValue& value = require(key, false, is_string, "a string");
    return {reinterpret_cast<const char*>(value.data) + sizeof(uint64_t), static_cast<size_t>(value.n_bytes - sizeof(uint64_t))};
}

std::vector<int64_t> GgufSet::integers(std::string_view key) const {
    const GgufValue& value = require(key, true, is_integer, "an array of integers");
    const size_t each = item_bytes(value.type);
    std::vector<int64_t> numbers;
    numbers.reserve(value.count);
    for (uint64_t i = 0; i < value.count; ++i) {
        const std::optional<int64_t> number = load_integer(value.type, value.data + i * each);
        if (!number.has_value()) {
            throw Error(DELTA_FORMAT, format("%s: item %llu of key %s is too large", quoted(path()).c_str(),
                                             static_cast<unsigned long long>(i), quoted(key).c_str()));
        }
        numbers.push_back(*number);
    }
    return numbers;
}

void GgufSet::each_string(std::string_view key, const std::function<void(uint64_t, std::string_view)>& fn) const {
    for_each_string(require(key, true, is_string, "an array of strings"), fn);
}

std::string GgufSet::text(const GgufValue& value) {
    std::string out = value.is_array ? "[" : "";
    if (value.type == GgufType::String) {
        for_each_string(value, [&](uint64_t i, std::string_view item) {
            out += i == 0 ? "" : ", ";
            out += item;
        });
    } else {
        const uint8_t* at = value.data;
        for (uint64_t i = 0; i < value.count; ++i) {
            out += i == 0 ? "" : ", ";
            at += append_item(out, value.type, at);
        }
    }
    return value.is_array ? out + "]" : out;
}

}  // namespace delta
