// Checksums of records from pieces that finish out of order.
//
// A record is a sequence of runs with one digest. Whole blocks are summed in place, four at a time; a block in several
// runs is first copied together. Sums wait in a ring until all earlier ones are finished, and are folded in order.
#ifndef HYBRIDKV_CPU_SUMMER_H_
#define HYBRIDKV_CPU_SUMMER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "csrc/cpu/kernels.h"
#include "hybridkv/xxh3.h"

namespace hybridkv::cpu {

// Limit for the blocks of one piece. A larger limit needs fewer folds; a smaller one stays in the first-level cache.
inline constexpr std::size_t kMaxPieceBlocks = 64;

// Limit for unfolded pieces: one for each lane, and finished ones that wait for an earlier piece.
inline constexpr std::size_t kRingEntries = 16;

// Bytes of a record's end that its digest needs: the last block, which is not folded like the others, and the stripe
// before it, because the last 64 bytes count twice. A full last block needs only the last 64 bytes: it is summed like
// the others, and then one stripe is replaced.
inline constexpr std::size_t kEndBytes = xxh3::kBlockBytes + xxh3::kStripeBytes;

// Split of a record into body and end.
struct RecordShape {
  std::uint64_t num_bytes;
  std::uint64_t body_bytes;  // whole blocks, summed in pieces
  std::uint64_t end_start;   // offset of the end, which overlaps the body
  bool body_has_last;        // the last block is full, and in the body

  explicit RecordShape(std::uint64_t size);
  std::size_t end_bytes() const { return num_bytes - end_start; }
};

class Summer {
 public:
  explicit Summer(const Kernels& kernels) : kernels_(kernels), entries_(kRingEntries) { reset(); }

  // True if a lane must finish before the next entry.
  bool is_full() const { return num_entries_ == kRingEntries; }

  // Takes the next entry, for a piece of `num_blocks` blocks. The caller writes its sums to `sums(entry)`. `has_last`:
  // the piece ends with the last block of its record.
  std::size_t begin_blocks(std::size_t num_blocks, bool has_last);
  Word* sums(std::size_t entry) { return entries_[entry].sums.data(); }

  // Takes the next entry, for a record's end. `end` must stay readable until the entry is folded; if it is null, the
  // caller has filled `end_buffer()`.
  void end_record(const RecordShape& shape, const Byte* end, Digest128* digest);

  // Buffer for the next record's end. Not while the ring is full.
  Byte* end_buffer() { return entries_[(first_ + num_entries_) % kRingEntries].end_bytes.data(); }

  // Marks the entry's sums as complete, and folds all entries that are next in order.
  void finish(std::size_t entry);

 private:
  struct Entry {
    bool is_finished;
    bool has_last;
    std::size_t num_blocks;
    RecordShape shape{0};
    const Byte* end;
    Digest128* digest;  // null for blocks
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
