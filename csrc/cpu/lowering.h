// From copies of chunks to runs of bytes: where each page of a job lies in the engine's memory, and where in a slot.
//
// A job is a table of a few arrays that Python fills, so that lowering one needs no object for each chunk and no
// interpreter. tests/kits/plain_lowering.py does the same one chunk at a time; the tests compare the two. No copy is done here and no memory is touched.
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

namespace hybridkv::cpu {

// One page of every block of a group, and its place in a block of a stored chunk.
struct PageColumn {
  std::int64_t address;       // of block 0's page
  std::int64_t stride_bytes;  // from one block's page to the next block's
  std::int64_t page_bytes;    // of content
  std::int64_t offset;        // in the chunk's block
};

// All pages of a group, or of some tokens of each of its blocks. What they leave of a chunk's block is zeros.
struct BlockPages {
  std::vector<PageColumn> columns;  // offsets ascend
  std::int64_t block_bytes;         // in a stored chunk
  std::int64_t num_blocks;          // of the engine's pool
};

// Copies in a row that are alike but for their blocks and slots.
struct CopyShape {
  std::int32_t num_copies;
  std::int32_t group_index;
  std::int32_t first_block;    // where the blocks begin within the chunk's
  std::int32_t num_blocks;     // that are copied
  std::int32_t stored_blocks;  // of the chunk
  std::int32_t lead_tokens;    // at the beginning of the first stored block that the chunk does not have
  std::int32_t trail_tokens;   // at the end of the last one
  std::int32_t num_local;      // other blocks of the engine that are copied from instead of the slot
  std::int32_t num_extents;    // of the slot
  std::int32_t key_bytes;      // of the chunk's key, which nobody reads here
};

static_assert(std::is_trivially_copyable_v<CopyShape> && sizeof(CopyShape) == 40);

struct SlotExtent {
  std::int64_t offset;  // in the arena
  std::int64_t num_bytes;
};

static_assert(std::is_trivially_copyable_v<SlotExtent> && sizeof(SlotExtent) == 16);

// The copies of a job: shapes, and one behind the other what differs.
struct CopyTable {
  std::span<const CopyShape> shapes;
  std::span<const std::int32_t> block_ids;
  std::span<const std::int32_t> local_ids;
  std::span<const SlotExtent> extents;
};

// What a job copies, as arrays of one length.
struct LoweredRuns {
  std::vector<std::int64_t> sources;
  std::vector<std::int64_t> destinations;
  std::vector<std::int64_t> num_bytes;
  std::vector<std::int64_t> ends;  // of a store's copies, counted in runs
  std::int64_t zero_bytes = 0;     // of a store that are no page's
};

// Where a rank's pages and its arena lie. Any thread may lower while another adds pages.
class Lowering {
 public:
  // `zeros` is memory that is zero and stays so, from which what is no page's is copied.
  Lowering(std::int64_t arena_address, std::int64_t arena_bytes, std::int64_t zeros_address, std::int64_t zeros_bytes);
  Lowering(const Lowering&) = delete;
  Lowering& operator=(const Lowering&) = delete;

  // Pages of whole blocks. With `block_tokens` above 0 chunks may cut the group's blocks; else leads and trails are
  // not looked at. std::invalid_argument for pages that lie over each other in a chunk's block, or beyond it, and for
  // numbers that no memory has.
  void add_group(std::int32_t group_index, std::int64_t block_tokens, BlockPages pages);
  // Pages of tokens [start, end) of every block of such a group.
  void add_part(std::int32_t group_index, std::int64_t start, std::int64_t end, BlockPages pages);

  // Runs that write every page of the copies once: first those that come from the arena, in order, then those that
  // come from the engine's own blocks. No two could be joined.
  //
  // std::invalid_argument for a block outside of the pool, a slot that is too small or not in the arena, blocks that
  // are not the chunk's, a part that was not added, and arrays that do not fit the shapes.
  LoweredRuns load(const CopyTable& table) const;
  // Runs that write every byte of each slot once and in order: pages, zeros between them, and zeros behind the chunk.
  // No two of one slot could be joined. Also refused: a chunk that is not stored as a whole.
  LoweredRuns store(const CopyTable& table) const;

 private:
  struct Piece {
    const BlockPages* pages;
    std::int64_t first;  // of the chunk's blocks
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
