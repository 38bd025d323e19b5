// The kernels of kernels.cu, played on the CPU: every block, every warp, every lane, with the same
// templates (fragments.h, warp_checksum.h) and plain memory. Tests call it through ctypes and compare with a
// plain reference; on a machine without a GPU it is the only thing that runs this arithmetic.
//
// It shows that the bytes and their order are right. It cannot show races, timing, or what a
// compiler for device code makes of the templates.
#include <cstdint>

#include "fragments.h"
#include "host_memory.h"
#include "host_warp.h"
#include "warp_checksum.h"

namespace {

using hybridkv::Digest128;
using namespace hybridkv::cuda;

}  // namespace

extern "C" {

// 16-byte words that were moved, or -1 if a word was not aligned.
std::int64_t hybridkv_simulate_copy(const FragmentRun* runs, std::uint64_t num_runs, std::uint64_t num_tiles,
                                    std::uint64_t tile_bytes, std::uint32_t num_warps) {
  HostMemory memory;
  for (std::uint32_t warp = 0; warp < num_warps; ++warp) {
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
      copy_fragments(runs, static_cast<std::uint32_t>(num_runs), num_tiles, tile_bytes, warp, num_warps, lane, memory);
    }
  }
  return memory.misaligned ? -1 : static_cast<std::int64_t>(memory.wide_words);
}

// `ranges` holds (address, num_bytes), `digests` takes (low, high).
void hybridkv_simulate_checksums(const std::uint64_t* ranges, std::uint64_t num_ranges, std::uint64_t* digests) {
  HostWarp warp;
  for (std::uint64_t i = 0; i < num_ranges; ++i) {
    const Digest128 digest = checksum(warp, ranges[2 * i], ranges[2 * i + 1]);
    digests[2 * i] = digest.low;
    digests[2 * i + 1] = digest.high;
  }
}

}  // extern "C"
