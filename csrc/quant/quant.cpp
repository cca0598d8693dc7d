#include "quant/quant.h"

#include <string>

#include "base/cpu.h"
#include "quant/codecs.h"

namespace delta {
namespace {

// The definition: what one looks up by id or name runs the same code on every processor.
template <class Matches>
const TypeInfo* find(const Codecs& codecs, Matches matches) {
    for (size_t i = 0; i < codecs.n_types; ++i) {
        if (matches(codecs.types[i])) {
            return &codecs.types[i];
        }
    }
    return nullptr;
}

}  // namespace

const TypeInfo* find_type(uint32_t id) {
    return find(generic_codecs(), [id](const TypeInfo& type) { return type.id == id; });
}

const TypeInfo* find_type(std::string_view name) {
    return find(generic_codecs(), [name](const TypeInfo& type) { return type.name == name; });
}

const char* type_names() {
    static const std::string names = [] {
        std::string all;
        for (size_t i = 0; i < generic_codecs().n_types; ++i) {
            all += all.empty() ? "" : ", ";
            all += generic_codecs().types[i].name;
        }
        return all;
    }();
    return names.c_str();
}

const Codecs& best_codecs() {
#if defined(__x86_64__)
    return choose_isa() == Isa::Generic ? generic_codecs() : avx2_codecs();
#else
    return generic_codecs();
#endif
}

}  // namespace delta
