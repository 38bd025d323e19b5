// The inner loops, once for each level of instructions. Everything else in this folder is the same for all of them.
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
// stream alone leaves it idle while its prefetcher finds the next page.
inline constexpr std::size_t kNumLanes = 4;

// `num_bytes` of a copy without checksum are a multiple of this.
inline constexpr std::size_t kCopyStepBytes = 256;

// Where a streaming store may write: whole cache lines.
inline constexpr std::size_t kLineBytes = 64;

// One stream of memory. Where nothing is copied, `destination` is not read; where nothing is summed, `sums` is not.
struct Lane {
  const Byte* source;
  Byte* destination;
  Word* sums;  // xxh3::kLanes words for each block of xxh3::kBlockBytes
};

// How bytes are written: past the caches, to destinations aligned to kLineBytes, or through them, to any.
enum class Stores { kCached, kStreaming };

// What a level of instructions provides. `lanes` are advanced by the call. Streaming stores need a `fence` at the end,
// before another thread or a device may read what was written.
struct Kernels {
  Level level;
  bool streams;  // whether kStreaming is anything but kCached
  void (*copy)(Lane* lanes, std::size_t num_lanes, std::size_t num_bytes, Stores stores);
  void (*copy_and_sum)(Lane* lanes, std::size_t num_lanes, std::size_t num_blocks, Stores stores);
  void (*sum)(Lane* lanes, std::size_t num_lanes, std::size_t num_blocks);
  void (*fold)(Word* accumulators, const Word* sums, std::size_t num_blocks);
  // The stripes of a record's last block, from the first on, straight into the accumulators.
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
