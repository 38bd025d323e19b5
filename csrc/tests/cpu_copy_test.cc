// Compares every kernel of csrc/cpu with the plain reference, at every CPU level of this machine.
#include <string>
#include <vector>

#include "csrc/cpu/copy.h"
#include "csrc/tests/expect.h"
#include "hybridkv/reference.h"

namespace {

using hybridkv::BlockId;
using hybridkv::CopyRun;
using hybridkv::Digest128;
using hybridkv::Direction;
using hybridkv::PageSet;
using hybridkv::cpu::Caching;
using hybridkv::cpu::Level;
using hybridkv::cpu::CopyOptions;
using hybridkv::cpu::PageRuns;
using hybridkv::cpu::RunArrays;
using hybridkv::cpu::RunSource;
using hybridkv::cpu::ThreadPool;
using hybridkv::testing::expect;
using hybridkv::testing::Memory;
using hybridkv::testing::Noise;

struct Way {
  std::string name;
  CopyOptions options;
};

std::vector<Way> every_way(ThreadPool& pool) {
  std::vector<Way> ways;
  for (const Level level : hybridkv::cpu::supported_levels()) {
    for (const Caching caching : {Caching::kCached, Caching::kStreamed}) {
      for (ThreadPool* threads : {static_cast<ThreadPool*>(nullptr), &pool}) {
        const std::string stores = caching == Caching::kCached ? " cached" : " streamed";
        ways.push_back({hybridkv::cpu::name_of(level) + stores + (threads == nullptr ? "" : " threads"),
                        {level, caching, threads}});
      }
    }
  }
  return ways;
}

// Records of `runs_per_record` runs each.
std::vector<std::int64_t> record_ends_of(std::size_t num_runs, std::size_t runs_per_record) {
  std::vector<std::int64_t> ends;
  for (std::size_t end = runs_per_record; end < num_runs; end += runs_per_record) {
    ends.push_back(static_cast<std::int64_t>(end));
  }
  if (num_runs > 0) ends.push_back(static_cast<std::int64_t>(num_runs));
  return ends;
}

Digest128 plain_digest(const std::vector<CopyRun>& runs, std::size_t first, std::size_t last) {
  std::vector<unsigned char> record;
  for (std::size_t run = first; run < last; ++run) {
    const auto* source = reinterpret_cast<const unsigned char*>(runs[run].source);
    record.insert(record.end(), source, source + runs[run].num_bytes);
  }
  return hybridkv::xxh3::digest(record.data(), record.size());
}

// Copies the runs in every way and compares the whole destination with the result of the reference.
void check(const std::string& name, const RunSource& source, Memory& destination, ThreadPool& pool,
           const std::vector<std::size_t>& record_sizes) {
  std::vector<CopyRun> runs(source.size());
  source.read(0, runs.size(), runs.data());
  destination.poison();
  hybridkv::reference::copy_runs(runs.data(), runs.size());
  const std::vector<unsigned char> wanted = destination.everything();
  for (const Way& way : every_way(pool)) {
    destination.poison();
    hybridkv::cpu::copy(source, way.options);
    expect(destination.everything() == wanted, name + ": same bytes as the reference, " + way.name);
  }
  for (const std::size_t runs_per_record : record_sizes) {
    const std::vector<std::int64_t> ends = record_ends_of(runs.size(), runs_per_record);
    std::vector<Digest128> wanted_digests;
    for (std::size_t record = 0; record < ends.size(); ++record) {
      const std::size_t first = record == 0 ? 0 : static_cast<std::size_t>(ends[record - 1]);
      wanted_digests.push_back(plain_digest(runs, first, static_cast<std::size_t>(ends[record])));
    }
    for (const Way& way : every_way(pool)) {
      const std::string which = name + ", " + std::to_string(runs_per_record) + " runs a record, " + way.name;
      std::vector<Digest128> digests(ends.size(), {0xA5A5, 0xA5A5});
      destination.poison();
      hybridkv::cpu::copy_and_digest(source, ends.data(), ends.size(), digests.data(), way.options);
      expect(destination.everything() == wanted, which + ": same bytes as the reference, with digests");
      expect(digests == wanted_digests, which + ": digests of the copied bytes");
      digests.assign(ends.size(), {0xA5A5, 0xA5A5});
      hybridkv::cpu::digest(source, ends.data(), ends.size(), digests.data(), way.options);
      expect(digests == wanted_digests, which + ": digests without a copy");
    }
  }
}

struct PageCase {
  std::uint64_t page_bytes;
  std::uint64_t padding;  // after each page
  std::size_t num_blocks;
  std::size_t num_pages;
  std::size_t misalignment;
  std::size_t buffer_misalignment;
};

// 64 B to 4 MiB; odd strides; padded pages; unaligned heads and tails; one block used more than once.
const PageCase kPageCases[] = {
    {64, 0, 64, 40, 0, 0},    {64, 1, 64, 64, 1, 3},        {65, 0, 50, 33, 0, 0},    {192, 64, 40, 40, 0, 16},
    {240, 0, 30, 30, 0, 0},   {241, 15, 30, 30, 7, 9},      {1000, 24, 40, 37, 0, 0}, {1024, 0, 64, 64, 0, 0},
    {1025, 7, 40, 40, 5, 1},  {1088, 0, 20, 20, 0, 32},     {4096, 0, 64, 50, 0, 0},  {4096, 4096, 16, 16, 0, 8},
    {4095, 3, 16, 16, 63, 1}, {34304, 31232, 12, 12, 0, 0}, {32768, 0, 20, 17, 0, 0}, {65536, 64, 9, 9, 0, 0},
    {70001, 13, 9, 9, 0, 0},  {327680, 0, 6, 5, 0, 0},      {1048576, 0, 3, 3, 0, 1}, {4194304, 0, 2, 2, 0, 0},
    {4194304, 8, 1, 1, 3, 0},
};

void check_pages(ThreadPool& pool) {
  for (const PageCase& one : kPageCases) {
    const std::uint64_t stride = one.page_bytes + one.padding;
    Memory paged(stride * one.num_blocks, one.misalignment);
    Memory buffer(one.page_bytes * one.num_pages, one.buffer_misalignment);
    std::vector<BlockId> distinct;
    std::vector<BlockId> any;
    Noise noise(one.page_bytes);
    for (std::size_t page = 0; page < one.num_pages; ++page) {
      distinct.push_back(static_cast<BlockId>((page * 7 + 3) % one.num_blocks));
      any.push_back(static_cast<BlockId>(noise.below(one.num_blocks)));
    }
    if (one.num_blocks % 7 == 0) {
      for (std::size_t page = 0; page < one.num_pages; ++page) distinct[page] = static_cast<BlockId>(page);
    }
    const PageSet set{paged.address(), stride, one.page_bytes, 0, 0, static_cast<std::uint32_t>(one.num_pages)};
    const std::string name = "pages of " + std::to_string(one.page_bytes) + " each " + std::to_string(stride);
    const std::vector<std::size_t> records = {1, 3, one.num_pages};
    paged.fill(1);
    check("gather " + name, PageRuns(&set, 1, any.data(), buffer.address(), Direction::kGather), buffer, pool, records);
    buffer.fill(2);
    check("scatter " + name, PageRuns(&set, 1, distinct.data(), buffer.address(), Direction::kScatter), paged, pool,
          records);
  }
}

// Two groups over the same memory with different page sizes, as in vLLM's hybrid models; and sets without pages.
void check_overlapping_groups(ThreadPool& pool) {
  Memory paged(64 * 8192, 0);
  paged.fill(3);
  std::vector<BlockId> ids;
  for (std::size_t id = 0; id < 40; ++id) ids.push_back(static_cast<BlockId>((id * 11) % 64));
  const std::vector<PageSet> sets = {
      {paged.address(), 8192, 8192, 0, 0, 10},      {paged.address(), 8192, 4000, 81920, 10, 0},
      {paged.address(), 8192, 4000, 81920, 10, 20}, {paged.address() + 4096, 8192, 1024, 161920, 5, 33},
      {paged.address(), 4096, 100, 195712, 0, 1},
  };
  Memory buffer(195812, 0);
  check("overlapping groups", PageRuns(sets.data(), sets.size(), ids.data(), buffer.address(), Direction::kGather),
        buffer, pool, {1, 7, 64});
  const PageRuns nothing(sets.data() + 1, 1, ids.data(), buffer.address(), Direction::kGather);
  check("no pages", nothing, buffer, pool, {1});
}

// 0, 1 and 100,000 runs; random sizes and alignments, including empty runs.
void check_runs(ThreadPool& pool) {
  Noise noise(4);
  for (const std::size_t num_runs : {std::size_t{0}, std::size_t{1}, std::size_t{300}, std::size_t{100000}}) {
    const std::uint64_t max_bytes = num_runs > 1000 ? 100 : 20000;
    std::vector<std::int64_t> sources;
    std::vector<std::int64_t> destinations;
    std::vector<std::int64_t> num_bytes;
    std::int64_t end = 0;
    Memory from(1 << 20, 0);
    from.fill(5);
    for (std::size_t run = 0; run < num_runs; ++run) {
      const auto size = static_cast<std::int64_t>(noise.below(8) == 0 ? 0 : noise.below(max_bytes));
      sources.push_back(static_cast<std::int64_t>(from.address() + noise.below(from.size() - max_bytes)));
      destinations.push_back(end);
      num_bytes.push_back(size);
      end += size + static_cast<std::int64_t>(noise.below(3) == 0 ? noise.below(100) : 0);
    }
    Memory to(static_cast<std::size_t>(end) + 1, 3);
    for (std::int64_t& destination : destinations) destination += static_cast<std::int64_t>(to.address());
    const RunArrays runs(sources.data(), destinations.data(), num_bytes.data(), num_runs);
    check(std::to_string(num_runs) + " runs", runs, to, pool, {1, 13, 50000});
  }
}

// A run longer than the shares of all threads is split between them, and so are runs that end where a share ends.
void check_shares(ThreadPool& pool) {
  Memory from(9 << 20, 0);
  from.fill(8);
  Memory to(9 << 20, 0);
  const auto source = static_cast<std::int64_t>(from.address());
  const auto destination = static_cast<std::int64_t>(to.address());
  const std::int64_t all = 9 << 20;
  check("one long run", RunArrays(&source, &destination, &all, 1), to, pool, {1});
  std::vector<std::int64_t> sources;
  std::vector<std::int64_t> destinations;
  const std::vector<std::int64_t> sizes(9, 1 << 20);
  for (std::int64_t run = 0; run < 9; ++run) {
    sources.push_back(source + (8 - run) * (1 << 20));
    destinations.push_back(destination + run * (1 << 20));
  }
  check("runs of a share each", RunArrays(sources.data(), destinations.data(), sizes.data(), 9), to, pool, {1, 4});
}

}  // namespace

int main() {
  ThreadPool pool(3);
  check_pages(pool);
  check_overlapping_groups(pool);
  check_runs(pool);
  check_shares(pool);
}
