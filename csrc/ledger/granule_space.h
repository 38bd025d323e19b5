// Places of entries in an arena. An entry stores one run of granules itself; a table of fragments stores several.
#ifndef HYBRIDKV_LEDGER_GRANULE_SPACE_H_
#define HYBRIDKV_LEDGER_GRANULE_SPACE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "csrc/ledger/entry.h"
#include "csrc/ledger/granules.h"
#include "csrc/ledger/lazy_memory.h"

namespace hybridkv::ledger {

struct Extent {
  std::uint64_t offset;
  std::uint64_t num_bytes;
};

// Extents of several chunks. Those of chunk i end at index ends[i], where those of chunk i + 1 begin.
struct Places {
  std::vector<Extent> extents;
  std::vector<std::size_t> ends;
};

class GranuleSpace {
 public:
  GranuleSpace() = default;
  GranuleSpace(std::uint32_t num_granules, std::uint64_t granule_bytes);

  // Memory of a full space, if each chunk is one run.
  static std::uint64_t most_bytes(std::uint32_t num_granules);

  std::uint64_t units_of(const Entry& entry) const { return entry.granules.num_granules; }
  // Takes the number of granules that the entry states.
  void take(Entry& entry);
  GranuleSpace begun_anew() const;
  // Takes here the granules that `from` has in `other`.
  void copy(const GranuleSpace& other, std::uint32_t index, const Entry& from, Entry& to);
  void free(const Entry& entry);
  void append(const Entry& entry, Places& places) const;
  void take_memory(std::vector<LazyMemory>& memories);

 private:
  struct Fragment {
    std::uint32_t first;
    std::uint32_t count;
    std::uint32_t next_and_one;
  };

  void write_down(Entry& entry);
  template <class Act>
  void each_run(const Entry& entry, Act&& act) const;

  std::uint32_t num_granules_ = 0;
  std::uint64_t granule_bytes_ = 0;
  Granules granules_;
  LazyArray<Fragment> fragments_;
  std::uint32_t num_used_ = 0;            // fragments in use, and free ones in the list below
  std::uint32_t first_free_and_one_ = 0;  // first free fragment plus one; 0: none
  std::vector<Run> runs_;
};

}  // namespace hybridkv::ledger

#endif  // HYBRIDKV_LEDGER_GRANULE_SPACE_H_
