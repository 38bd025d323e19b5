#include "csrc/cpu/level.h"

namespace hybridkv::cpu {

std::vector<Level> supported_levels() {
  std::vector<Level> levels{Level::kScalar};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) levels.push_back(Level::kAvx2);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) levels.push_back(Level::kAvx512);
#endif
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
