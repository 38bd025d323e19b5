// Allocator of the granules of an arena: a bit for each used granule, a bit for each 64 granules that are all used, and
// so on upward.
//
// A search for a free granule takes one step a level: six for four billion granules. A chunk needs at most 64 searches.
// To take or free granules costs one step for each 64. A chunk may use any set of granules, so fragmentation wastes no
// space; it only makes the list of runs longer. It has no keys.
#ifndef HYBRIDKV_LEDGER_GRANULES_H_
#define HYBRIDKV_LEDGER_GRANULES_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "csrc/ledger/lazy_memory.h"

namespace hybridkv::ledger {

// Adjacent granules.
struct Run {
  std::uint32_t first;
  std::uint32_t count;
};

class Granules {
 public:
  Granules() = default;
  explicit Granules(std::uint32_t count);

  // Takes `wanted` granules; so many must be free. Adds them to `runs` in ascending order, adjacent ones as one run. It
  // prefers few runs, and searches first where granules were freed last: mostly those of the chunk evicted just before.
  void take(std::uint32_t wanted, std::vector<Run>& runs);
  // Takes these granules, which must be free.
  void claim(Run run);
  // Frees these granules, which must be taken.
  void free(Run run);
  bool is_taken(std::uint32_t granule) const;
  // Hands over the memory. The allocator must not be used after it.
  void take_memory(std::vector<LazyMemory>& memories);

 private:
  using Word = std::uint64_t;
  struct Level {
    LazyArray<Word> words;
    std::uint64_t num_bits;
  };

  std::optional<std::uint64_t> next_clear(std::size_t level, std::uint64_t from) const;
  std::uint32_t run_length(std::uint64_t first, std::uint32_t most) const;
  void take_some(std::uint32_t wanted, std::vector<Run>& runs);
  void fill(std::size_t level, std::uint64_t bit);
  void open(std::size_t level, std::uint64_t bit);

  std::uint32_t count_ = 0;
  std::uint32_t hint_ = 0;  // start of the next search
  std::vector<Level> levels_;
};

}  // namespace hybridkv::ledger

#endif  // HYBRIDKV_LEDGER_GRANULES_H_
