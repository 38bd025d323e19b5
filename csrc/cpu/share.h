// Part of a sequence of runs, and a walk over it. Private to copy.cc.
#ifndef HYBRIDKV_CPU_SHARE_H_
#define HYBRIDKV_CPU_SHARE_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "csrc/cpu/kernels.h"
#include "csrc/cpu/run_source.h"

namespace hybridkv::cpu {

// Number of runs read from a source at a time, onto the stack.
inline constexpr std::size_t kRunsAtOnce = 256;

inline const Byte* bytes_at(std::uint64_t address) { return reinterpret_cast<const Byte*>(address); }
inline Byte* writable_at(std::uint64_t address) { return reinterpret_cast<Byte*>(address); }

inline bool is_line_aligned(const Byte* address) { return reinterpret_cast<std::uintptr_t>(address) % kLineBytes == 0; }

// Runs from byte `skip` of run `first` to before byte `take` of run `last - 1`.
struct Share {
  std::size_t first;
  std::size_t skip;
  std::size_t last;
  std::size_t take;
};

// Calls `visit(run)` for each run of the share, cut to the share.
template <typename Visit>
void for_each_run(const RunSource& runs, const Share& share, Visit visit) {
  std::array<CopyRun, kRunsAtOnce> batch;
  for (std::size_t first = share.first; first < share.last; first += kRunsAtOnce) {
    const std::size_t count = std::min(kRunsAtOnce, share.last - first);
    runs.read(first, count, batch.data());
    if (first + count == share.last) batch[count - 1].num_bytes = std::min(batch[count - 1].num_bytes, share.take);
    if (first == share.first) {
      batch[0] = {batch[0].source + share.skip, batch[0].destination + share.skip, batch[0].num_bytes - share.skip};
    }
    for (std::size_t run = 0; run < count; ++run) visit(batch[run]);
  }
}

inline Share whole(std::size_t first, std::size_t last) { return {first, 0, last, SIZE_MAX}; }

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_SHARE_H_
