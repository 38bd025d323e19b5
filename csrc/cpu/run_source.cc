#include "csrc/cpu/run_source.h"

#include <algorithm>

namespace hybridkv::cpu {

void RunArrays::read(std::size_t first, std::size_t count, CopyRun* out) const {
  for (std::size_t run = 0; run < count; ++run) {
    const std::int64_t destination = destinations_ == nullptr ? 0 : destinations_[first + run];
    out[run] = {static_cast<std::uint64_t>(sources_[first + run]), static_cast<std::uint64_t>(destination),
                static_cast<std::uint64_t>(num_bytes_[first + run])};
  }
}

PageRuns::PageRuns(const PageSet* sets, std::size_t num_sets, const BlockId* ids, std::uint64_t buffer,
                   Direction direction)
    : sets_(sets), ids_(ids), buffer_(buffer), direction_(direction) {
  ends_.reserve(num_sets);
  std::size_t end = 0;
  for (std::size_t set = 0; set < num_sets; ++set) ends_.push_back(end += sets[set].num_pages);
}

void PageRuns::read(std::size_t first, std::size_t count, CopyRun* out) const {
  std::size_t set = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin());
  while (count > 0) {
    const std::size_t start = set == 0 ? 0 : ends_[set - 1];
    const std::size_t last = std::min(ends_[set], first + count);
    for (; first < last; ++first, --count) *out++ = page_run(sets_[set], ids_, buffer_, direction_, first - start);
    ++set;
  }
}

}  // namespace hybridkv::cpu
