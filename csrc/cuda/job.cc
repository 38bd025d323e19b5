#include "job.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace hybridkv::cuda {
namespace {

constexpr std::uint64_t kHighest = std::numeric_limits<std::uint64_t>::max();
// Limit for the tiles of one launch: the kernel counts them in 32 bits.
constexpr std::uint64_t kMostTiles = std::uint64_t{1} << 31;

std::uint64_t word(std::int64_t number) { return static_cast<std::uint64_t>(number); }

std::uint64_t total_bytes(const CopyRow& row) { return word(row.num_bytes) * word(row.num_runs); }

// Runs [first, first + count) of a row.
CopyRow part_of(const CopyRow& row, std::int64_t first, std::int64_t count) {
  CopyRow part = row;
  part.source += first * row.source_step;
  part.destination += first * row.destination_step;
  part.num_runs = count;
  return part;
}

enum class Place { kHost, kDevice, kBoth };

// Finds whether addresses are GPU memory. Tries the last answer first, because neighbours follow each other.
class Locator {
 public:
  explicit Locator(std::span<const AddressRange> device) : device_(device) {}

  // Of `count` addresses, from `first` on in equal steps.
  Place find(std::uint64_t first, std::int64_t step, std::int64_t count) {
    if (step != step_ || count != count_ || first < low_ || first >= high_) look_up_row(first, step, count);
    return place_;
  }

 private:
  bool on_device(std::uint64_t address) {
    if (address < begin_ || address >= end_) look_up(address);
    return answer_;
  }

  // Also finds how far another row may begin from here for the same answer: each of its addresses must stay in the
  // range where the address of this row is.
  void look_up_row(std::uint64_t first, std::int64_t step, std::int64_t count) {
    step_ = step;
    count_ = count;
    std::uint64_t below = first, above = kHighest - first;
    std::uint64_t address = first;
    bool is_any_on_host = false, is_any_on_device = false;
    for (std::int64_t number = 0; number < count; ++number, address += word(step)) {
      (on_device(address) ? is_any_on_device : is_any_on_host) = true;
      below = std::min(below, address - begin_);
      above = std::min(above, end_ - address);
    }
    low_ = first - below;
    high_ = first + above;
    place_ = !is_any_on_device ? Place::kHost : is_any_on_host ? Place::kBoth : Place::kDevice;
  }

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
  std::int64_t step_ = 0, count_ = 0;
  std::uint64_t low_ = 0;
  std::uint64_t high_ = 0;  // rows of these steps and this count that begin in [low_, high_) have `place_`
  Place place_ = Place::kHost;
};

}  // namespace

bool Table::continues(const FragmentRun& last, const CopyRow& row) const {
  if (last.fragment_bytes != word(row.num_bytes)) return false;
  const std::uint64_t source_step = word(last.num_fragments == 1 ? row.source - static_cast<std::int64_t>(last.source)
                                                                 : last.source_stride);
  const std::uint64_t destination_step =
      word(last.num_fragments == 1 ? row.destination - static_cast<std::int64_t>(last.destination)
                                   : last.destination_stride);
  if (row.num_runs > 1 && (word(row.source_step) != source_step || word(row.destination_step) != destination_step)) {
    return false;
  }
  return last.source + last.num_fragments * source_step == word(row.source) &&
         last.destination + last.num_fragments * destination_step == word(row.destination);
}

std::uint64_t Table::add(const CopyRow& row) {
  // Divisions take most of the time of a plan, and rows are usually alike.
  if (word(row.num_bytes) != fragment_bytes_) {
    fragment_bytes_ = word(row.num_bytes);
    tiles_per_fragment_ = (fragment_bytes_ + tile_bytes_ - 1) / tile_bytes_;
  }
  const std::uint64_t tiles = tiles_per_fragment_;
  if (num_rows_ > 0 && num_tiles_ >= kMostTiles) return 0;  // the first run may have more tiles than the limit
  std::uint64_t count = word(row.num_runs);
  if (count > kMostTiles || tiles > kMostTiles || count * tiles > kMostTiles - num_tiles_) {
    count = std::min(count, (kMostTiles - num_tiles_) / tiles);
  }
  if (num_rows_ == 0) count = std::max<std::uint64_t>(count, 1);  // the first run fits, whatever its size
  if (count == 0) return 0;
  if (num_rows_ > 0 && continues(rows_[num_rows_ - 1], row)) {
    FragmentRun& last = rows_[num_rows_ - 1];
    if (last.num_fragments == 1) {
      last.source_stride = row.source - static_cast<std::int64_t>(last.source);
      last.destination_stride = row.destination - static_cast<std::int64_t>(last.destination);
    }
    last.num_fragments += count;
  } else {
    if (num_rows_ == max_rows_) return 0;
    const bool is_one = count == 1;  // the next run may then follow in any steps
    FragmentRun& next = rows_[num_rows_++];  // field by field: a copy of a struct would wait for its parts
    next.source = word(row.source);
    next.destination = word(row.destination);
    next.source_stride = is_one ? 0 : row.source_step;
    next.destination_stride = is_one ? 0 : row.destination_step;
    next.fragment_bytes = word(row.num_bytes);
    next.num_fragments = count;
    next.first_tile = num_tiles_;
    next.tiles_per_fragment = tiles;
  }
  num_tiles_ += count * tiles;
  return count;
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

void JobCopier::enqueue(Rows rows, std::span<const AddressRange> device) {
  try {
    enqueue_all(rows, device);
  } catch (...) {
    try {
      gpu_.drain();  // enqueued copies may still write
    } catch (...) {
      // The first failure is the one to report.
    }
    throw;
  }
}

void JobCopier::enqueue_all(Rows rows, std::span<const AddressRange> device) {
  choose_ways(rows, device);
  gpu_.wait_for_caller(Queue::kKernel);
  gpu_.wait_for_caller(Queue::kTransfer);
  enqueue_batched();
  enqueue_direct();
  enqueue_staged(stores_, true);
  enqueue_staged(loads_, false);
  copy_within_host();
}

void JobCopier::choose_ways(Rows rows, std::span<const AddressRange> device) {
  rows_.clear();
  ways_.clear();
  stores_.clear();
  loads_.clear();
  ways_in_job_ = 0;
  Locator from(device), to(device);
  const auto choose = [&](const CopyRow& row) {
    const Place source = from.find(word(row.source), row.source_step, row.num_runs);
    const Place destination = to.find(word(row.destination), row.destination_step, row.num_runs);
    if (source == Place::kBoth || destination == Place::kBoth) return false;
    if (source == Place::kHost && destination == Place::kHost) {
      add_row(row, Way::kWithinHost);
    } else if (word(row.num_bytes) >= limits_.large_run_bytes) {
      add_row(row, Way::kBatched);
    } else if (source == destination) {
      add_row(row, Way::kDirect);
    } else {
      const bool is_store = source == Place::kDevice;
      const std::int64_t host_step = is_store ? row.destination_step : row.source_step;
      if (row.num_runs > 1 && host_step != row.num_bytes) return false;
      const std::int64_t host = is_store ? row.destination : row.source;
      (is_store ? stores_ : loads_).add(rows_.size(), word(host), total_bytes(row));
      add_row(row, Way::kStaged);
    }
    return true;
  };
  for (const CopyRow& row : rows) {
    if (choose(row)) continue;
    for (std::int64_t run = 0; run < row.num_runs; ++run) choose(part_of(row, run, 1));
  }
  sort_or_drop(stores_, true);
  sort_or_drop(loads_, false);
}

void JobCopier::add_row(const CopyRow& row, Way way) {
  rows_.push_back(row);
  ways_.push_back(way);
  ways_in_job_ |= bit(way);
}

// Sorts by the host's addresses: neighbours on the host are neighbours in staging memory, and move together. Where
// staging does not help, the rows become direct.
void JobCopier::sort_or_drop(Small& small, bool is_store) {
  auto& indices = small.indices;
  const auto host = [&](std::uint32_t i) { return word(is_store ? rows_[i].destination : rows_[i].source); };
  if (!small.is_sorted) {
    std::stable_sort(indices.begin(), indices.end(),
                     [&](std::uint32_t one, std::uint32_t other) { return host(one) < host(other); });
  }
  std::uint64_t num_stretches = 0, end = kHighest;
  for (const std::uint32_t i : indices) {
    if (host(i) != end) ++num_stretches;
    end = host(i) + total_bytes(rows_[i]);
  }
  if (small.num_bytes > limits_.direct_job_bytes &&
      small.num_bytes >= num_stretches * limits_.large_run_bytes) {
    return;
  }
  for (const std::uint32_t i : indices) ways_[i] = Way::kDirect;
  if (!indices.empty()) ways_in_job_ |= bit(Way::kDirect);
  indices.clear();
}

void JobCopier::enqueue_batched() {
  if (!has(Way::kBatched)) return;
  moved_.clear();
  for (std::size_t i = 0; i < ways_.size(); ++i) {
    if (ways_[i] != Way::kBatched) continue;
    for (std::int64_t number = 0; number < rows_[i].num_runs; ++number) {
      const CopyRow run = part_of(rows_[i], number, 1);
      moved_.add(word(run.source), word(run.destination), word(run.num_bytes));
    }
  }
  gpu_.transfer(moved_.runs());
}

void JobCopier::enqueue_direct() {
  if (!has(Way::kDirect)) return;
  std::size_t i = 0;
  std::int64_t done = 0;  // runs of row i that are in a table
  const auto skip = [&] {
    while (i < ways_.size() && ways_[i] != Way::kDirect) ++i;
    return i < ways_.size();
  };
  while (skip()) {
    Table table = next_table();
    while (skip()) {
      const auto added = static_cast<std::int64_t>(table.add(part_of(rows_[i], done, rows_[i].num_runs - done)));
      if (added == 0) break;
      done += added;
      if (done == rows_[i].num_runs) {
        ++i;
        done = 0;
      }
    }
    launch(table);
  }
}

void JobCopier::enqueue_staged(const Small& small, bool is_store) {
  const auto& indices = small.indices;
  std::int64_t done = 0;  // runs of the first row that are in a part
  for (std::size_t first = 0; first < indices.size();) {
    const int part = next_part();
    Table table = next_table();
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
    while (first < indices.size()) {
      const CopyRow& row = rows_[indices[first]];
      std::int64_t count = row.num_runs - done;
      const std::uint64_t room = limits_.part_bytes - used;
      if (word(count) > room || word(count * row.num_bytes) > room) {
        count = std::min(count, static_cast<std::int64_t>(room / word(row.num_bytes)));
      }
      if (count == 0) break;
      const std::uint64_t place = begin + used;
      CopyRow packed = part_of(row, done, count);
      const std::uint64_t host = word(is_store ? packed.destination : packed.source);
      (is_store ? packed.destination : packed.source) = static_cast<std::int64_t>(place);
      (is_store ? packed.destination_step : packed.source_step) = packed.num_bytes;
      const std::uint64_t added = table.add(packed);
      if (added == 0) break;
      if (host != host_end) {
        move();
        host_begin = host;
        place_begin = place;
      }
      host_end = host + added * word(row.num_bytes);
      used += added * word(row.num_bytes);
      done += static_cast<std::int64_t>(added);
      if (done == row.num_runs) {
        ++first;
        done = 0;
      }
    }
    move();
    is_store ? enqueue_store(part, table) : enqueue_load(part, table);
  }
}

// The kernel packs the part after its previous bytes have been moved away; then the copy engines move the part.
void JobCopier::enqueue_store(int part, const Table& table) {
  wait_if_recorded(Queue::kKernel, Queue::kTransfer, part);
  launch(table);
  record(Queue::kKernel, part);
  gpu_.wait(Queue::kTransfer, Queue::kKernel, part);
  gpu_.transfer(moved_.runs());
  record(Queue::kTransfer, part);
}

// The copy engines move the part after the kernel has unpacked its previous bytes; then the kernel unpacks it.
void JobCopier::enqueue_load(int part, const Table& table) {
  wait_if_recorded(Queue::kTransfer, Queue::kKernel, part);
  gpu_.transfer(moved_.runs());
  record(Queue::kTransfer, part);
  gpu_.wait(Queue::kKernel, Queue::kTransfer, part);
  launch(table);
  record(Queue::kKernel, part);
}

// The rows of the table that `next_table` returned last.
void JobCopier::launch(const Table& table) { gpu_.launch(current_table_, table.num_rows(), table.num_tiles()); }

void JobCopier::copy_within_host() const {
  if (!has(Way::kWithinHost)) return;
  for (std::size_t i = 0; i < ways_.size(); ++i) {
    if (ways_[i] != Way::kWithinHost) continue;
    for (std::int64_t number = 0; number < rows_[i].num_runs; ++number) {
      const CopyRow run = part_of(rows_[i], number, 1);
      std::memmove(reinterpret_cast<void*>(run.destination), reinterpret_cast<const void*>(run.source),
                   word(run.num_bytes));
    }
  }
}

// An empty table in host memory. Waits until the GPU has read the previous one there.
Table JobCopier::next_table() {
  current_table_ = static_cast<int>(num_tables_ % kTables);
  if (num_tables_ >= kTables) gpu_.host_wait(current_table_);
  ++num_tables_;
  return {gpu_.rows(current_table_), kTableRows, limits_.tile_bytes};
}

void JobCopier::record(Queue queue, int part) {
  gpu_.record(queue, part);
  is_recorded_[static_cast<int>(queue)][part] = true;
}

void JobCopier::wait_if_recorded(Queue queue, Queue other, int part) {
  if (is_recorded_[static_cast<int>(other)][part]) gpu_.wait(queue, other, part);
}

}  // namespace hybridkv::cuda
