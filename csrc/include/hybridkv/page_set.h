// Pages of a paged KV cache, as tables for a gather or a scatter.
//
// A gather moves many pages into one contiguous buffer, a scatter moves them back. Both are described by a table of
// page sets and one table of block ids, so that a transfer of any number of blocks, layers and groups is two arrays and
// one call (or one launch). The structs have a fixed layout: Python fills them, C++ and device code read them.
// This header copies nothing.
#ifndef HYBRIDKV_PAGE_SET_H_
#define HYBRIDKV_PAGE_SET_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hybridkv/copy_run.h"

namespace hybridkv {

// One page of each of `num_pages` blocks, taken from one region of memory.
//
// Page i belongs to block `ids[first_id + i]`. Its address is `base + block * stride_bytes`, and in the buffer
// `buffer_offset + i * page_bytes`: pages are adjacent there, without padding. Sets may overlap in the paged
// memory when they are gathered, and must not when they are scattered; in the buffer they never overlap.
struct PageSet {
  std::uint64_t base;           // address of block 0's page
  std::uint64_t stride_bytes;   // from one block's page to the next block's
  std::uint64_t page_bytes;     // without padding; at most stride_bytes
  std::uint64_t buffer_offset;  // of the set's first page
  std::uint32_t first_id;       // index into the table of block ids
  std::uint32_t num_pages;
};

static_assert(std::is_trivially_copyable_v<PageSet> && std::is_standard_layout_v<PageSet>);
static_assert(sizeof(PageSet) == 40 && alignof(PageSet) == 8);
static_assert(offsetof(PageSet, base) == 0);
static_assert(offsetof(PageSet, stride_bytes) == 8);
static_assert(offsetof(PageSet, page_bytes) == 16);
static_assert(offsetof(PageSet, buffer_offset) == 24);
static_assert(offsetof(PageSet, first_id) == 32);
static_assert(offsetof(PageSet, num_pages) == 36);

// Element of the table of block ids.
using BlockId = std::int64_t;

// Address of page `page` of the set in the paged memory.
constexpr std::uint64_t page_address(const PageSet& set, const BlockId* ids, std::uint64_t page) {
  return set.base + static_cast<std::uint64_t>(ids[set.first_id + page]) * set.stride_bytes;
}

// Address of page `page` of the set in the buffer at address `buffer`.
constexpr std::uint64_t buffer_address(const PageSet& set, std::uint64_t buffer,
                                                            std::uint64_t page) {
  return buffer + set.buffer_offset + page * set.page_bytes;
}

// A gather reads pages and writes the buffer; a scatter reads the buffer and writes pages.
enum class Direction : std::uint32_t { kGather = 0, kScatter = 1 };

// Run of one page.
constexpr CopyRun page_run(const PageSet& set, const BlockId* ids, std::uint64_t buffer,
                                                Direction direction, std::uint64_t page) {
  const std::uint64_t paged = page_address(set, ids, page);
  const std::uint64_t packed = buffer_address(set, buffer, page);
  return direction == Direction::kGather ? CopyRun{paged, packed, set.page_bytes}
                                         : CopyRun{packed, paged, set.page_bytes};
}

}  // namespace hybridkv

#endif  // HYBRIDKV_PAGE_SET_H_
