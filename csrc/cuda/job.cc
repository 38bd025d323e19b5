#include "job.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

namespace hybridkv::cuda {
namespace {

constexpr std::uint64_t kHighest = std::numeric_limits<std::uint64_t>::max();
// Of one launch: the kernel counts tiles in 32 bits.
constexpr std::uint64_t kMostTiles = std::uint64_t{1} << 31;

enum class Way : std::uint8_t { kWithinHost, kBatched, kDirect, kStore, kLoad };

// Whether an address lies on the GPU. Neighbours are asked for one after another, so the last answer is tried first.
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

// Runs for the copy engines: neighbours are joined, and none goes from one registration into the next.
class Transfers {
 public:
  explicit Transfers(std::uint64_t registration_bytes) : registration_bytes_(registration_bytes) {}

  void clear() {
    sources_.clear();
    destinations_.clear();
    sizes_.clear();
  }
  bool empty() const { return sizes_.empty(); }
  Runs runs() const { return {sources_, destinations_, sizes_}; }

  void add(std::uint64_t source, std::uint64_t destination, std::uint64_t num_bytes) {
    while (num_bytes > 0) {
      const std::uint64_t piece = std::min({num_bytes, to_border(source), to_border(destination)});
      add_piece(source, destination, piece);
      source += piece;
      destination += piece;
      num_bytes -= piece;
    }
  }

 private:
  std::uint64_t to_border(std::uint64_t address) const { return registration_bytes_ - address % registration_bytes_; }

  void add_piece(std::uint64_t source, std::uint64_t destination, std::uint64_t num_bytes) {
    const bool goes_on = !sizes_.empty() && sources_.back() + sizes_.back() == source &&
                         destinations_.back() + sizes_.back() == destination &&
                         source % registration_bytes_ != 0 && destination % registration_bytes_ != 0;
    if (goes_on) {
      sizes_.back() += num_bytes;
      return;
    }
    sources_.push_back(source);
    destinations_.push_back(destination);
    sizes_.push_back(num_bytes);
  }

  std::uint64_t registration_bytes_;
  std::vector<std::uint64_t> sources_, destinations_, sizes_;
};

class Job {
 public:
  Job(const Runs& runs, std::span<const AddressRange> device, std::uint64_t staging, const Limits& limits, Gpu& gpu)
      : runs_(runs), staging_(staging), limits_(limits), gpu_(gpu), ways_(runs.sizes.size()) {
    choose_ways(device);
  }

  void enqueue() {
    gpu_.wait_for_caller(Queue::kKernel);
    gpu_.wait_for_caller(Queue::kTransfer);
    enqueue_batched();
    enqueue_direct();
    enqueue_staged(stores_, true);
    enqueue_staged(loads_, false);
    copy_within_host();
  }

 private:
  using Indices = std::vector<std::uint32_t>;

  void choose_ways(std::span<const AddressRange> device) {
    Locator from(device), to(device);
    for (std::size_t i = 0; i < ways_.size(); ++i) {
      const bool from_device = from.on_device(runs_.sources[i]), to_device = to.on_device(runs_.destinations[i]);
      if (!from_device && !to_device) {
        ways_[i] = Way::kWithinHost;
      } else if (runs_.sizes[i] >= limits_.large_run_bytes) {
        ways_[i] = Way::kBatched;
      } else {
        ways_[i] = from_device && to_device ? Way::kDirect : from_device ? Way::kStore : Way::kLoad;
      }
    }
    stores_ = staged(Way::kStore, runs_.destinations);
    loads_ = staged(Way::kLoad, runs_.sources);
  }

  // The runs of this way, in the order of the host's addresses: neighbours on the host are neighbours in staging memory,
  // and move together. None, and the runs become direct, where staging does not help.
  Indices staged(Way way, std::span<const std::uint64_t> host) {
    Indices found;
    for (std::size_t i = 0; i < ways_.size(); ++i) {
      if (ways_[i] == way) found.push_back(static_cast<std::uint32_t>(i));
    }
    if (found.empty()) return found;
    const auto before = [&](std::uint32_t one, std::uint32_t other) { return host[one] < host[other]; };
    if (!std::is_sorted(found.begin(), found.end(), before)) std::stable_sort(found.begin(), found.end(), before);
    std::uint64_t num_bytes = 0, num_stretches = 0, end = kHighest;
    for (const std::uint32_t i : found) {
      if (host[i] != end) ++num_stretches;
      end = host[i] + runs_.sizes[i];
      num_bytes += runs_.sizes[i];
    }
    if (num_bytes > limits_.direct_job_bytes && num_bytes >= num_stretches * limits_.large_run_bytes) return found;
    for (const std::uint32_t i : found) ways_[i] = Way::kDirect;
    return {};
  }

  void enqueue_batched() {
    Transfers transfers(limits_.registration_bytes);
    for (std::size_t i = 0; i < ways_.size(); ++i) {
      if (ways_[i] == Way::kBatched) transfers.add(runs_.sources[i], runs_.destinations[i], runs_.sizes[i]);
    }
    if (!transfers.empty()) gpu_.transfer(transfers.runs());
  }

  void enqueue_direct() {
    std::size_t i = 0;
    const auto skip = [&] {
      while (i < ways_.size() && ways_[i] != Way::kDirect) ++i;
      return i < ways_.size();
    };
    while (skip()) {
      const int part = next_part();
      Table table = table_of(part);
      while (skip() && table.add(runs_.sources[i], runs_.destinations[i], runs_.sizes[i])) ++i;
      gpu_.upload(Queue::kKernel, part, table.num_rows());
      gpu_.launch(part, table.num_rows(), table.num_tiles());
      record(Queue::kKernel, part);
      read_by_[part] = Queue::kKernel;
    }
  }

  void enqueue_staged(const Indices& indices, bool is_store) {
    Transfers moved(limits_.registration_bytes);
    for (std::size_t first = 0; first < indices.size();) {
      const int part = next_part();
      Table table = table_of(part);
      moved.clear();
      const std::uint64_t begin = staging_ + static_cast<std::uint64_t>(part) * limits_.part_bytes;
      std::uint64_t used = 0;
      for (; first < indices.size(); ++first) {
        const std::uint32_t i = indices[first];
        const std::uint64_t source = runs_.sources[i], destination = runs_.destinations[i], size = runs_.sizes[i];
        if (size > limits_.part_bytes - used) break;
        const std::uint64_t place = begin + used;
        if (!(is_store ? table.add(source, place, size) : table.add(place, destination, size))) break;
        is_store ? moved.add(place, destination, size) : moved.add(source, place, size);
        used += size;
      }
      is_store ? enqueue_store(part, table, moved) : enqueue_load(part, table, moved);
    }
  }

  // The kernel packs the part once what was there has been moved away; then the part moves.
  void enqueue_store(int part, const Table& table, const Transfers& moved) {
    wait_if_recorded(Queue::kKernel, Queue::kTransfer, part);
    gpu_.upload(Queue::kKernel, part, table.num_rows());
    gpu_.launch(part, table.num_rows(), table.num_tiles());
    record(Queue::kKernel, part);
    gpu_.wait(Queue::kTransfer, Queue::kKernel, part);
    gpu_.transfer(moved.runs());
    record(Queue::kTransfer, part);
    read_by_[part] = Queue::kKernel;
  }

  // The part moves once the kernel has unpacked what was there; then the kernel unpacks it. The table goes ahead of the
  // bytes: behind the bytes of other parts it would come late.
  void enqueue_load(int part, const Table& table, const Transfers& moved) {
    wait_if_recorded(Queue::kTransfer, Queue::kKernel, part);
    gpu_.upload(Queue::kTransfer, part, table.num_rows());
    gpu_.transfer(moved.runs());
    record(Queue::kTransfer, part);
    gpu_.wait(Queue::kKernel, Queue::kTransfer, part);
    gpu_.launch(part, table.num_rows(), table.num_tiles());
    record(Queue::kKernel, part);
    read_by_[part] = Queue::kTransfer;
  }

  void copy_within_host() const {
    for (std::size_t i = 0; i < ways_.size(); ++i) {
      if (ways_[i] != Way::kWithinHost) continue;
      std::memmove(reinterpret_cast<void*>(runs_.destinations[i]), reinterpret_cast<const void*>(runs_.sources[i]),
                   runs_.sizes[i]);
    }
  }

  int next_part() { return num_turns_++ % kParts; }

  // An empty table in the part's host memory, once the GPU has read the last one there.
  Table table_of(int part) {
    if (read_by_[part].has_value()) gpu_.host_wait(*read_by_[part], part);
    return {gpu_.rows(part), kPartRows, limits_.tile_bytes};
  }

  void record(Queue queue, int part) {
    gpu_.record(queue, part);
    is_recorded_[static_cast<int>(queue)][part] = true;
  }

  void wait_if_recorded(Queue queue, Queue other, int part) {
    if (is_recorded_[static_cast<int>(other)][part]) gpu_.wait(queue, other, part);
  }

  const Runs& runs_;
  const std::uint64_t staging_;
  const Limits& limits_;
  Gpu& gpu_;
  std::vector<Way> ways_;
  Indices stores_, loads_;
  int num_turns_ = 0;
  std::optional<Queue> read_by_[kParts];  // which queue uploads the part's last table
  bool is_recorded_[2][kParts] = {};
};

}  // namespace

bool Table::add(std::uint64_t source, std::uint64_t destination, std::uint64_t num_bytes) {
  const std::uint64_t tiles = (num_bytes + tile_bytes_ - 1) / tile_bytes_;
  if (num_rows_ > 0) {
    if (num_tiles_ + tiles > kMostTiles) return false;
    FragmentRun& row = rows_[num_rows_ - 1];
    const auto source_step = static_cast<std::int64_t>(source - last_source_);
    const auto destination_step = static_cast<std::int64_t>(destination - last_destination_);
    const bool is_second = row.num_fragments == 1;
    if (row.fragment_bytes == num_bytes &&
        (is_second || (row.source_stride == source_step && row.destination_stride == destination_step))) {
      row.source_stride = source_step;
      row.destination_stride = destination_step;
      ++row.num_fragments;
      num_tiles_ += tiles;
      last_source_ = source;
      last_destination_ = destination;
      return true;
    }
    if (num_rows_ == max_rows_) return false;
  }
  rows_[num_rows_++] = {source, destination, 0, 0, num_bytes, 1, num_tiles_, tiles};
  num_tiles_ += tiles;
  last_source_ = source;
  last_destination_ = destination;
  return true;
}

void copy_job(const Runs& runs, std::span<const AddressRange> device, std::uint64_t staging, const Limits& limits,
              Gpu& gpu) {
  try {
    Job(runs, device, staging, limits, gpu).enqueue();
  } catch (...) {
    try {
      gpu.finish();  // what was enqueued may still write
    } catch (...) {
      // The first failure is the one to report.
    }
    throw;
  }
  gpu.finish();
}

}  // namespace hybridkv::cuda
