// Which instructions the kernels use. Chosen when the program runs, since one binary serves many machines.
#ifndef HYBRIDKV_CPU_LEVEL_H_
#define HYBRIDKV_CPU_LEVEL_H_

#include <vector>

namespace hybridkv::cpu {

// In order of preference, worst first.
enum class Level { kScalar, kAvx2, kAvx512 };

// What this machine can run, worst first; kScalar is always among them. The environment variable HYBRIDKV_CPU_LEVEL
// (scalar, avx2 or avx512) leaves out what is better; another value throws std::invalid_argument.
std::vector<Level> supported_levels();

// The last of them.
Level best_level();

const char* name_of(Level level);

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_LEVEL_H_
