#include "csrc/ledger/granule_space.h"

namespace hybridkv::ledger {

GranuleSpace::GranuleSpace(std::uint32_t num_granules, std::uint64_t granule_bytes)
    : num_granules_(num_granules), granule_bytes_(granule_bytes), granules_(num_granules), fragments_(num_granules) {}

GranuleSpace GranuleSpace::begun_anew() const { return {num_granules_, granule_bytes_}; }

std::uint64_t GranuleSpace::most_bytes(std::uint32_t num_granules) { return num_granules / 8 + num_granules / 504; }

template <class Act>
void GranuleSpace::each_run(const Entry& entry, Act&& act) const {
  if (!entry.is_fragmented) {
    act(Run{entry.granules.place, entry.granules.num_granules});
    return;
  }
  std::uint32_t at_and_one = entry.granules.place + 1;
  while (at_and_one != 0) {
    const Fragment fragment = fragments_[at_and_one - 1];
    act(Run{fragment.first, fragment.count});
    at_and_one = fragment.next_and_one;
  }
}

void GranuleSpace::take(Entry& entry) {
  granules_.take(entry.granules.num_granules, runs_);
  write_down(entry);
}

void GranuleSpace::copy(const GranuleSpace& other, std::uint32_t, const Entry& from, Entry& to) {
  to.granules = from.granules;
  runs_.clear();
  other.each_run(from, [this](Run run) {
    granules_.claim(run);
    runs_.push_back(run);
  });
  write_down(to);
}

void GranuleSpace::write_down(Entry& entry) {
  entry.is_fragmented = runs_.size() > 1;
  entry.granules.place = runs_[0].first;
  if (!entry.is_fragmented) return;
  std::uint32_t next_and_one = 0;
  for (std::size_t run = runs_.size(); run-- > 0;) {
    std::uint32_t at = num_used_;
    if (first_free_and_one_ != 0) {
      at = first_free_and_one_ - 1;
      first_free_and_one_ = fragments_[at].next_and_one;
    } else {
      ++num_used_;
    }
    fragments_[at] = {runs_[run].first, runs_[run].count, next_and_one};
    next_and_one = at + 1;
  }
  entry.granules.place = next_and_one - 1;
}

void GranuleSpace::free(const Entry& entry) {
  each_run(entry, [this](Run run) { granules_.free(run); });
  if (!entry.is_fragmented) return;
  std::uint32_t last = entry.granules.place;
  while (fragments_[last].next_and_one != 0) last = fragments_[last].next_and_one - 1;
  fragments_[last].next_and_one = first_free_and_one_;
  first_free_and_one_ = entry.granules.place + 1;
}

void GranuleSpace::append(const Entry& entry, Places& places) const {
  each_run(entry, [&](Run run) {
    places.extents.push_back({run.first * granule_bytes_, run.count * granule_bytes_});
  });
  places.extents.back().num_bytes -= entry.granules.spare_bytes;
  places.ends.push_back(places.extents.size());
}

void GranuleSpace::take_memory(std::vector<LazyMemory>& memories) {
  granules_.take_memory(memories);
  memories.push_back(fragments_.take_memory(num_used_));
}

}  // namespace hybridkv::ledger
