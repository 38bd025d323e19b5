// Lowering of jobs to runs: examples, refused jobs, and parts that are added during a lowering. Tests of random jobs
// are in Python, against numpy (test_job_lowering.py of the connectors).
#include "csrc/cpu/lowering.h"

#include <atomic>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "csrc/tests/expect.h"

namespace {

using hybridkv::cpu::BlockPages;
using hybridkv::cpu::CopyShape;
using hybridkv::cpu::CopyTable;
using hybridkv::cpu::LoweredRuns;
using hybridkv::cpu::Lowering;
using hybridkv::cpu::SlotExtent;
using hybridkv::testing::expect;
using hybridkv::testing::Noise;

constexpr std::int64_t kArena = 100'000;
constexpr std::int64_t kArenaBytes = 1'000;
constexpr std::int64_t kZeros = 900'000;
constexpr std::int64_t kBlocks = 8;

// Two layers, of 10 and of 16 bytes a block, in blocks of a chunk of 32 bytes.
BlockPages two_layers() { return {{{1'000, 10, 10, 0}, {5'000, 20, 16, 16}}, 32, kBlocks}; }

struct Job {
  std::vector<CopyShape> shapes;
  std::vector<std::int32_t> block_ids;
  std::vector<std::int32_t> local_ids;
  std::vector<SlotExtent> extents;

  CopyTable table() const { return {shapes, block_ids, local_ids, extents}; }
};

struct Run {
  std::int64_t source, destination, num_bytes;
  bool operator==(const Run&) const = default;
};

std::vector<Run> runs_of(const LoweredRuns& lowered) {
  const auto count = static_cast<std::size_t>(lowered.num_runs);
  std::vector<std::int64_t> sources(count), destinations(count), num_bytes(count);
  hybridkv::cpu::expand(lowered.rows, sources.data(), destinations.data(), num_bytes.data());
  std::vector<Run> runs;
  for (std::size_t run = 0; run < count; ++run) runs.push_back({sources[run], destinations[run], num_bytes[run]});
  return runs;
}

void expect_refused(const Lowering& lowering, const Job& job, bool is_store, const std::string& claim) {
  bool is_refused = false;
  try {
    is_store ? lowering.store(job.table()) : lowering.load(job.table());
  } catch (const std::invalid_argument&) {
    is_refused = true;
  }
  expect(is_refused, claim);
}

void a_store_writes_its_slots_in_order() {
  Lowering lowering(kArena, kArenaBytes, kZeros, 24);
  lowering.add_group(0, 0, two_layers());
  const Job job{{{2, 0, 0, 1, 1, 0, 0, 0, 1, 0}}, {3, 4}, {}, {{0, 40}, {40, 32}}};
  const LoweredRuns stored = lowering.store(job.table());
  expect(runs_of(stored) == std::vector<Run>{{1'030, kArena, 10},
                                             {kZeros, kArena + 10, 6},
                                             {5'060, kArena + 16, 16},
                                             {kZeros, kArena + 32, 8},
                                             {1'040, kArena + 40, 10},
                                             {kZeros, kArena + 50, 6},
                                             {5'080, kArena + 56, 16}},
         "pages, zeros between them and zeros after the chunk");
  expect(stored.ends == std::vector<std::int64_t>{4, 7} && stored.zero_bytes == 20, "the end of each chunk");
}

void a_run_ends_at_the_end_of_its_extent() {
  Lowering lowering(kArena, kArenaBytes, kZeros, 24);
  lowering.add_group(0, 0, two_layers());
  const Job job{{{1, 0, 0, 1, 1, 0, 0, 0, 3, 0}}, {3}, {}, {{40, 4}, {500, 20}, {80, 8}}};
  expect(runs_of(lowering.load(job.table())) ==
             std::vector<Run>{
                 {kArena + 40, 1'030, 4}, {kArena + 500, 1'034, 6}, {kArena + 512, 5'060, 8}, {kArena + 80, 5'068, 8}},
         "a run ends with its extent, also if it begins inside the extent");
}

void a_load_joins_adjacent_runs() {
  Lowering lowering(kArena, kArenaBytes, kZeros, 24);
  lowering.add_group(0, 0, {{{1'000, 16, 16, 0}}, 16, kBlocks});
  const Job job{{{2, 0, 0, 2, 2, 0, 0, 0, 1, 0}}, {2, 3, 4, 6}, {}, {{0, 32}, {32, 32}}};
  expect(runs_of(lowering.load(job.table())) == std::vector<Run>{{kArena, 1'032, 48}, {kArena + 48, 1'096, 16}},
         "adjacent runs of two chunks are joined");
  const Job local{{{1, 0, 0, 1, 1, 0, 0, 1, 1, 0}, {1, 0, 0, 1, 1, 0, 0, 0, 1, 0}}, {2, 3}, {5}, {{0, 16}, {16, 16}}};
  expect(runs_of(lowering.load(local.table())) == std::vector<Run>{{kArena + 16, 1'048, 16}, {1'080, 1'032, 16}},
         "copies from the engine's blocks are last and are not joined");
}

// Replaces one number of a table by a random one. The job is refused, or its runs are in the arena.
void no_table_gives_a_run_outside_the_arena() {
  Lowering lowering(kArena, kArenaBytes, kZeros, 24);
  lowering.add_group(0, 0, two_layers());
  lowering.add_group(1, 4, {{{10'000, 16, 16, 0}}, 16, kBlocks});
  lowering.add_part(1, 2, 4, {{{10'008, 16, 8, 0}}, 16, kBlocks});
  Noise noise(1);
  int num_lowered = 0;
  for (int round = 0; round < 20'000; ++round) {
    Job job{{{2, 0, 0, 2, 2, 0, 0, 0, 1, 0}, {1, 1, 0, 2, 2, 2, 0, 0, 2, 0}},
            {1, 2, 3, 4, 5, 6},
            {},
            {{0, 64}, {64, 64}, {200, 16}, {300, 40}}};
    const auto odd = static_cast<std::int32_t>(noise.below(6) == 0 ? noise.next() : noise.below(12) - 2);
    CopyShape& shape = job.shapes[noise.below(2)];
    switch (noise.below(12)) {
      case 0: shape.num_copies = odd & 0xFF; break;
      case 1: shape.group_index = odd; break;
      case 2: shape.first_block = odd; break;
      case 3: shape.num_blocks = odd; break;
      case 4: shape.stored_blocks = odd; break;
      case 5: shape.lead_tokens = odd; break;
      case 6: shape.trail_tokens = odd; break;
      case 7: shape.num_local = odd; break;
      case 8: shape.num_extents = odd; break;
      case 9: job.block_ids[noise.below(6)] = odd; break;
      case 10: job.extents[noise.below(4)].offset = static_cast<std::int64_t>(noise.next()); break;
      default: job.extents[noise.below(4)].num_bytes = static_cast<std::int64_t>(noise.next()); break;
    }
    for (const bool is_store : {false, true}) {
      LoweredRuns lowered;
      try {
        lowered = is_store ? lowering.store(job.table()) : lowering.load(job.table());
      } catch (const std::invalid_argument&) {
        continue;
      }
      ++num_lowered;
      for (const Run& run : runs_of(lowered)) {
        const std::int64_t stored = is_store ? run.destination : run.source;
        expect(run.num_bytes > 0 && stored >= kArena && stored + run.num_bytes <= kArena + kArenaBytes,
               "a run is in the arena");
      }
    }
  }
  expect(num_lowered > 1'000, "some jobs are lowered");
}

void invalid_jobs_are_refused() {
  Lowering lowering(kArena, kArenaBytes, kZeros, 24);
  lowering.add_group(0, 0, two_layers());
  const Job good{{{1, 0, 0, 2, 2, 0, 0, 0, 1, 0}}, {3, 4}, {}, {{0, 64}}};
  expect(lowering.store(good.table()).ends.size() == 1, "the valid job is lowered");
  Job job = good;
  job.block_ids[1] = kBlocks;
  expect_refused(lowering, job, true, "a block outside of the pool");
  job = good;
  job.extents[0].num_bytes = 63;
  expect_refused(lowering, job, false, "a slot that is too small");
  job = good;
  job.extents[0].offset = kArenaBytes - 63;
  expect_refused(lowering, job, false, "a slot that is not in the arena");
  job = good;
  job.shapes[0].stored_blocks = 3;
  job.extents[0].num_bytes = 96;
  expect_refused(lowering, job, true, "a part of a chunk");
  job = good;
  job.block_ids.push_back(1);
  expect_refused(lowering, job, true, "one block too many");
  bool is_refused = false;
  try {
    lowering.add_group(1, 0, {{{0, 16, 16, 0}, {0, 16, 16, 8}}, 32, kBlocks});
  } catch (const std::invalid_argument&) {
    is_refused = true;
  }
  expect(is_refused, "pages that overlap");
}

void parts_may_be_added_during_a_lowering() {
  Lowering lowering(kArena, kArenaBytes, kZeros, 24);
  lowering.add_group(0, 64, {{{0, 64, 64, 0}}, 64, kBlocks});
  std::atomic<std::int64_t> num_added = 0;
  std::thread adder([&] {
    for (std::int64_t end = 16; end < 64; ++end) {
      lowering.add_part(0, 0, end, {{{0, 64, end, 0}}, (end + 15) / 16 * 16, kBlocks});
      num_added = end;
    }
  });
  for (std::int32_t round = 0; round < 2'000 || num_added < 63; ++round) {
    const auto end = static_cast<std::int32_t>(num_added);
    if (end < 16) continue;
    const Job job{{{1, 0, 0, 1, 1, 0, 64 - end, 0, 1, 0}}, {3}, {}, {{0, 64}}};
    expect(lowering.load(job.table()).total_bytes == end, "an added part is used");
  }
  adder.join();
}

}  // namespace

int main() {
  a_store_writes_its_slots_in_order();
  a_run_ends_at_the_end_of_its_extent();
  a_load_joins_adjacent_runs();
  invalid_jobs_are_refused();
  no_table_gives_a_run_outside_the_arena();
  parts_may_be_added_during_a_lowering();
}
