// Instruction set of the kernels, chosen at run time because one binary serves many machines.
#ifndef HYBRIDKV_CPU_LEVEL_H_
#define HYBRIDKV_CPU_LEVEL_H_

#include <vector>

namespace hybridkv::cpu {

// Ascending preference.
enum class Level { kScalar, kAvx2, kAvx512 };

// Levels that this machine supports, the best last; always has kScalar. The environment variable HYBRIDKV_CPU_LEVEL
// (scalar, avx2 or avx512) removes better levels; another value throws std::invalid_argument.
std::vector<Level> supported_levels();

// The best supported level.
Level best_level();

const char* name_of(Level level);

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_LEVEL_H_
