// Inner loops, one set for each level of instructions. The rest of this folder is the same for all levels.
#ifndef HYBRIDKV_CPU_KERNELS_H_
#define HYBRIDKV_CPU_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "csrc/cpu/level.h"
#include "hybridkv/xxh3.h"

namespace hybridkv::cpu {

using Byte = unsigned char;
using Word = std::uint64_t;

// Streams of memory that one loop advances together: the memory controller keeps several pages open at once, and one
// single stream leaves it idle while its prefetcher finds the next page.
inline constexpr std::size_t kNumLanes = 4;

// `num_bytes` of a copy without checksum is a multiple of this.
inline constexpr std::size_t kCopyStepBytes = 256;

// Alignment and size of streaming stores: a cache line.
inline constexpr std::size_t kLineBytes = 64;

// One stream of memory. A kernel without copies ignores `destination`; one without checksums ignores `sums`.
struct Lane {
  const Byte* source;
  Byte* destination;
  Word* sums;  // xxh3::kLanes words for each block of xxh3::kBlockBytes
};

// Kind of stores: kStreaming bypasses the caches and needs destinations aligned to kLineBytes.
enum class Stores { kCached, kStreaming };

// Kernels of one level of instructions. A call advances `lanes`. After streaming stores, `fence` must run before
// another thread or a device reads the bytes.
struct Kernels {
  Level level;
  bool streams;  // kStreaming differs from kCached
  void (*copy)(Lane* lanes, std::size_t num_lanes, std::size_t num_bytes, Stores stores);
  void (*copy_and_sum)(Lane* lanes, std::size_t num_lanes, std::size_t num_blocks, Stores stores);
  void (*sum)(Lane* lanes, std::size_t num_lanes, std::size_t num_blocks);
  void (*fold)(Word* accumulators, const Word* sums, std::size_t num_blocks);
  // Adds the first stripes of a record's last block to the accumulators.
  void (*add_stripes)(Word* accumulators, const Byte* stripes, std::size_t num_stripes);
  void (*fence)();
};

// `level` must be one of supported_levels().
const Kernels& kernels(Level level);

namespace detail {
extern const Kernels kScalarKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif
}  // namespace detail

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_KERNELS_H_
