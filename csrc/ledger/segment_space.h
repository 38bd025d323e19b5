// Entries by segment of a store. The caller chooses the places.
#ifndef HYBRIDKV_LEDGER_SEGMENT_SPACE_H_
#define HYBRIDKV_LEDGER_SEGMENT_SPACE_H_

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "csrc/ledger/entry.h"
#include "csrc/ledger/lazy_memory.h"

namespace hybridkv::ledger {

// As in hybridkv.tiers.disk.format.layout: a record is one page of header, and its payload in whole pages.
inline constexpr std::uint64_t kPageBytes = 4096;
inline std::uint64_t record_pages(std::uint32_t payload_bytes) {
  return 1 + (std::uint64_t{payload_bytes} + kPageBytes - 1) / kPageBytes;
}

// Segment number in the upper 32 bits, offset in the lower ones.
inline std::uint64_t address_of(const Entry& entry) {
  return std::uint64_t{entry.record.number} << 32 | entry.record.offset;
}
inline void put_at(Entry& entry, std::uint64_t address) {
  entry.record.number = static_cast<std::uint32_t>(address >> 32);
  entry.record.offset = static_cast<std::uint32_t>(address);
}

class SegmentSpace {
 public:
  std::uint64_t units_of(const Entry& entry) const { return record_pages(entry.record.payload_bytes); }
  SegmentSpace begun_anew() const { return {}; }
  void copy(const SegmentSpace&, std::uint32_t index, const Entry& from, Entry& to) {
    to.record = from.record;
    add(index, to);
  }
  // Adds the entry to its segment.
  void add(std::uint32_t index, const Entry& entry) { of_segment_[entry.record.number].push_back(index); }
  // Lazy: readers of `in_segment` check each entry.
  void free(const Entry&) {}
  void take_memory(std::vector<LazyMemory>&) { of_segment_.clear(); }

  // Entries of a segment. Some may have left it, been reused, or be listed twice; the caller checks.
  std::vector<std::uint32_t> in_segment(std::uint32_t number) const {
    const auto found = of_segment_.find(number);
    return found == of_segment_.end() ? std::vector<std::uint32_t>() : found->second;
  }
  // Forgets a segment.
  void drop(std::uint32_t number) { of_segment_.erase(number); }

 private:
  std::unordered_map<std::uint32_t, std::vector<std::uint32_t>> of_segment_;
};

}  // namespace hybridkv::ledger

#endif  // HYBRIDKV_LEDGER_SEGMENT_SPACE_H_
