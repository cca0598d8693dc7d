// kernels.inc at 16 lanes without an instruction set to match: test builds only.
#define SIMD_WIDTH 16
#include "cpu/kernels.inc"

namespace delta {

void kernels_init_width16(CpuKernels& kernels) { enter_kernels(kernels, "width16"); }

}  // namespace delta
