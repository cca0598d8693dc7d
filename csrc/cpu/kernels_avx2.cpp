// AVX2 with FMA and F16C.
#define SIMD_WIDTH 8
#include "cpu/kernels.inc"

namespace delta {

void kernels_init_avx2(CpuKernels& kernels) { enter_kernels(kernels, "avx2"); }

}  // namespace delta
