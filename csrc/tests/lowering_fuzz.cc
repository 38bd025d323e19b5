// A job with random numbers is refused, or all of its runs are in the arena, the zeros, or pages of blocks. The
// addresses are invalid: no memory may be accessed.
#include "csrc/cpu/lowering.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "csrc/tests/expect.h"
#include "csrc/tests/fuzz.h"

namespace {

using hybridkv::cpu::BlockPages;
using hybridkv::cpu::CopyShape;
using hybridkv::cpu::LoweredRuns;
using hybridkv::cpu::Lowering;
using hybridkv::cpu::PageColumn;
using hybridkv::cpu::SlotExtent;
using hybridkv::testing::Choices;
using hybridkv::testing::expect;

constexpr std::size_t kMaxSteps = 60;
constexpr std::int64_t kArena = std::int64_t{1} << 40;
constexpr std::int64_t kArenaBytes = 1 << 14;
constexpr std::int64_t kZeros = std::int64_t{1} << 41;
constexpr std::int64_t kPool = std::int64_t{1} << 42;

struct Range {
  std::int64_t begin, end;
  bool has(std::int64_t at, std::int64_t num_bytes) const { return at >= begin && num_bytes <= end - at; }
};

class Session {
 public:
  explicit Session(Choices choices)
      : choices_(choices), zeros_bytes_(odd(64)), lowering_(kArena, kArenaBytes, kZeros, zeros_bytes_) {}

  void run() {
    for (std::size_t step = 0; step < kMaxSteps && !choices_.is_used_up(); ++step) {
      try {
        choices_.one_in(2) ? lower() : add();
      } catch (const std::invalid_argument&) {
      }
    }
  }

 private:
  // Returns this number in most cases.
  template <class Number>
  Number odd(Number number) {
    if (!choices_.one_in(40)) return number;
    constexpr Number kMost = std::numeric_limits<Number>::max();
    // 2^55 and 2^56 are below and at the limit for sizes, where sums of valid numbers are largest. 0 as 32 bits.
    const Number others[] = {0,
                             1,
                             -1,
                             kMost,
                             kMost / 2,
                             kMost - 8,
                             std::numeric_limits<Number>::min(),
                             static_cast<Number>(std::int64_t{1} << 55),
                             static_cast<Number>(std::int64_t{1} << 56)};
    return others[choices_.below(std::size(others))];
  }
  std::int32_t below(std::uint64_t bound) { return odd(static_cast<std::int32_t>(choices_.below(bound))); }

  void add() {
    BlockPages pages{{}, odd<std::int64_t>(256), odd<std::int64_t>(4)};
    std::int64_t offset = 0;
    const auto same = static_cast<std::int64_t>(1 + choices_.below(63));  // for rows of several pages
    for (std::uint64_t count = choices_.below(4); count > 0; --count) {
      const std::int64_t page_bytes = choices_.one_in(2) ? static_cast<std::int64_t>(1 + choices_.below(64)) : same;
      const PageColumn column{odd(kPool + offset), odd<std::int64_t>(4096), odd(page_bytes), odd(offset)};
      pages.columns.push_back(column);
      offset += 64;
    }
    const std::vector<PageColumn> columns = pages.columns;
    const std::int64_t num_blocks = pages.num_blocks;
    if (choices_.one_in(2)) {
      lowering_.add_group(below(2), odd<std::int64_t>(choices_.below(2) * 4), std::move(pages));
    } else {
      lowering_.add_part(below(2), below(4), odd(4), std::move(pages));
    }
    for (const PageColumn& column : columns) {
      const std::int64_t last = num_blocks > 0 ? num_blocks - 1 : 0;
      ranges_.push_back({column.address, column.address + last * column.stride_bytes + column.page_bytes});
    }
  }

  void lower() {
    std::vector<CopyShape> shapes;
    std::vector<std::int32_t> ids, local_ids;
    std::vector<SlotExtent> extents;
    for (std::uint64_t count = choices_.below(3); count > 0; --count) {
      const auto stored = static_cast<std::int32_t>(choices_.between(1, 3));
      const auto copies = static_cast<std::int32_t>(choices_.below(3));
      const std::int32_t num_local = choices_.one_in(5) ? stored : 0;
      shapes.push_back({odd(copies), below(2), odd(0), odd(stored), odd(stored), below(3), below(3), odd(num_local),
                        odd(1), 0});
      for (std::int32_t block = 0; block < copies * stored; ++block) ids.push_back(below(4));
      for (std::int32_t block = 0; block < copies * num_local; ++block) local_ids.push_back(below(4));
      for (std::int32_t copy = 0; copy < copies; ++copy) {
        extents.push_back({odd<std::int64_t>(choices_.below(4) * 4096), odd<std::int64_t>(1024)});
      }
    }
    const bool is_store = choices_.one_in(2);
    const hybridkv::cpu::CopyTable table{shapes, ids, local_ids, extents};
    const LoweredRuns runs = is_store ? lowering_.store(table) : lowering_.load(table);
    const auto count = static_cast<std::size_t>(runs.num_runs);
    std::vector<std::int64_t> sources(count), destinations(count), sizes(count);
    hybridkv::cpu::expand(runs.rows, sources.data(), destinations.data(), sizes.data());
    std::int64_t total_bytes = 0;
    for (std::size_t run = 0; run < count; ++run) {
      const std::int64_t source = sources[run], destination = destinations[run];
      const std::int64_t num_bytes = sizes[run];
      total_bytes += num_bytes;
      expect(num_bytes > 0, "a run has bytes");
      expect(Range{runs.sources.begin, runs.sources.end}.has(source, num_bytes),
             "the span of the sources contains the run");
      expect(Range{runs.destinations.begin, runs.destinations.end}.has(destination, num_bytes),
             "the span of the destinations contains the run");
      const Range arena{kArena, kArena + kArenaBytes}, zeros{kZeros, kZeros + zeros_bytes_};
      expect(is_store ? arena.has(destination, num_bytes) : is_page(destination, num_bytes),
             "a run writes to the arena or to a page");
      expect(is_page(source, num_bytes) || (is_store ? zeros : arena).has(source, num_bytes),
             "a run reads a page, zeros or the arena");
    }
    expect(total_bytes == runs.total_bytes, "all bytes are counted");
  }

  // A run may join pages that are adjacent in memory.
  bool is_page(std::int64_t at, std::int64_t num_bytes) const {
    while (num_bytes > 0) {
      std::int64_t contained = 0;
      for (const Range& range : ranges_) {
        if (range.has(at, 1)) contained = std::max(contained, std::min(num_bytes, range.end - at));
      }
      if (contained == 0) return false;
      at += contained;
      num_bytes -= contained;
    }
    return true;
  }

  Choices choices_;
  std::int64_t zeros_bytes_;
  Lowering lowering_;
  std::vector<Range> ranges_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    Session(Choices(data, size)).run();
  } catch (const std::invalid_argument&) {
    // Invalid zeros.
  }
  return 0;
}
