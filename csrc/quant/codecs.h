// All conversions as compiled for one instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/quant.h"

namespace delta {

struct Codecs {
    const TypeInfo* types;
    size_t n_types;
    uint32_t (*largest_bits)(const float* x, int64_t n);                                                 // block.h
    void (*repack_mxfp4)(const uint8_t* packed, const uint8_t* scales, void* dst, int64_t n_blocks);     // mxfp4_repack.h
};

const Codecs& generic_codecs();
const Codecs& avx2_codecs();  // x86-64 only
// The best for this processor, or what DELTALLAMA_CPU names (base/cpu.h). Throws Error(UNSUPPORTED).
const Codecs& best_codecs();

}  // namespace delta
