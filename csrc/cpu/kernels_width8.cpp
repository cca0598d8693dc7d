// kernels.inc at 8 lanes without an instruction set to match: test builds only.
#define SIMD_WIDTH 8
#include "cpu/kernels.inc"

namespace delta {

void kernels_init_width8(CpuKernels& kernels) { enter_kernels(kernels, "width8"); }

}  // namespace delta
