// Where the bytes of entries lie in an arena: one run of granules in the entry itself, several in a table beside it.
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

// Of several chunks, one after the other: extents of chunk i end where those of the next one begin, at ends[i].
struct Places {
  std::vector<Extent> extents;
  std::vector<std::size_t> ends;
};

class GranuleSpace {
 public:
  GranuleSpace() = default;
  GranuleSpace(std::uint32_t num_granules, std::uint64_t granule_bytes);

  // Of all that it can ever take while chunks lie in one run each.
  static std::uint64_t most_bytes(std::uint32_t num_granules);

  std::uint64_t units_of(const Entry& entry) const { return entry.granules.num_granules; }
  // As many granules as the entry says.
  void take(Entry& entry);
  GranuleSpace begun_anew() const;
  // Those that an entry of another space of this kind has, here.
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
  std::uint32_t num_used_ = 0;            // fragments that ever were
  std::uint32_t first_free_and_one_ = 0;  // of those, unless all are in use
  std::vector<Run> runs_;
};

}  // namespace hybridkv::ledger

#endif  // HYBRIDKV_LEDGER_GRANULE_SPACE_H_
