#include "job.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace hybridkv::cuda {
namespace {

constexpr std::uint64_t kHighest = std::numeric_limits<std::uint64_t>::max();
// Limit for the tiles of one launch: the kernel counts them in 32 bits.
constexpr std::uint64_t kMostTiles = std::uint64_t{1} << 31;

// Finds whether an address is GPU memory. Tries the last range first, because neighbours follow each other.
class Locator {
 public:
  explicit Locator(std::span<const AddressRange> device) : device_(device) {}

  bool on_device(std::uint64_t address) {
    if (address < begin_ || address >= end_) look_up(address);
    return answer_;
  }

 private:
  void look_up(std::uint64_t address) {
    const auto after = std::upper_bound(device_.begin(), device_.end(), address,
                                        [](std::uint64_t one, const AddressRange& range) { return one < range.begin; });
    begin_ = 0;
    end_ = after == device_.end() ? kHighest : after->begin;
    answer_ = false;
    if (after == device_.begin()) return;
    const AddressRange& before = *(after - 1);
    answer_ = address < before.end;
    begin_ = answer_ ? before.begin : before.end;
    if (answer_) end_ = before.end;
  }

  std::span<const AddressRange> device_;
  std::uint64_t begin_ = 0;
  std::uint64_t end_ = 0;  // [begin_, end_) has `answer_`
  bool answer_ = false;
};

}  // namespace

bool Table::add(std::uint64_t source, std::uint64_t destination, std::uint64_t num_bytes) {
  if (num_rows_ > 0) {
    FragmentRun& row = rows_[num_rows_ - 1];
    const bool is_second = row.num_fragments == 1;
    const auto source_step = static_cast<std::uint64_t>(row.source_stride);
    const auto destination_step = static_cast<std::uint64_t>(row.destination_stride);
    if (row.fragment_bytes == num_bytes &&
        (is_second || (row.source + row.num_fragments * source_step == source &&
                       row.destination + row.num_fragments * destination_step == destination))) {
      if (num_tiles_ + row.tiles_per_fragment > kMostTiles) return false;
      if (is_second) {
        row.source_stride = static_cast<std::int64_t>(source - row.source);
        row.destination_stride = static_cast<std::int64_t>(destination - row.destination);
      }
      ++row.num_fragments;
      num_tiles_ += row.tiles_per_fragment;
      return true;
    }
    if (num_rows_ == max_rows_) return false;
  }
  const std::uint64_t tiles = (num_bytes + tile_bytes_ - 1) / tile_bytes_;
  if (num_rows_ > 0 && num_tiles_ + tiles > kMostTiles) return false;
  rows_[num_rows_++] = {source, destination, 0, 0, num_bytes, 1, num_tiles_, tiles};
  num_tiles_ += tiles;
  return true;
}

void JobCopier::Transfers::clear() {
  sources_.clear();
  destinations_.clear();
  sizes_.clear();
}

void JobCopier::Transfers::add(std::uint64_t source, std::uint64_t destination, std::uint64_t num_bytes) {
  while (num_bytes > 0) {
    const std::uint64_t piece = std::min({num_bytes, to_border(source), to_border(destination)});
    add_piece(source, destination, piece);
    source += piece;
    destination += piece;
    num_bytes -= piece;
  }
}

void JobCopier::Transfers::add_piece(std::uint64_t source, std::uint64_t destination, std::uint64_t num_bytes) {
  const bool goes_on = !sizes_.empty() && sources_.back() + sizes_.back() == source &&
                       destinations_.back() + sizes_.back() == destination && (source & mask_) != 0 &&
                       (destination & mask_) != 0;
  if (goes_on) {
    sizes_.back() += num_bytes;
    return;
  }
  sources_.push_back(source);
  destinations_.push_back(destination);
  sizes_.push_back(num_bytes);
}

void JobCopier::copy(const Runs& runs, std::span<const AddressRange> device) {
  try {
    enqueue(runs, device);
  } catch (...) {
    try {
      gpu_.finish();  // enqueued copies may still write
    } catch (...) {
      // The first failure is the one to report.
    }
    throw;
  }
  gpu_.finish();
}

void JobCopier::enqueue(const Runs& runs, std::span<const AddressRange> device) {
  num_turns_ = 0;
  std::fill(std::begin(read_by_), std::end(read_by_), std::nullopt);
  for (auto& of_queue : is_recorded_) std::fill(std::begin(of_queue), std::end(of_queue), false);
  choose_ways(runs, device);
  gpu_.wait_for_caller(Queue::kKernel);
  gpu_.wait_for_caller(Queue::kTransfer);
  enqueue_batched(runs);
  enqueue_direct(runs);
  enqueue_staged(runs, stores_, true);
  enqueue_staged(runs, loads_, false);
  copy_within_host(runs);
}

void JobCopier::choose_ways(const Runs& runs, std::span<const AddressRange> device) {
  ways_.resize(runs.sizes.size());
  stores_.clear();
  loads_.clear();
  Locator from(device), to(device);
  ways_in_job_ = 0;
  for (std::size_t i = 0; i < ways_.size(); ++i) {
    const std::uint64_t source = runs.sources[i], destination = runs.destinations[i], size = runs.sizes[i];
    const bool from_device = from.on_device(source), to_device = to.on_device(destination);
    if (!from_device && !to_device) {
      ways_[i] = Way::kWithinHost;
    } else if (size >= limits_.large_run_bytes) {
      ways_[i] = Way::kBatched;
    } else if (from_device && to_device) {
      ways_[i] = Way::kDirect;
    } else {
      ways_[i] = Way::kStaged;
      (from_device ? stores_ : loads_).add(i, from_device ? destination : source, size);
    }
    ways_in_job_ |= bit(ways_[i]);
  }
  sort_or_drop(runs, stores_, runs.destinations);
  sort_or_drop(runs, loads_, runs.sources);
}

// Sorts by the host's addresses: neighbours on the host are neighbours in staging memory, and move together. Where
// staging does not help, the runs become direct.
void JobCopier::sort_or_drop(const Runs& runs, Small& small, std::span<const std::uint64_t> host) {
  auto& indices = small.indices;
  if (!small.is_sorted) {
    std::stable_sort(indices.begin(), indices.end(),
                     [&](std::uint32_t one, std::uint32_t other) { return host[one] < host[other]; });
  }
  std::uint64_t num_stretches = 0, end = kHighest;
  for (const std::uint32_t i : indices) {
    if (host[i] != end) ++num_stretches;
    end = host[i] + runs.sizes[i];
  }
  if (small.num_bytes > limits_.direct_job_bytes &&
      small.num_bytes >= num_stretches * limits_.large_run_bytes) {
    return;
  }
  for (const std::uint32_t i : indices) ways_[i] = Way::kDirect;
  if (!indices.empty()) ways_in_job_ |= bit(Way::kDirect);
  indices.clear();
}

void JobCopier::enqueue_batched(const Runs& runs) {
  if (!has(Way::kBatched)) return;
  moved_.clear();
  for (std::size_t i = 0; i < ways_.size(); ++i) {
    if (ways_[i] == Way::kBatched) moved_.add(runs.sources[i], runs.destinations[i], runs.sizes[i]);
  }
  gpu_.transfer(moved_.runs());
}

void JobCopier::enqueue_direct(const Runs& runs) {
  if (!has(Way::kDirect)) return;
  std::size_t i = 0;
  const auto skip = [&] {
    while (i < ways_.size() && ways_[i] != Way::kDirect) ++i;
    return i < ways_.size();
  };
  while (skip()) {
    const int part = next_part();
    Table table = table_of(part);
    while (skip() && table.add(runs.sources[i], runs.destinations[i], runs.sizes[i])) ++i;
    gpu_.upload(Queue::kKernel, part, table.num_rows());
    gpu_.launch(part, table.num_rows(), table.num_tiles());
    record(Queue::kKernel, part);
    read_by_[part] = Queue::kKernel;
  }
}

void JobCopier::enqueue_staged(const Runs& runs, const Small& small, bool is_store) {
  const auto& indices = small.indices;
  for (std::size_t first = 0; first < indices.size();) {
    const int part = next_part();
    Table table = table_of(part);
    moved_.clear();
    const std::uint64_t begin = staging_ + static_cast<std::uint64_t>(part) * limits_.part_bytes;
    std::uint64_t used = 0;
    // Of neighbours on the host: their first address, and their first place in staging memory.
    std::uint64_t host_begin = 0, host_end = kHighest, place_begin = begin;
    const auto move = [&] {
      if (host_end == kHighest) return;
      const std::uint64_t num_bytes = host_end - host_begin;
      is_store ? moved_.add(place_begin, host_begin, num_bytes) : moved_.add(host_begin, place_begin, num_bytes);
    };
    for (; first < indices.size(); ++first) {
      const std::uint32_t i = indices[first];
      const std::uint64_t source = runs.sources[i], destination = runs.destinations[i], size = runs.sizes[i];
      if (size > limits_.part_bytes - used) break;
      const std::uint64_t place = begin + used, host = is_store ? destination : source;
      if (!(is_store ? table.add(source, place, size) : table.add(place, destination, size))) break;
      if (host != host_end) {
        move();
        host_begin = host;
        place_begin = place;
      }
      host_end = host + size;
      used += size;
    }
    move();
    is_store ? enqueue_store(part, table) : enqueue_load(part, table);
  }
}

// The kernel packs the part once what was there has been moved away; then the part moves.
void JobCopier::enqueue_store(int part, const Table& table) {
  wait_if_recorded(Queue::kKernel, Queue::kTransfer, part);
  gpu_.upload(Queue::kKernel, part, table.num_rows());
  gpu_.launch(part, table.num_rows(), table.num_tiles());
  record(Queue::kKernel, part);
  gpu_.wait(Queue::kTransfer, Queue::kKernel, part);
  gpu_.transfer(moved_.runs());
  record(Queue::kTransfer, part);
  read_by_[part] = Queue::kKernel;
}

// The part moves once the kernel has unpacked what was there; then the kernel unpacks it. The table goes ahead of the
// bytes: behind the bytes of other parts it would come late.
void JobCopier::enqueue_load(int part, const Table& table) {
  wait_if_recorded(Queue::kTransfer, Queue::kKernel, part);
  gpu_.upload(Queue::kTransfer, part, table.num_rows());
  gpu_.transfer(moved_.runs());
  record(Queue::kTransfer, part);
  gpu_.wait(Queue::kKernel, Queue::kTransfer, part);
  gpu_.launch(part, table.num_rows(), table.num_tiles());
  record(Queue::kKernel, part);
  read_by_[part] = Queue::kTransfer;
}

void JobCopier::copy_within_host(const Runs& runs) const {
  if (!has(Way::kWithinHost)) return;
  for (std::size_t i = 0; i < ways_.size(); ++i) {
    if (ways_[i] != Way::kWithinHost) continue;
    std::memmove(reinterpret_cast<void*>(runs.destinations[i]), reinterpret_cast<const void*>(runs.sources[i]),
                 runs.sizes[i]);
  }
}

// An empty table in the part's host memory, once the GPU has read the last one there.
Table JobCopier::table_of(int part) {
  if (read_by_[part].has_value()) gpu_.host_wait(*read_by_[part], part);
  return {gpu_.rows(part), kPartRows, limits_.tile_bytes};
}

void JobCopier::record(Queue queue, int part) {
  gpu_.record(queue, part);
  is_recorded_[static_cast<int>(queue)][part] = true;
}

void JobCopier::wait_if_recorded(Queue queue, Queue other, int part) {
  if (is_recorded_[static_cast<int>(other)][part]) gpu_.wait(queue, other, part);
}

}  // namespace hybridkv::cuda
