#include "csrc/cpu/copy.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "csrc/cpu/kernels.h"
#include "csrc/cpu/lanes.h"
#include "csrc/cpu/recorder.h"
#include "csrc/cpu/share.h"
#include "csrc/cpu/summer.h"

namespace hybridkv::cpu {
namespace {

// Longer runs are cut, so that a few long runs keep all lanes busy.
constexpr std::size_t kMaxPieceBytes = kMaxPieceBlocks * xxh3::kBlockBytes;

// Several parts for each thread: other threads take the parts of a thread that waits for a core. Measured with another
// busy thread on one of two cores: 1.04 to 1.4 times as fast as one part for each thread.
constexpr std::size_t kPartsPerThread = 4;

// Shorter runs are copied without a lane.
constexpr std::size_t kMinStreamedRunBytes = 1024;

std::uint64_t total_bytes(const RunSource& runs) {
  std::uint64_t total = 0;
  for_each_run(runs, whole(0, runs.size()), [&](const CopyRun& run) { total += run.num_bytes; });
  return total;
}

Stores stores_for(const CopyOptions& options, const Kernels& kernels, std::uint64_t num_bytes) {
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

// Cuts the runs into at most `num_shares` shares of nearly equal size.
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

// Cuts the records into parts of at least `part_bytes`, except the last. Part i is records `cuts[i]` to `cuts[i + 1]`.
std::vector<std::size_t> cut_records(const RunSource& runs, const std::int64_t* record_ends, std::size_t num_records,
                                     std::uint64_t part_bytes) {
  std::vector<std::size_t> cuts = {0};
  std::uint64_t num_bytes = 0;
  std::size_t record = 0;
  std::int64_t number = 0;
  for_each_run(runs, whole(0, runs.size()), [&](const CopyRun& run) {
    while (record_ends[record] == number) ++record;  // records without runs
    num_bytes += run.num_bytes;
    if (record_ends[record] != ++number || num_bytes < part_bytes) return;
    cuts.push_back(record + 1);
    num_bytes = 0;
  });
  if (cuts.back() < num_records) cuts.push_back(num_records);
  return cuts;
}

void digest_records(const RunSource& runs, const std::int64_t* record_ends, std::size_t num_records, Digest128* digests,
                    const CopyOptions& options, bool copies) {
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
  const std::size_t num_parts = options.pool == nullptr ? 1 : options.pool->num_threads() * kPartsPerThread;
  const std::uint64_t part_bytes = std::max<std::uint64_t>(kMinPartBytes, num_bytes / num_parts);
  if (num_parts == 1 || num_bytes < 2 * part_bytes) {
    run_records(0, num_records);
    return;
  }
  const std::vector<std::size_t> cuts = cut_records(runs, record_ends, num_records, part_bytes);
  options.pool->run(cuts.size() - 1, [&](std::size_t part) { run_records(cuts[part], cuts[part + 1]); });
}

}  // namespace

void copy(const RunSource& runs, const CopyOptions& options) {
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
                     Digest128* digests, const CopyOptions& options) {
  digest_records(runs, record_ends, num_records, digests, options, true);
}

void digest(const RunSource& runs, const std::int64_t* record_ends, std::size_t num_records, Digest128* digests,
            const CopyOptions& options) {
  digest_records(runs, record_ends, num_records, digests, options, false);
}

Digest128 digest(const void* bytes, std::size_t num_bytes, Level level) {
  const auto source = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(bytes));
  const auto size = static_cast<std::int64_t>(num_bytes);
  const std::int64_t end = 1;
  Digest128 result{};
  CopyOptions options;
  options.level = level;
  digest(RunArrays(&source, nullptr, &size, 1), &end, 1, &result, options);
  return result;
}

}  // namespace hybridkv::cpu
