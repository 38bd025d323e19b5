#include "csrc/cpu/kernels.h"

namespace hybridkv::cpu {

const Kernels& kernels(Level level) {
#if defined(__x86_64__)
  if (level == Level::kAvx512) return detail::kAvx512Kernels;
  if (level == Level::kAvx2) return detail::kAvx2Kernels;
#endif
  return detail::kScalarKernels;
}

}  // namespace hybridkv::cpu
