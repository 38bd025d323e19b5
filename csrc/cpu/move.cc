#include "csrc/cpu/move.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "csrc/cpu/kernels.h"
#include "csrc/cpu/lanes.h"
#include "csrc/cpu/summer.h"

namespace hybridkv::cpu {
namespace {

// Runs are read from their source this many at a time, onto the stack.
constexpr std::size_t kRunsAtOnce = 256;

// Longer runs are cut, so that a few long runs keep every lane busy too.
constexpr std::size_t kMaxPieceBytes = kMaxPieceBlocks * xxh3::kBlockBytes;

// Shorter runs are not worth a lane.
constexpr std::size_t kMinStreamedRunBytes = 1024;

const Byte* bytes_at(std::uint64_t address) { return reinterpret_cast<const Byte*>(address); }
Byte* writable_at(std::uint64_t address) { return reinterpret_cast<Byte*>(address); }

bool is_line_aligned(const Byte* address) { return reinterpret_cast<std::uintptr_t>(address) % kLineBytes == 0; }

// A share of the runs: from byte `skip` of run `first` to before byte `take` of run `last - 1`.
struct Share {
  std::size_t first;
  std::size_t skip;
  std::size_t last;
  std::size_t take;
};

// Calls `visit(run)` for each run of the share, cut to it.
template <typename Visit>
void for_each_run(const RunSource& runs, const Share& share, Visit visit) {
  std::array<CopyRun, kRunsAtOnce> batch;
  for (std::size_t first = share.first; first < share.last; first += kRunsAtOnce) {
    const std::size_t count = std::min(kRunsAtOnce, share.last - first);
    runs.read(first, count, batch.data());
    if (first + count == share.last) batch[count - 1].num_bytes = std::min(batch[count - 1].num_bytes, share.take);
    if (first == share.first) {
      batch[0] = {batch[0].source + share.skip, batch[0].destination + share.skip, batch[0].num_bytes - share.skip};
    }
    for (std::size_t run = 0; run < count; ++run) visit(batch[run]);
  }
}

Share whole(std::size_t first, std::size_t last) { return {first, 0, last, SIZE_MAX}; }

std::uint64_t total_bytes(const RunSource& runs) {
  std::uint64_t total = 0;
  for_each_run(runs, whole(0, runs.size()), [&](const CopyRun& run) { total += run.num_bytes; });
  return total;
}

Stores stores_for(const MoveOptions& options, const Kernels& kernels, std::uint64_t num_bytes) {
  if (!kernels.streams || options.caching == Caching::kCached) return Stores::kCached;
  if (options.caching == Caching::kStreamed) return Stores::kStreaming;
  return num_bytes >= kStreamedBytes ? Stores::kStreaming : Stores::kCached;
}

void copy_share(const RunSource& runs, const Share& share, const Kernels& kernels, Stores stores) {
  if (stores == Stores::kCached) {
    for_each_run(runs, share, [](const CopyRun& run) {
      if (run.num_bytes > 0) std::memcpy(writable_at(run.destination), bytes_at(run.source), run.num_bytes);
    });
    return;
  }
  Lanes lanes([&](Lane* together, std::size_t num_lanes,
                  std::size_t num_bytes) { kernels.copy(together, num_lanes, num_bytes, Stores::kStreaming); },
              [](std::size_t) {});
  for_each_run(runs, share, [&](const CopyRun& run) {
    const Byte* source = bytes_at(run.source);
    Byte* destination = writable_at(run.destination);
    if (run.num_bytes < kMinStreamedRunBytes) {
      if (run.num_bytes > 0) std::memcpy(destination, source, run.num_bytes);
      return;
    }
    const std::size_t head = -run.destination % kLineBytes;
    const std::size_t body = (run.num_bytes - head) / kCopyStepBytes * kCopyStepBytes;
    std::memcpy(destination, source, head);
    std::memcpy(destination + head + body, source + head + body, run.num_bytes - head - body);
    for (std::size_t done = 0; done < body; done += kMaxPieceBytes) {
      const std::size_t piece = std::min(kMaxPieceBytes, body - done);
      lanes.add({source + head + done, destination + head + done, nullptr}, piece, 0);
    }
  });
  lanes.drain();
  kernels.fence();
}

// Copies, if told to, and sums the records of one thread. One call of `record` for each, in order.
class Recorder {
 public:
  Recorder(const Kernels& kernels, Stores stores, bool copies)
      : kernels_(kernels),
        stores_(stores),
        copies_(copies),
        summer_(kernels),
        lanes_(Advance{this}, Finish{this}) {}

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

  // The run's bytes are the record's from `position_` on: what completes a block that another run began, whole blocks,
  // the beginning of a block that another run goes on with; and all that lies in the record's last block.
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

  // The block that ends `part` bytes behind the position.
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

  // Keeps what of the run belongs to the record's end: where it lies, if the run has all of it.
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
  std::uint64_t position_ = 0;     // of the next byte in the record
  std::array<Byte, xxh3::kBlockBytes> split_block_;
  const Byte* end_in_run_ = nullptr;  // the record's end, unless several runs have it
  std::array<Byte, kEndBytes> end_;
};

// Cuts the runs into at most `num_shares` of nearly equal bytes.
std::vector<Share> shares_of(const RunSource& runs, std::uint64_t num_bytes, std::size_t num_shares) {
  std::vector<Share> shares;
  Share share = whole(0, 0);
  std::uint64_t end = 0;
  std::size_t number = 0;
  for_each_run(runs, whole(0, runs.size()), [&](const CopyRun& run) {
    const std::uint64_t start = end;
    end += run.num_bytes;
    while (shares.size() + 1 < num_shares) {
      const std::uint64_t cut = num_bytes / num_shares * (shares.size() + 1);
      if (cut > end) break;
      share.last = number + 1;
      share.take = cut - start;
      shares.push_back(share);
      share = cut < end ? Share{number, cut - start, 0, SIZE_MAX} : whole(number + 1, 0);
    }
    ++number;
  });
  share.last = runs.size();
  shares.push_back(share);
  return shares;
}

void digest_records(const RunSource& runs, const std::int64_t* record_ends, std::size_t num_records,
                    Digest128* digests, const MoveOptions& options, bool copies) {
  const Kernels& kernels = cpu::kernels(options.level);
  const std::uint64_t num_bytes = total_bytes(runs);
  const Stores stores = stores_for(options, kernels, num_bytes);
  const auto run_records = [&](std::size_t first, std::size_t last) {
    Recorder recorder(kernels, stores, copies);
    for (std::size_t record = first; record < last; ++record) {
      const std::size_t start = record == 0 ? 0 : static_cast<std::size_t>(record_ends[record - 1]);
      recorder.record(runs, start, static_cast<std::size_t>(record_ends[record]), &digests[record]);
    }
    recorder.finish();
  };
  const std::size_t num_threads = options.pool == nullptr ? 1 : options.pool->num_threads();
  const std::size_t num_parts =
      std::min({num_threads, static_cast<std::size_t>(num_bytes / kMinPartBytes), num_records});
  if (num_parts < 2) {
    run_records(0, num_records);
    return;
  }
  options.pool->run(num_parts, [&](std::size_t part) {
    run_records(num_records * part / num_parts, num_records * (part + 1) / num_parts);
  });
}

}  // namespace

void copy(const RunSource& runs, const MoveOptions& options) {
  const Kernels& kernels = cpu::kernels(options.level);
  const std::uint64_t num_bytes = total_bytes(runs);
  const Stores stores = stores_for(options, kernels, num_bytes);
  const std::size_t num_threads = options.pool == nullptr ? 1 : options.pool->num_threads();
  const std::size_t num_parts = std::min(num_threads, static_cast<std::size_t>(num_bytes / kMinPartBytes));
  if (num_parts < 2) {
    copy_share(runs, whole(0, runs.size()), kernels, stores);
    return;
  }
  const std::vector<Share> shares = shares_of(runs, num_bytes, num_parts);
  options.pool->run(shares.size(), [&](std::size_t part) { copy_share(runs, shares[part], kernels, stores); });
}

void copy_and_digest(const RunSource& runs, const std::int64_t* record_ends, std::size_t num_records,
                     Digest128* digests, const MoveOptions& options) {
  digest_records(runs, record_ends, num_records, digests, options, true);
}

void digest(const RunSource& runs, const std::int64_t* record_ends, std::size_t num_records, Digest128* digests,
            const MoveOptions& options) {
  digest_records(runs, record_ends, num_records, digests, options, false);
}

Digest128 digest(const void* bytes, std::size_t num_bytes, Level level) {
  const auto source = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(bytes));
  const auto size = static_cast<std::int64_t>(num_bytes);
  const std::int64_t end = 1;
  Digest128 result{};
  MoveOptions options;
  options.level = level;
  digest(RunArrays(&source, nullptr, &size, 1), &end, 1, &result, options);
  return result;
}

}  // namespace hybridkv::cpu
