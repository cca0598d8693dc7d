// From the way compressed-tensors packs MXFP4 to GGUF blocks. Both hold the same codes: there element 2 k of a group is in the low half
// of byte k and element 2 k + 1 in its high half; in a block elements 0 .. 15 are the low halves and 16 .. 31 the high halves.
#pragma once

#include "quant/mxfp4.h"

namespace delta {

// packed [n_blocks][16], scales [n_blocks].
static inline void repack_mxfp4_blocks(const uint8_t* packed, const uint8_t* scales, void* dst, int64_t n_blocks) {
    constexpr uint64_t kLow = 0x0f0f0f0f0f0f0f0f;
    auto* blocks = static_cast<BlockMXFP4*>(dst);
    for (int64_t b = 0; b < n_blocks; ++b) {
        uint64_t first, second;  // elements 0 .. 15, 16 .. 31
        std::memcpy(&first, packed + 16 * b, sizeof first);
        std::memcpy(&second, packed + 16 * b + 8, sizeof second);
        const uint64_t even = (first & kLow) | (second & kLow) << 4, odd = (first >> 4 & kLow) | (second & ~kLow);
        blocks[b].e = scales[b];
#ifdef __x86_64__
        const __m128i codes = _mm_unpacklo_epi8(_mm_cvtsi64_si128(static_cast<int64_t>(even)), _mm_cvtsi64_si128(static_cast<int64_t>(odd)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(blocks[b].qs), codes);
#else
        for (int64_t k = 0; k < 8; ++k) {
            blocks[b].qs[2 * k] = static_cast<uint8_t>(even >> (8 * k));
            blocks[b].qs[2 * k + 1] = static_cast<uint8_t>(odd >> (8 * k));
        }
#endif
    }
}

}  // namespace delta
