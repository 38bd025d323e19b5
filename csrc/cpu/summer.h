// Checksums of records whose bytes come in pieces, out of order.
//
// A record is a sequence of runs with one digest. Its whole blocks are summed wherever they lie, four at a time; a
// block that is split between two runs is put together first. Sums wait in a ring until all that comes before them is
// there, and are folded in order.
#ifndef HYBRIDKV_CPU_SUMMER_H_
#define HYBRIDKV_CPU_SUMMER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "csrc/cpu/kernels.h"
#include "hybridkv/xxh3.h"

namespace hybridkv::cpu {

// The most blocks that one piece has. More of them fold more rarely, fewer stay in the first-level cache.
inline constexpr std::size_t kMaxPieceBlocks = 64;

// One entry for each piece on its way: as many as there are lanes, and as many again that may finish before them.
inline constexpr std::size_t kRingEntries = 16;

// What is needed of a record when its digest is made: its last block, which is not folded like the others, and the
// stripe before it, since the last 64 bytes count once more. Of a last block that is full only the last 64 bytes are
// needed: it is summed like the others, and then one stripe is exchanged.
inline constexpr std::size_t kEndBytes = xxh3::kBlockBytes + xxh3::kStripeBytes;

// How a record is taken apart.
struct RecordShape {
  std::uint64_t num_bytes;
  std::uint64_t body_bytes;  // whole blocks that are summed
  std::uint64_t end_start;   // where the end begins; it overlaps the body
  bool body_has_last;        // the last block is full, and in the body

  explicit RecordShape(std::uint64_t size);
  std::size_t end_bytes() const { return num_bytes - end_start; }
};

class Summer {
 public:
  explicit Summer(const Kernels& kernels) : kernels_(kernels), entries_(kRingEntries) { reset(); }

  // Every entry is taken: some lane must finish first.
  bool is_full() const { return num_entries_ == kRingEntries; }

  // Takes the next entry, for a piece of `num_blocks` blocks. Its sums belong at `sums(entry)`. `has_last`: the piece
  // ends with the last block of its record.
  std::size_t begin_blocks(std::size_t num_blocks, bool has_last);
  Word* sums(std::size_t entry) { return entries_[entry].sums.data(); }

  // Takes the next entry, for a record's end. `end` stays readable until it is retired; without one, the caller filled
  // `end_buffer()` before.
  void end_record(const RecordShape& shape, const Byte* end, Digest128* digest);

  // Where the next record's end is put together. Not while the ring is full.
  Byte* end_buffer() { return entries_[(first_ + num_entries_) % kRingEntries].end_bytes.data(); }

  // The entry's sums are there. Folds what can be folded.
  void finish(std::size_t entry);

 private:
  struct Entry {
    bool is_finished;
    bool has_last;
    std::size_t num_blocks;
    RecordShape shape{0};
    const Byte* end;
    Digest128* digest;  // null: blocks, not an end
    alignas(kLineBytes) std::array<Word, kMaxPieceBlocks * xxh3::kLanes> sums;
    std::array<Byte, kEndBytes> end_bytes;
  };

  std::size_t take();
  void reset();
  void retire(const Entry& entry);
  void retire_blocks(const Entry& entry);
  Digest128 digest_of(const Entry& entry);

  const Kernels& kernels_;
  alignas(kLineBytes) std::array<Word, xxh3::kLanes> accumulators_;
  std::vector<Entry> entries_;
  std::size_t first_ = 0;
  std::size_t num_entries_ = 0;
};

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_SUMMER_H_
