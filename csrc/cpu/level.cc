#include "csrc/cpu/level.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace hybridkv::cpu {
namespace {

constexpr const char* kHighestVariable = "HYBRIDKV_CPU_LEVEL";

// Limit from the environment, read once, so that all kernels of a process are of one level.
Level highest_allowed() {
  const char* name = std::getenv(kHighestVariable);
  if (name == nullptr) return Level::kAvx512;
  for (const Level level : {Level::kScalar, Level::kAvx2, Level::kAvx512}) {
    if (std::string(name) == name_of(level)) return level;
  }
  throw std::invalid_argument(std::string(kHighestVariable) + ": expected scalar, avx2 or avx512, got " + name);
}

std::vector<Level> machine_levels() {
  std::vector<Level> levels{Level::kScalar};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) levels.push_back(Level::kAvx2);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) levels.push_back(Level::kAvx512);
#endif
  return levels;
}

}  // namespace

std::vector<Level> supported_levels() {
  static const Level highest = highest_allowed();
  std::vector<Level> levels = machine_levels();
  levels.erase(std::upper_bound(levels.begin(), levels.end(), highest), levels.end());
  return levels;
}

Level best_level() {
  static const Level best = supported_levels().back();
  return best;
}

const char* name_of(Level level) {
  switch (level) {
    case Level::kScalar:
      return "scalar";
    case Level::kAvx2:
      return "avx2";
    case Level::kAvx512:
      return "avx512";
  }
  return "unknown";
}

}  // namespace hybridkv::cpu
