#include "quant/quant.h"

#include <string>

#include "quant/bf16.h"
#include "quant/f16.h"
#include "quant/f32.h"
#include "quant/mxfp4.h"
#include "quant/q8_0.h"

namespace delta {
namespace {

constexpr TypeInfo kTypes[] = {
#define TYPE(id, name, block, layout, to, from, largest) {id, name, block, sizeof(layout), to, from, largest},
#include "quant/types.def"
#undef TYPE
};

}  // namespace

const TypeInfo* find_type(uint32_t id) {
    for (const TypeInfo& type : kTypes) {
        if (type.id == id) {
            return &type;
        }
    }
    return nullptr;
}

const TypeInfo* find_type(std::string_view name) {
    for (const TypeInfo& type : kTypes) {
        if (type.name == name) {
            return &type;
        }
    }
    return nullptr;
}

const char* type_names() {
    static const std::string names = [] {
        std::string all;
        for (const TypeInfo& type : kTypes) {
            all += all.empty() ? type.name : std::string(", ") + type.name;
        }
        return all;
    }();
    return names.c_str();
}

}  // namespace delta
