// Host memory for the simulated copy kernel: the counterpart of StreamingMemory in kernels.cu.
#ifndef HYBRIDKV_CUDA_HOST_MEMORY_H_
#define HYBRIDKV_CUDA_HOST_MEMORY_H_

#include <cstdint>
#include <cstring>

#include "fragments.h"

namespace hybridkv::cuda {

struct HostMemory {
  std::uint64_t wide_words = 0;

  // A GPU would fault; the CPU would not notice.
  bool misaligned = false;

  template <std::uint32_t kWidth>
  void copy(std::uint64_t source, std::uint64_t destination) {
    if (source % kWidth != 0 || destination % kWidth != 0) misaligned = true;
    if (kWidth == kWidestWord) ++wide_words;
    std::memcpy(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source), kWidth);
  }

  template <std::uint32_t kWidth>
  void copy_many(std::uint64_t source, std::uint64_t destination) {
    for (std::uint32_t i = 0; i < kWordsInFlight; ++i) {
      copy<kWidth>(source + i * kLanes * kWidth, destination + i * kLanes * kWidth);
    }
  }
};

}  // namespace hybridkv::cuda

#endif  // HYBRIDKV_CUDA_HOST_MEMORY_H_
