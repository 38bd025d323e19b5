// Lowering of chunk copies to rows of runs: finds each page of a job in the engine's memory and in a slot. Its time
// depends on the number of blocks, and on that of pages only where pages of a block do not lie in equal steps.
//
// A job is a table of a few arrays that Python fills, so a lowering needs no object per chunk and no interpreter.
// tests/kits/plain_lowering.py is a model that lowers one chunk at a time; tests compare both. It copies nothing and
// accesses no memory.
#ifndef HYBRIDKV_CPU_LOWERING_H_
#define HYBRIDKV_CPU_LOWERING_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <shared_mutex>
#include <span>
#include <tuple>
#include <type_traits>
#include <vector>

#include "hybridkv/copy_run.h"

namespace hybridkv::cpu {

// One page of each block of a group, and its place in a block of a stored chunk.
struct PageColumn {
  std::int64_t address;       // of block 0's page
  std::int64_t stride_bytes;  // from one block's page to the next block's
  std::int64_t page_bytes;    // of content
  std::int64_t offset;        // in the chunk's block
};

// Consecutive columns of equal page_bytes and stride_bytes, in equal steps in the engine's memory and in a chunk.
struct ColumnRow {
  std::size_t first;
  std::size_t count;
  std::int64_t address_step;
  std::int64_t offset_step;
};

// All pages of a group, or those of some tokens of each block. The rest of a chunk's block is zeros.
struct BlockPages {
  std::vector<PageColumn> columns;  // offsets ascend
  std::int64_t block_bytes;         // in a stored chunk
  std::int64_t num_blocks;          // of the engine's pool
  std::vector<ColumnRow> rows = {};  // of all columns; set by `Lowering`
};

// Consecutive copies that differ only in blocks and slots.
struct CopyShape {
  std::int32_t num_copies;
  std::int32_t group_index;
  std::int32_t first_block;    // index of the first copied block in the chunk
  std::int32_t num_blocks;     // number of copied blocks
  std::int32_t stored_blocks;  // number of blocks of the chunk
  std::int32_t lead_tokens;    // tokens missing at the start of the first stored block
  std::int32_t trail_tokens;   // tokens missing at the end of the last stored block
  std::int32_t num_local;      // blocks of the engine that replace the slot as source
  std::int32_t num_extents;    // number of extents of the slot
  std::int32_t key_bytes;      // length of the chunk's key; unused here
};

static_assert(std::is_trivially_copyable_v<CopyShape> && sizeof(CopyShape) == 40);

struct SlotExtent {
  std::int64_t offset;  // in the arena
  std::int64_t num_bytes;
};

static_assert(std::is_trivially_copyable_v<SlotExtent> && sizeof(SlotExtent) == 16);

// Copies of a job: shapes, and the joined blocks and extents of all copies.
struct CopyTable {
  std::span<const CopyShape> shapes;
  std::span<const std::int32_t> block_ids;
  std::span<const std::int32_t> local_ids;
  std::span<const SlotExtent> extents;
};

// Addresses [begin, end) that contain all runs of one side. Empty without runs.
struct Span {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// Runs of a job in rows. Runs that are adjacent on both sides are one run.
struct LoweredRuns {
  std::vector<CopyRow> rows;
  std::int64_t num_runs = 0;
  std::int64_t total_bytes = 0;
  Span sources;
  Span destinations;
  std::vector<std::int64_t> ends;  // stores: for each copy, the number of runs up to its end
  std::int64_t zero_bytes = 0;     // stores: bytes outside of pages
};

// Writes the runs of the rows to arrays of as many elements as there are runs.
void expand(std::span<const CopyRow> rows, std::int64_t* sources, std::int64_t* destinations, std::int64_t* num_bytes);

// Addresses of a rank's pages and its arena. One thread may lower while another adds pages.
class Lowering {
 public:
  // `zeros`: memory that is always zero, the source of bytes outside of pages.
  Lowering(std::int64_t arena_address, std::int64_t arena_bytes, std::int64_t zeros_address, std::int64_t zeros_bytes);
  Lowering(const Lowering&) = delete;
  Lowering& operator=(const Lowering&) = delete;

  // Adds pages of whole blocks. With `block_tokens` above 0 chunks may cut the group's blocks; otherwise leads and
  // trails are ignored. Throws std::invalid_argument for pages that overlap in a chunk's block or exceed it, and for
  // impossible addresses or sizes.
  void add_group(std::int32_t group_index, std::int64_t block_tokens, BlockPages pages);
  // Adds the pages of tokens [start, end) of each block, for a group that chunks may cut.
  void add_part(std::int32_t group_index, std::int64_t start, std::int64_t end, BlockPages pages);

  // Runs that write each page of the copies once: first those from the arena, in order, then those from the engine's
  // own blocks. Adjacent runs are joined.
  //
  // Throws std::invalid_argument for a block outside the pool, a slot that is too small or outside the arena, blocks
  // outside the chunk, a part that was not added, and arrays that do not match the shapes.
  LoweredRuns load(const CopyTable& table) const;
  // Runs that write each byte of each slot once and in order: pages, zeros between them, and zeros after the chunk.
  // Adjacent runs of a slot are joined. Also throws if a copy lacks blocks of its chunk.
  LoweredRuns store(const CopyTable& table) const;

 private:
  struct Piece {
    const BlockPages* pages;
    std::int64_t first;  // index in the chunk's blocks
    std::int64_t count;
  };
  struct Group {
    std::int64_t block_tokens;
    BlockPages pages;
  };
  class Emitter;

  const BlockPages& part(std::int32_t group_index, const Group& group, std::int64_t start, std::int64_t end) const;
  std::size_t pieces(const CopyShape& shape, const Group& group, Piece (&out)[3]) const;
  void copy_chunk(const CopyShape& shape, const Group& group, const std::int32_t* ids, Emitter& out) const;
  void copy_local(const CopyShape& shape, const Group& group, const std::int32_t* ids, const std::int32_t* local_ids,
                  Emitter& out) const;
  LoweredRuns lower(const CopyTable& table, bool is_store) const;

  std::int64_t arena_address_;
  std::int64_t arena_bytes_;
  std::int64_t zeros_address_;
  std::int64_t zeros_bytes_;
  mutable std::shared_mutex changes_;
  std::map<std::int32_t, Group> groups_;
  std::map<std::tuple<std::int32_t, std::int64_t, std::int64_t>, BlockPages> parts_;
};

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_LOWERING_H_
