// NEON, which every 64-bit ARM processor has.
#define SIMD_WIDTH 4
#define SIMD_NEON
#include "cpu/kernels.inc"

namespace delta {

void kernels_init_neon(CpuKernels& kernels) { enter_kernels(kernels, "neon"); }

}  // namespace delta
