// Index arithmetic of the copy kernel: the bytes that each lane of a warp copies.
//
// All of it also runs on the host, so that the CPU can simulate the kernel warp by warp and lane by
// lane (simulation.cc). Needs no CUDA headers. It allocates nothing and checks no address: job.cc
// has checked the table.
#ifndef HYBRIDKV_CUDA_FRAGMENTS_H_
#define HYBRIDKV_CUDA_FRAGMENTS_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

// Marks functions for the host and for a device, so that g++ and nvcc compile one source.
#if defined(__CUDACC__)
#define HYBRIDKV_HOST_DEVICE __host__ __device__
#else
#define HYBRIDKV_HOST_DEVICE
#endif

namespace hybridkv::cuda {

inline constexpr std::uint32_t kLanes = 32;

// Bytes of the widest access of a lane, and the number of such accesses that it has in flight.
inline constexpr std::uint32_t kWidestWord = 16;
inline constexpr std::uint32_t kWordsInFlight = 4;

// `num_fragments` copies of `fragment_bytes` each, from `source`, `source + source_stride`, ... to
// `destination`, `destination + destination_stride`, ...
//
// A row of the kernel's table, which job.cc fills: eight 64-bit words. The kernel cuts a fragment into
// tiles; `first_tile` is the number of tiles of all earlier rows.
struct FragmentRun {
  std::uint64_t source;
  std::uint64_t destination;
  std::int64_t source_stride;
  std::int64_t destination_stride;
  std::uint64_t fragment_bytes;
  std::uint64_t num_fragments;
  std::uint64_t first_tile;
  std::uint64_t tiles_per_fragment;
};

static_assert(std::is_trivially_copyable_v<FragmentRun> && std::is_standard_layout_v<FragmentRun>);
static_assert(sizeof(FragmentRun) == 64 && alignof(FragmentRun) == 8);
static_assert(offsetof(FragmentRun, source) == 0 && offsetof(FragmentRun, destination) == 8);
static_assert(offsetof(FragmentRun, source_stride) == 16 && offsetof(FragmentRun, destination_stride) == 24);
static_assert(offsetof(FragmentRun, fragment_bytes) == 32 && offsetof(FragmentRun, num_fragments) == 40);
static_assert(offsetof(FragmentRun, first_tile) == 48 && offsetof(FragmentRun, tiles_per_fragment) == 56);

// A piece of one fragment, which one warp copies at a time.
struct Tile {
  std::uint64_t source;
  std::uint64_t destination;
  std::uint64_t num_bytes;
};

// Parts of a tile: bytes before the first aligned word, whole words, and the remaining bytes.
struct WordSplit {
  std::uint32_t head_bytes;
  std::uint32_t tail_bytes;
  std::uint64_t num_words;
};

// The row of `tile`: the last row that begins at or before it. It is in [low, num_runs), because the
// tiles of a warp ascend and `low` is the row of its previous tile. Each row has at least one tile.
HYBRIDKV_HOST_DEVICE constexpr std::uint32_t find_run(const FragmentRun* runs, std::uint32_t low,
                                                      std::uint32_t num_runs, std::uint64_t tile) {
  std::uint32_t high = num_runs;
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    if (runs[middle].first_tile <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

HYBRIDKV_HOST_DEVICE constexpr Tile tile_at(const FragmentRun& run, std::uint64_t tile, std::uint64_t tile_bytes) {
  // A plan has fewer than 2^32 tiles (launch_copy refuses more), and 32-bit division is cheap.
  const auto nth = static_cast<std::uint32_t>(tile - run.first_tile);
  const auto per_fragment = static_cast<std::uint32_t>(run.tiles_per_fragment);
  const std::uint32_t fragment = nth / per_fragment;
  const std::uint64_t offset = (nth - fragment * per_fragment) * tile_bytes;
  const std::uint64_t left = run.fragment_bytes - offset;
  return {run.source + static_cast<std::uint64_t>(fragment * run.source_stride) + offset,
          run.destination + static_cast<std::uint64_t>(fragment * run.destination_stride) + offset,
          left < tile_bytes ? left : tile_bytes};
}

// The widest power of two up to 16 at which source and destination can be aligned together.
HYBRIDKV_HOST_DEVICE constexpr std::uint32_t common_word_bytes(std::uint64_t source, std::uint64_t destination) {
  const auto apart = static_cast<std::uint32_t>((source ^ destination) & (kWidestWord - 1)) | kWidestWord;
  return apart & (~apart + 1);
}

// Source and destination must agree modulo `word_bytes`.
HYBRIDKV_HOST_DEVICE constexpr WordSplit split_words(const Tile& tile, std::uint32_t word_bytes) {
  const std::uint64_t to_boundary = (~tile.source + 1) & (word_bytes - 1);
  const std::uint64_t head = to_boundary < tile.num_bytes ? to_boundary : tile.num_bytes;
  const std::uint64_t rest = tile.num_bytes - head;
  return {static_cast<std::uint32_t>(head), static_cast<std::uint32_t>(rest & (word_bytes - 1)), rest / word_bytes};
}

// One lane's part of a tile. `Memory` moves the bytes: `copy<width>(source, destination)` one word,
// `copy_many<width>(source, destination)` kWordsInFlight words that are `kLanes` words apart.
template <std::uint32_t kWidth, class Memory>
HYBRIDKV_HOST_DEVICE void copy_words(const Tile& tile, std::uint32_t lane, Memory& memory) {
  static_assert(kWidestWord <= kLanes, "a head or tail has at most one byte for each lane");
  const WordSplit split = split_words(tile, kWidth);
  if (lane < split.head_bytes) memory.template copy<1>(tile.source + lane, tile.destination + lane);

  const std::uint64_t source = tile.source + split.head_bytes;
  const std::uint64_t destination = tile.destination + split.head_bytes;
  std::uint64_t word = lane;
  for (; word + (kWordsInFlight - 1) * kLanes < split.num_words; word += kWordsInFlight * kLanes) {
    memory.template copy_many<kWidth>(source + word * kWidth, destination + word * kWidth);
  }
  for (; word < split.num_words; word += kLanes) {
    memory.template copy<kWidth>(source + word * kWidth, destination + word * kWidth);
  }

  const std::uint64_t tail = split.num_words * kWidth + lane;
  if (lane < split.tail_bytes) memory.template copy<1>(source + tail, destination + tail);
}

template <class Memory>
HYBRIDKV_HOST_DEVICE void copy_tile(const Tile& tile, std::uint32_t lane, Memory& memory) {
  switch (common_word_bytes(tile.source, tile.destination)) {
    case 16: return copy_words<16>(tile, lane, memory);
    case 8: return copy_words<8>(tile, lane, memory);
    case 4: return copy_words<4>(tile, lane, memory);
    case 2: return copy_words<2>(tile, lane, memory);
    default: return copy_words<1>(tile, lane, memory);
  }
}

// One lane's part of a whole plan. Warps take tiles in turn, so that neighbouring warps copy
// neighbouring bytes and the numbers of tiles of two warps differ by at most one.
template <class Memory>
HYBRIDKV_HOST_DEVICE void copy_fragments(const FragmentRun* runs, std::uint32_t num_runs, std::uint64_t num_tiles,
                                         std::uint64_t tile_bytes, std::uint32_t warp, std::uint32_t num_warps,
                                         std::uint32_t lane, Memory& memory) {
  std::uint32_t run = 0;
  for (std::uint64_t tile = warp; tile < num_tiles; tile += num_warps) {
    run = find_run(runs, run, num_runs, tile);
    copy_tile(tile_at(runs[run], tile, tile_bytes), lane, memory);
  }
}

}  // namespace hybridkv::cuda

#endif  // HYBRIDKV_CUDA_FRAGMENTS_H_
