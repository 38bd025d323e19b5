// What every kernel must do, as plainly as it can be said: byte by byte, in order. For tests, on any device.
#ifndef HYBRIDKV_REFERENCE_H_
#define HYBRIDKV_REFERENCE_H_

#include <cstddef>
#include <cstdint>

#include "hybridkv/copy_run.h"
#include "hybridkv/page_permutation.h"
#include "hybridkv/page_set.h"

namespace hybridkv::reference {

inline void copy(std::uint64_t source, std::uint64_t destination, std::uint64_t num_bytes) {
  const auto* from = reinterpret_cast<const unsigned char*>(source);
  auto* to = reinterpret_cast<unsigned char*>(destination);
  for (std::uint64_t byte = 0; byte < num_bytes; ++byte) to[byte] = from[byte];
}

inline void copy_runs(const CopyRun* runs, std::size_t num_runs) {
  for (std::size_t run = 0; run < num_runs; ++run) copy(runs[run].source, runs[run].destination, runs[run].num_bytes);
}

inline void move_pages(const PageSet* sets, std::size_t num_sets, const BlockId* ids, std::uint64_t buffer,
                       Direction direction) {
  for (std::size_t set = 0; set < num_sets; ++set) {
    for (std::uint64_t page = 0; page < sets[set].num_pages; ++page) {
      const CopyRun run = page_run(sets[set], ids, buffer, direction, page);
      copy(run.source, run.destination, run.num_bytes);
    }
  }
}

// Between the engine's page and the canonical page; kGather reads the engine's.
inline void permute_page(const PagePermutation& permutation, std::uint64_t page, std::uint64_t canonical,
                         Direction direction) {
  for (std::uint64_t unit = 0; unit < num_units(permutation); ++unit) {
    const std::uint64_t engine = page + page_offset(permutation, unit);
    const std::uint64_t packed = canonical + unit * permutation.unit_bytes;
    if (direction == Direction::kGather) {
      copy(engine, packed, permutation.unit_bytes);
    } else {
      copy(packed, engine, permutation.unit_bytes);
    }
  }
}

}  // namespace hybridkv::reference

#endif  // HYBRIDKV_REFERENCE_H_
