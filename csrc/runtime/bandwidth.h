// How fast this machine reads the weights of a model when it does nothing else: what the speed of generation is compared with.
#pragma once

#include <cstdint>

#include "gguf/gguf.h"

namespace delta {

// Bytes per second at which `n_threads` threads (0: physical cores) together add up the mapped tensors of `file`, at most their first
// 4 GiB, in 256-bit loads: the best of 7 passes after one that brings the pages in. Tensors that fit in a cache are read from there.
// Throws Error (ARG, DEVICE), and Error(FORMAT) if there is nothing to read.
double measure_read_bandwidth(const GgufSet& file, int32_t n_threads);

}  // namespace delta
