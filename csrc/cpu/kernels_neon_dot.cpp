// NEON with the dot products of bytes (FEAT_DotProd).
#define SIMD_WIDTH 4
#define SIMD_NEON
#include "cpu/kernels.inc"

namespace delta {

void kernels_init_neon_dot(CpuKernels& kernels) { enter_kernels(kernels, "neon_dot"); }

}  // namespace delta
