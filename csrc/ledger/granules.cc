#include "csrc/ledger/granules.h"

#include <algorithm>
#include <bit>

namespace hybridkv::ledger {
namespace {

constexpr std::uint64_t kBits = 64;
constexpr std::uint64_t kAll = ~std::uint64_t{0};
// Limit for the holes inspected for one chunk, and for those among them that are large enough.
constexpr std::size_t kLooked = 64;
constexpr std::size_t kEnough = 8;
// Granules before the last freed one that are inspected to find the start of its hole.
constexpr std::uint32_t kLookBack = 1024;

// Bits `from` to `to`, exclusive, of a word.
std::uint64_t mask(std::uint64_t from, std::uint64_t to) {
  const std::uint64_t below = to == kBits ? kAll : (std::uint64_t{1} << to) - 1;
  return below & (kAll << from);
}

}  // namespace

Granules::Granules(std::uint32_t count) : count_(count) {
  for (std::uint64_t bits = count;; bits = (bits + kBits - 1) / kBits) {
    const std::uint64_t num_words = (bits + kBits - 1) / kBits;
    levels_.push_back({LazyArray<Word>(num_words), bits});
    // Bits of the last word after the end count as taken.
    if (bits % kBits != 0) levels_.back().words[num_words - 1] = mask(bits % kBits, kBits);
    if (num_words == 1) break;
  }
}

bool Granules::is_taken(std::uint32_t granule) const {
  return (levels_[0].words[granule / kBits] >> granule % kBits & 1) != 0;
}

std::optional<std::uint64_t> Granules::next_clear(std::size_t level, std::uint64_t from) const {
  if (from >= levels_[level].num_bits) return std::nullopt;
  const LazyArray<Word>& words = levels_[level].words;
  std::uint64_t word = from / kBits;
  Word clear = ~words[word] & mask(from % kBits, kBits);
  if (clear == 0) {
    if (level + 1 == levels_.size()) return std::nullopt;
    const std::optional<std::uint64_t> next = next_clear(level + 1, word + 1);
    if (!next) return std::nullopt;
    word = *next;
    clear = ~words[word];
  }
  return word * kBits + static_cast<std::uint64_t>(std::countr_zero(clear));
}

std::uint32_t Granules::run_length(std::uint64_t first, std::uint32_t most) const {
  const LazyArray<Word>& words = levels_[0].words;
  std::uint64_t end = first;
  const std::uint64_t last = std::min<std::uint64_t>(first + most, count_);
  while (end < last) {
    const Word taken = words[end / kBits] >> end % kBits;
    if (taken != 0) {
      end += static_cast<std::uint64_t>(std::countr_zero(taken));
      break;
    }
    end += kBits - end % kBits;
  }
  return static_cast<std::uint32_t>(std::min(end, last) - first);
}

void Granules::take(std::uint32_t wanted, std::vector<Run>& runs) {
  runs.clear();
  while (wanted > 0) {
    const std::size_t num_runs = runs.size();
    take_some(wanted, runs);
    for (std::size_t run = num_runs; run < runs.size(); ++run) wanted -= runs[run].count;
  }
  if (runs.size() == 1) return;
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.first < b.first; });
  // A hole may be used from its middle, where the search began, and again from its beginning.
  std::size_t kept = 0;
  for (std::size_t next = 1; next < runs.size(); ++next) {
    if (runs[kept].first + runs[kept].count == runs[next].first) {
      runs[kept].count += runs[next].count;
    } else {
      runs[++kept] = runs[next];
    }
  }
  runs.resize(kept + 1);
}

// Takes the smallest of a few holes that has room for all. If there is none, takes from the largest holes.
void Granules::take_some(std::uint32_t wanted, std::vector<Run>& runs) {
  const auto large = static_cast<std::uint32_t>(std::min<std::uint64_t>(2 * std::uint64_t{wanted} + kBits, count_));
  const std::uint64_t start = hint_;
  std::uint64_t from = start;
  bool is_round = false;
  Run holes[kLooked];
  std::size_t num_holes = 0;
  std::size_t num_fitting = 0;
  Run best{0, 0};
  while (num_holes < kLooked && num_fitting < kEnough) {
    const std::optional<std::uint64_t> first = next_clear(0, from);
    if (!first || (is_round && *first >= start)) {
      if (is_round) break;
      is_round = true;
      from = 0;
      continue;
    }
    const std::uint64_t most = is_round ? std::min<std::uint64_t>(large, start - *first) : large;
    const Run hole{static_cast<std::uint32_t>(*first), run_length(*first, static_cast<std::uint32_t>(most))};
    from = *first + hole.count;
    holes[num_holes++] = hole;
    if (hole.count < wanted) continue;
    ++num_fitting;
    if (best.count == 0 || hole.count < best.count) best = hole;
    if (hole.count == wanted || hole.count == large) break;  // no hole can be better
  }
  if (best.count > 0) {
    holes[0] = best;
    num_holes = 1;
  } else {
    std::sort(holes, holes + num_holes, [](const Run& a, const Run& b) { return a.count > b.count; });
  }
  for (std::size_t hole = 0; hole < num_holes && wanted > 0; ++hole) {
    const Run run{holes[hole].first, std::min(holes[hole].count, wanted)};
    claim(run);
    runs.push_back(run);
    wanted -= run.count;
    const std::uint32_t end = run.first + run.count;
    hint_ = end < count_ ? end : 0;
  }
}

void Granules::claim(Run run) {
  LazyArray<Word>& words = levels_[0].words;
  std::uint64_t first = run.first;
  const std::uint64_t end = first + run.count;
  while (first < end) {
    const std::uint64_t word = first / kBits;
    const std::uint64_t stop = std::min(end, (word + 1) * kBits);
    words[word] |= mask(first % kBits, stop - word * kBits);
    if (words[word] == kAll) fill(1, word);
    first = stop;
  }
}

void Granules::free(Run run) {
  LazyArray<Word>& words = levels_[0].words;
  std::uint64_t first = run.first;
  const std::uint64_t end = first + run.count;
  while (first < end) {
    const std::uint64_t word = first / kBits;
    const std::uint64_t stop = std::min(end, (word + 1) * kBits);
    const bool was_full = words[word] == kAll;
    words[word] &= ~mask(first % kBits, stop - word * kBits);
    if (was_full) open(1, word);
    first = stop;
  }
  hint_ = run.first;
  for (std::uint32_t looked = 0; hint_ > 0 && looked < kLookBack && !is_taken(hint_ - 1);) {
    const std::uint32_t step = (hint_ - 1) % kBits + 1;  // to the start of the previous word
    const Word before = words[(hint_ - 1) / kBits] << (kBits - step);
    const auto clear = static_cast<std::uint32_t>(before == 0 ? step : std::countl_zero(before));
    hint_ -= clear;
    looked += clear;
  }
}

// Marks a word of the level below as full.
void Granules::fill(std::size_t level, std::uint64_t bit) {
  for (; level < levels_.size(); ++level, bit /= kBits) {
    Word& word = levels_[level].words[bit / kBits];
    word |= Word{1} << bit % kBits;
    if (word != kAll) return;
  }
}

// Marks a word of the level below as not full.
void Granules::open(std::size_t level, std::uint64_t bit) {
  for (; level < levels_.size(); ++level, bit /= kBits) {
    Word& word = levels_[level].words[bit / kBits];
    const bool was_full = word == kAll;
    word &= ~(Word{1} << bit % kBits);
    if (!was_full) return;
  }
}

void Granules::take_memory(std::vector<LazyMemory>& memories) {
  for (Level& level : levels_) memories.push_back(level.words.take_memory((level.num_bits + kBits - 1) / kBits));
  levels_.clear();
}

}  // namespace hybridkv::ledger
