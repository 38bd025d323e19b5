// Which granules of an arena are taken: a bit for each, and a bit for each 64 that are all taken, and so on.
//
// A search for what is free takes a step for each of these levels, six for four billion granules, and up to 64 searches
// are made for a chunk; taking and freeing take a step for each 64 granules. Any set of granules serves a chunk, so nothing is lost to fragmentation but a longer
// list of runs. Knows no keys.
#ifndef HYBRIDKV_LEDGER_GRANULES_H_
#define HYBRIDKV_LEDGER_GRANULES_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "csrc/ledger/lazy_memory.h"

namespace hybridkv::ledger {

// Granules in a row.
struct Run {
  std::uint32_t first;
  std::uint32_t count;
};

class Granules {
 public:
  Granules() = default;
  explicit Granules(std::uint32_t count);

  // So many, of which the caller knows that they are free: in their order, no two runs touch. Looks first where something
  // was freed last, so that what is evicted for a chunk is mostly what it gets, and takes few runs rather than many.
  void take(std::uint32_t wanted, std::vector<Run>& runs);
  // These, which are free.
  void claim(Run run);
  // These, which are taken.
  void free(Run run);
  bool is_taken(std::uint32_t granule) const;
  // Of no use any more.
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
  std::uint32_t hint_ = 0;  // where a search begins
  std::vector<Level> levels_;
};

}  // namespace hybridkv::ledger

#endif  // HYBRIDKV_LEDGER_GRANULES_H_
