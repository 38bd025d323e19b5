// Splits records into whole blocks for the lanes, and the rest. Private to copy.cc.
#ifndef HYBRIDKV_CPU_RECORDER_H_
#define HYBRIDKV_CPU_RECORDER_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "csrc/cpu/kernels.h"
#include "csrc/cpu/lanes.h"
#include "csrc/cpu/share.h"
#include "csrc/cpu/summer.h"
#include "hybridkv/copy_run.h"

namespace hybridkv::cpu {

// Computes the checksums of one thread's records, and copies them if `copies` is true. Call `record` once for each, in
// order.
class Recorder {
 public:
  Recorder(const Kernels& kernels, Stores stores, bool copies)
      : kernels_(kernels), stores_(stores), copies_(copies), summer_(kernels), lanes_(Advance{this}, Finish{this}) {}

  void record(const RunSource& runs, std::size_t first, std::size_t last, Digest128* digest) {
    std::uint64_t num_bytes = 0;
    const Share share = whole(first, last);
    for_each_run(runs, share, [&](const CopyRun& run) { num_bytes += run.num_bytes; });
    shape_ = RecordShape(num_bytes);
    position_ = 0;
    end_in_run_ = nullptr;
    for_each_run(runs, share, [&](const CopyRun& run) { add(run); });
    make_room();
    if (end_in_run_ == nullptr) std::memcpy(summer_.end_buffer(), end_.data(), shape_.end_bytes());
    summer_.end_record(shape_, end_in_run_, digest);
  }

  void finish() {
    lanes_.drain();
    kernels_.fence();
  }

 private:
  struct Advance {
    Recorder* self;
    void operator()(Lane* lanes, std::size_t num_lanes, std::size_t num_blocks) const {
      self->advance(lanes, num_lanes, num_blocks);
    }
  };
  struct Finish {
    Recorder* self;
    void operator()(std::size_t entry) const { self->summer_.finish(entry); }
  };

  void advance(Lane* lanes, std::size_t num_lanes, std::size_t num_blocks) {
    if (!copies_) {
      kernels_.sum(lanes, num_lanes, num_blocks);
      return;
    }
    const bool are_aligned =
        std::all_of(lanes, lanes + num_lanes, [](const Lane& lane) { return is_line_aligned(lane.destination); });
    kernels_.copy_and_sum(lanes, num_lanes, num_blocks, are_aligned ? stores_ : Stores::kCached);
  }

  // Adds a run, which has the record's bytes from `position_` on: the rest of a block that the last run began, whole
  // blocks, the start of a block that the next run completes, and bytes of the record's last block.
  void add(const CopyRun& run) {
    const Byte* source = bytes_at(run.source);
    Byte* destination = copies_ ? writable_at(run.destination) : nullptr;
    std::uint64_t left = run.num_bytes;
    const auto skip = [&](std::size_t num_bytes) {
      source += num_bytes;
      if (copies_) destination += num_bytes;
      position_ += num_bytes;
      left -= num_bytes;
    };
    keep_end(source, left);
    while (left > 0) {
      const std::size_t in_block = position_ % xxh3::kBlockBytes;
      if (position_ < shape_.body_bytes && in_block == 0 && left >= xxh3::kBlockBytes) {
        const std::uint64_t num_blocks = std::min(left, shape_.body_bytes - position_) / xxh3::kBlockBytes;
        add_blocks(source, destination, num_blocks);
        skip(num_blocks * xxh3::kBlockBytes);
        continue;
      }
      const std::size_t part = std::min<std::uint64_t>(left, xxh3::kBlockBytes - in_block);
      copy_part(source, destination, part);
      if (position_ < shape_.body_bytes) {
        std::memcpy(split_block_.data() + in_block, source, part);
        if (in_block + part == xxh3::kBlockBytes) add_split_block(part);
      }
      skip(part);
    }
  }

  void add_blocks(const Byte* source, Byte* destination, std::uint64_t num_blocks) {
    for (std::uint64_t done = 0; done < num_blocks; done += kMaxPieceBlocks) {
      const std::size_t piece = std::min<std::uint64_t>(kMaxPieceBlocks, num_blocks - done);
      const std::size_t offset = done * xxh3::kBlockBytes;
      make_room();
      const std::size_t entry = summer_.begin_blocks(piece, is_last(position_ + offset + piece * xxh3::kBlockBytes));
      lanes_.add({source + offset, copies_ ? destination + offset : nullptr, summer_.sums(entry)}, piece, entry);
    }
  }

  // Adds the block that ends `part` bytes after the position.
  void add_split_block(std::size_t part) {
    make_room();
    const std::size_t entry = summer_.begin_blocks(1, is_last(position_ + part));
    Lane lane{split_block_.data(), nullptr, summer_.sums(entry)};
    kernels_.sum(&lane, 1, 1);
    summer_.finish(entry);
  }

  bool is_last(std::uint64_t end) const { return shape_.body_has_last && end == shape_.num_bytes; }

  void copy_part(const Byte* source, Byte* destination, std::size_t num_bytes) {
    if (!copies_) return;
    if (stores_ == Stores::kStreaming && is_line_aligned(destination) && num_bytes % kCopyStepBytes == 0) {
      Lane lane{source, destination, nullptr};
      kernels_.copy(&lane, 1, num_bytes, Stores::kStreaming);
      return;
    }
    std::memcpy(destination, source, num_bytes);
  }

  // Keeps the run's part of the record's end: a pointer, if the run has all of the end; otherwise a copy.
  void keep_end(const Byte* source, std::uint64_t num_bytes) {
    if (num_bytes == 0 || position_ + num_bytes <= shape_.end_start) return;
    if (position_ <= shape_.end_start && position_ + num_bytes == shape_.num_bytes) {
      end_in_run_ = source + (shape_.end_start - position_);
      return;
    }
    const std::uint64_t skipped = position_ < shape_.end_start ? shape_.end_start - position_ : 0;
    std::memcpy(end_.data() + (position_ + skipped - shape_.end_start), source + skipped, num_bytes - skipped);
  }

  void make_room() {
    if (summer_.is_full()) lanes_.drain();
  }

  const Kernels& kernels_;
  const Stores stores_;
  const bool copies_;
  Summer summer_;
  Lanes<Advance, Finish> lanes_;
  RecordShape shape_{0};
  std::uint64_t position_ = 0;  // offset of the next byte in the record
  std::array<Byte, xxh3::kBlockBytes> split_block_;
  const Byte* end_in_run_ = nullptr;  // the record's end, if one run has all of it
  std::array<Byte, kEndBytes> end_;
};

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_RECORDER_H_
