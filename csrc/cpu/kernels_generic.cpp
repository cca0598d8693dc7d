// The portable kernels: what every other ISA is compared with, and where the cascade of tables begins.
#define SIMD_WIDTH 4
#include "cpu/kernels.inc"

namespace delta {

void kernels_init_generic(CpuKernels& kernels) { enter_kernels(kernels, "generic"); }

}  // namespace delta
