// The kernel, simulated on the CPU, compared with the plain references of csrc/include. The memory ends with the copied
// bytes, so a sanitizer detects an access out of bounds, at which a GPU would fault or read other data.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "../fragments.h"
#include "../host_memory.h"
#include "../job.h"
#include "csrc/tests/expect.h"
#include "hybridkv/page_set.h"
#include "hybridkv/reference.h"

namespace {

using hybridkv::BlockId;
using hybridkv::CopyRun;
using hybridkv::Direction;
using hybridkv::PageSet;
using hybridkv::cuda::FragmentRun;
using hybridkv::testing::expect;
using hybridkv::testing::kPoison;
using hybridkv::testing::Noise;

// Exactly `num_bytes`, from `skew` bytes after an address that is aligned to 16.
class Exactly {
 public:
  Exactly(std::size_t num_bytes, std::size_t skew) : bytes_(new unsigned char[num_bytes + skew]), skew_(skew) {
    size_ = num_bytes;
    poison();
  }

  unsigned char* data() { return bytes_.get() + skew_; }
  std::uint64_t address() { return reinterpret_cast<std::uint64_t>(data()); }
  void poison() { std::fill_n(data(), size_, kPoison); }
  void fill(std::uint64_t seed) {
    Noise noise(seed);
    std::generate_n(data(), size_, [&] { return static_cast<unsigned char>(noise.next() >> 32); });
  }
  std::vector<unsigned char> content() { return {data(), data() + size_}; }

 private:
  std::unique_ptr<unsigned char[]> bytes_;
  std::size_t skew_;
  std::size_t size_;
};

void play(const std::vector<CopyRun>& runs, std::uint64_t tile_bytes, std::uint32_t num_warps) {
  std::vector<FragmentRun> rows(runs.size());
  hybridkv::cuda::Table table(rows.data(), rows.size(), tile_bytes);
  for (const CopyRun& run : runs) {
    const hybridkv::CopyRow row{static_cast<std::int64_t>(run.source), static_cast<std::int64_t>(run.destination), 0, 0,
                                static_cast<std::int64_t>(run.num_bytes), 1};
    expect(table.add(row) == 1, "a table has a row for each run");
  }
  hybridkv::cuda::HostMemory memory;
  for (std::uint32_t warp = 0; warp < num_warps; ++warp) {
    for (std::uint32_t lane = 0; lane < hybridkv::cuda::kLanes; ++lane) {
      hybridkv::cuda::copy_fragments(rows.data(), static_cast<std::uint32_t>(table.num_rows()), table.num_tiles(),
                                     tile_bytes, warp, num_warps, lane, memory);
    }
  }
  expect(!memory.misaligned, "all accesses are aligned");
}

void check(const std::string& name, const std::vector<CopyRun>& runs, Exactly& destination) {
  destination.poison();
  hybridkv::reference::copy_runs(runs.data(), runs.size());
  const std::vector<unsigned char> wanted = destination.content();
  for (const std::uint64_t tile_bytes : {1000, 16384}) {
    for (const std::uint32_t num_warps : {1, 64}) {
      destination.poison();
      play(runs, tile_bytes, num_warps);
      expect(destination.content() == wanted, name + ": the bytes of the reference");
    }
  }
}

std::vector<CopyRun> page_runs(const std::vector<PageSet>& sets, const std::vector<BlockId>& ids, std::uint64_t buffer,
                               Direction direction) {
  std::vector<CopyRun> runs;
  for (const PageSet& set : sets) {
    for (std::uint64_t page = 0; page < set.num_pages; ++page) {
      runs.push_back(hybridkv::page_run(set, ids.data(), buffer, direction, page));
    }
  }
  return runs;
}

struct PageCase {
  std::uint64_t page_bytes;
  std::uint64_t padding;  // after each page except the last
  std::uint32_t num_pages;
  std::size_t skew;
  std::size_t buffer_skew;
};

// 64 B to 4 MiB; odd strides; padded pages; unaligned heads and tails.
const PageCase kPageCases[] = {
    {64, 0, 40, 0, 0},       {64, 1, 40, 1, 3},       {65, 0, 33, 0, 0},       {240, 16, 30, 0, 8},
    {512, 0, 37, 0, 0},      {1000, 24, 37, 8, 0},    {1025, 7, 40, 5, 1},     {4096, 0, 31, 0, 0},
    {4096, 4096, 17, 0, 8},  {4095, 3, 17, 15, 1},    {34304, 31232, 9, 0, 0}, {32768, 0, 13, 0, 4},
    {70001, 13, 5, 2, 2},    {327680, 16, 5, 0, 0},   {2097152, 1, 2, 0, 1},   {2097152, 64, 2, 0, 0},
    {4194304, 0, 2, 0, 0},   {4194304, 2, 1, 4, 2},
};

void check_pages() {
  for (const PageCase& one : kPageCases) {
    const std::uint64_t stride = one.page_bytes + one.padding;
    Exactly paged(stride * one.num_pages - one.padding, one.skew);
    Exactly buffer(one.page_bytes * one.num_pages, one.buffer_skew);
    std::vector<BlockId> ids(one.num_pages);
    for (std::uint32_t page = 0; page < one.num_pages; ++page) ids[page] = page;
    Noise noise(one.page_bytes);
    for (std::uint32_t page = one.num_pages - 1; page > 0; --page) std::swap(ids[page], ids[noise.below(page + 1)]);
    const std::vector<PageSet> sets = {{paged.address(), stride, one.page_bytes, 0, 0, one.num_pages}};
    const std::string name = "pages of " + std::to_string(one.page_bytes) + " each " + std::to_string(stride);
    paged.fill(1);
    check("gather " + name, page_runs(sets, ids, buffer.address(), Direction::kGather), buffer);
    buffer.fill(2);
    check("scatter " + name, page_runs(sets, ids, buffer.address(), Direction::kScatter), paged);
  }
}

// Two groups over the same memory with different page sizes, as in vLLM's hybrid models; and a set without pages.
void check_overlapping_groups() {
  Exactly paged(64 * 8192, 0);
  paged.fill(3);
  std::vector<BlockId> ids;
  for (std::size_t id = 0; id < 40; ++id) ids.push_back(static_cast<BlockId>((id * 11) % 64));
  const std::vector<PageSet> sets = {
      {paged.address(), 8192, 8192, 0, 0, 10},
      {paged.address(), 8192, 4000, 81920, 10, 0},
      {paged.address(), 8192, 4000, 81920, 10, 20},
      {paged.address() + 4096, 8192, 1024, 161920, 5, 33},
  };
  Exactly buffer(195712, 0);
  check("overlapping groups", page_runs(sets, ids, buffer.address(), Direction::kGather), buffer);
}

void check_many_runs() {
  Noise noise(4);
  Exactly source(1 << 16, 0);
  source.fill(5);
  for (const std::size_t num_runs : {0, 1, 100000}) {
    std::vector<CopyRun> runs;
    std::uint64_t end = 0;
    for (std::size_t run = 0; run < num_runs; ++run) {
      const std::uint64_t size = 1 + noise.below(100);
      runs.push_back({source.address() + noise.below((1 << 16) - size + 1), end + noise.below(3), size});
      end = runs.back().destination + size;
    }
    Exactly destination(end, 3);
    for (CopyRun& run : runs) run.destination += destination.address();
    check(std::to_string(num_runs) + " runs", runs, destination);
  }
}

}  // namespace

int main() {
  check_pages();
  check_overlapping_groups();
  check_many_runs();
}
