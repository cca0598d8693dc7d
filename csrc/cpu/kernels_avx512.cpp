// AVX-512 (F, BW, VL, VNNI).
#define SIMD_WIDTH 16
#include "cpu/kernels.inc"

namespace delta {

void kernels_init_avx512(CpuKernels& kernels) { enter_kernels(kernels, "avx512"); }

}  // namespace delta
