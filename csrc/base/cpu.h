// What this processor can do, and which kernels to use on it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace delta {

// True only if the operating system also saves the registers.
struct CpuFeatures {
    bool avx2;    // AVX2, FMA, F16C
    bool avx512;  // F, BW, VL, VNNI
    bool neon;
    bool neon_dot;   // and FEAT_DotProd
    bool neon_i8mm;  // and FEAT_I8MM
};
const CpuFeatures& cpu_features();

enum class Isa { Generic, Avx2, Avx512, Neon, NeonDot, NeonI8mm };
const char* isa_name(Isa isa);
// The best this build has for this processor, or what DELTALLAMA_CPU names. Throws Error(UNSUPPORTED) if that is unknown to the
// build or lacking in the processor.
Isa choose_isa();

// Processors this process may run on (affinity, container quota), and the physical cores among them. At least 1.
int32_t usable_cpus();
int32_t physical_cores();
// Ids of the processors this process may run on, one of each core before the second of any.
std::vector<int> processors_by_core();
// "Intel(R) Xeon(R) ..."; "unknown processor" if the system does not say.
std::string processor_name();

}  // namespace delta
