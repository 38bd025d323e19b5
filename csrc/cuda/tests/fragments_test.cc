// The copy kernel's index arithmetic for every warp and lane, compared with a loop over bytes: each
// byte of each fragment is written exactly once, from the right place, by an aligned access, and no
// other byte is written. The addresses are plain numbers; no memory is accessed.
#include "../fragments.h"

#include <cstdio>
#include <cstdlib>
#include <unordered_map>
#include <vector>

namespace {

using namespace hybridkv::cuda;

void expect(bool holds, const char* claim, std::uint64_t detail = 0) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s (%llu)\n", claim, static_cast<unsigned long long>(detail));
  std::exit(EXIT_FAILURE);
}

// The source address of each written destination byte.
struct Journal {
  std::unordered_map<std::uint64_t, std::uint64_t> written;
  std::uint64_t accesses = 0;

  template <std::uint32_t kWidth>
  void copy(std::uint64_t source, std::uint64_t destination) {
    expect(source % kWidth == 0 && destination % kWidth == 0, "an access is aligned", source);
    ++accesses;
    for (std::uint32_t i = 0; i < kWidth; ++i) {
      expect(written.emplace(destination + i, source + i).second, "a byte is written once", destination + i);
    }
  }

  template <std::uint32_t kWidth>
  void copy_many(std::uint64_t source, std::uint64_t destination) {
    for (std::uint32_t i = 0; i < kWordsInFlight; ++i) {
      copy<kWidth>(source + i * kLanes * kWidth, destination + i * kLanes * kWidth);
    }
  }
};

struct Plan {
  std::vector<FragmentRun> runs;
  std::uint64_t num_tiles = 0;
  std::uint64_t tile_bytes;

  void add(FragmentRun run) {
    run.first_tile = num_tiles;
    run.tiles_per_fragment = (run.fragment_bytes + tile_bytes - 1) / tile_bytes;
    num_tiles += run.tiles_per_fragment * run.num_fragments;
    runs.push_back(run);
  }
};

Journal play(const Plan& plan, std::uint32_t num_warps) {
  Journal journal;
  for (std::uint32_t warp = 0; warp < num_warps; ++warp) {
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
      copy_fragments(plan.runs.data(), static_cast<std::uint32_t>(plan.runs.size()), plan.num_tiles, plan.tile_bytes,
                     warp, num_warps, lane, journal);
    }
  }
  return journal;
}

void expect_same_as_a_loop_over_bytes(const Plan& plan, std::uint32_t num_warps) {
  const Journal journal = play(plan, num_warps);
  std::uint64_t num_bytes = 0;
  for (const FragmentRun& run : plan.runs) {
    for (std::uint64_t fragment = 0; fragment < run.num_fragments; ++fragment) {
      for (std::uint64_t byte = 0; byte < run.fragment_bytes; ++byte, ++num_bytes) {
        const auto found = journal.written.find(run.destination + fragment * run.destination_stride + byte);
        expect(found != journal.written.end(), "every byte is written", byte);
        expect(found->second == run.source + fragment * run.source_stride + byte,
               "each byte is from its own source", byte);
      }
    }
  }
  expect(journal.written.size() == num_bytes, "no other byte is written", journal.written.size());
}

// Every alignment of both sides, every small size, tiles smaller and larger than the fragment.
void check_every_alignment_and_size() {
  for (std::uint64_t source = 0; source < 16; ++source) {
    for (std::uint64_t destination = 0; destination < 16; ++destination) {
      for (const std::uint64_t tile_bytes : {1, 7, 16, 48, 4096}) {
        for (std::uint64_t size = 1; size <= 80; ++size) {
          Plan plan{{}, 0, tile_bytes};
          plan.add({1024 + source, 4096 + destination, 0, 0, size, 1, 0, 0});
          expect_same_as_a_loop_over_bytes(plan, 1);
        }
      }
    }
  }
}

// Sizes around the bytes that a warp copies at a time: 512 bytes, and 2048 with all words in flight.
void check_sizes_around_whole_warps() {
  for (const std::uint64_t skew : {0, 1, 2, 4, 8}) {
    for (const std::uint64_t middle : {512, 1024, 2048, 4096}) {
      for (std::uint64_t size = middle - 17; size <= middle + 17; ++size) {
        Plan plan{{}, 0, 2048};
        plan.add({1 << 16, (1 << 20) + skew, 0, 0, size, 1, 0, 0});
        expect_same_as_a_loop_over_bytes(plan, 3);
      }
    }
  }
}

void check_strides_and_many_runs() {
  for (const std::uint32_t num_warps : {1, 2, 5, 16, 64, 1000}) {
    for (const std::uint64_t tile_bytes : {64, 100, 4096}) {
      Plan plan{{}, 0, tile_bytes};
      std::uint64_t destination = std::uint64_t{1} << 40;
      for (std::uint64_t i = 0; i < 40; ++i) {
        const std::uint64_t size = 1 + i * 37 % 500;
        const auto padding = static_cast<std::int64_t>(i % 3 * 13);
        // Descending sources, as of descending block ids, and one source for all fragments.
        const std::int64_t source_stride = i % 4 == 0 ? -static_cast<std::int64_t>(size) : i % 4 == 1 ? 0 : 4099;
        const std::uint64_t num_fragments = 1 + i % 6;
        plan.add({(i + 1) << 24, destination, source_stride, static_cast<std::int64_t>(size) + padding, size,
                  num_fragments, 0, 0});
        destination += num_fragments * (size + static_cast<std::uint64_t>(padding)) + i % 2;
      }
      expect_same_as_a_loop_over_bytes(plan, num_warps);
    }
  }
}

void check_that_aligned_pages_move_in_wide_words() {
  Plan plan{{}, 0, 16384};
  plan.add({1 << 20, 1 << 24, 65536, 32768, 32768, 8, 0, 0});
  expect(play(plan, 64).accesses == 8 * 32768 / 16, "aligned pages move 16 bytes at a time");
}

void check_that_tiles_are_dealt_out_evenly() {
  Plan plan{{}, 0, 4096};
  plan.add({1 << 20, 1 << 24, 4096, 4096, 4096, 1001, 0, 0});
  std::uint64_t fewest = ~std::uint64_t{0}, most = 0;
  for (std::uint32_t warp = 0; warp < 64; ++warp) {
    Journal journal;
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
      copy_fragments(plan.runs.data(), 1, plan.num_tiles, plan.tile_bytes, warp, 64, lane, journal);
    }
    const std::uint64_t tiles = journal.written.size() / 4096;
    fewest = tiles < fewest ? tiles : fewest;
    most = tiles > most ? tiles : most;
  }
  expect(most - fewest == 1, "the numbers of tiles of two warps differ by at most one", most - fewest);
}

void check_find_run_against_a_walk() {
  std::vector<FragmentRun> runs;
  std::uint64_t tiles = 0;
  for (std::uint64_t i = 0; i < 100; ++i) {
    runs.push_back({0, 0, 0, 0, 1, 1 + i % 5, tiles, 1});
    tiles += 1 + i % 5;
  }
  for (std::uint32_t count = 1; count <= runs.size(); ++count) {
    std::uint32_t walked = 0;
    const std::uint64_t end = runs[count - 1].first_tile + runs[count - 1].num_fragments;
    for (std::uint64_t tile = 0; tile < end; ++tile) {
      while (walked + 1 < count && runs[walked + 1].first_tile <= tile) ++walked;
      for (const std::uint32_t low : {0U, walked / 2, walked}) {
        expect(find_run(runs.data(), low, count, tile) == walked, "the row of a tile is found", tile);
      }
    }
  }
}

void check_the_largest_plan_does_not_overflow() {
  // 2^31 fragments of 2 MiB in tiles of 2 MiB, more than any memory: the last fragment has the right address.
  const FragmentRun run{1, 2, std::int64_t{1} << 21, std::int64_t{1} << 22, 1 << 21, std::uint64_t{1} << 31, 0, 1};
  const std::uint64_t last = (std::uint64_t{1} << 31) - 1;
  const Tile tile = tile_at(run, last, 1 << 21);
  expect(tile.source == 1 + (last << 21) && tile.destination == 2 + (last << 22), "64-bit offsets");
}

}  // namespace

int main() {
  check_every_alignment_and_size();
  check_sizes_around_whole_warps();
  check_strides_and_many_runs();
  check_that_aligned_pages_move_in_wide_words();
  check_that_tiles_are_dealt_out_evenly();
  check_find_run_against_a_walk();
  check_the_largest_plan_does_not_overflow();
}
