// Copies runs of bytes, and computes their checksums on the way. The bindings call these functions.
//
// They allocate nothing per run, wait only for their own threads, and check no address: the caller does.
#ifndef HYBRIDKV_CPU_COPY_H_
#define HYBRIDKV_CPU_COPY_H_

#include <cstddef>
#include <cstdint>

#include "csrc/cpu/level.h"
#include "csrc/cpu/run_source.h"
#include "csrc/cpu/thread_pool.h"
#include "hybridkv/xxh3.h"

namespace hybridkv::cpu {

// Use of the caches for the written bytes.
enum class Caching {
  kBySize,  // kStreamed for kStreamedBytes and more, kCached below
  kCached,
  kStreamed,
};

// From this many bytes of one call on, kBySize keeps them out of the caches: with their source they would fill a
// second-level cache of 1 MiB. Measured on Zen 4 with destinations that are in no cache, as slots and blocks are: a
// copy of 512 KiB is 1.4 to 1.6 times as fast past the caches, and no slower if the written bytes are read again at
// once. At 128 KiB the latter case is up to 8 % slower.
inline constexpr std::size_t kStreamedBytes = 512 * 1024;

struct CopyOptions {
  Level level = best_level();
  Caching caching = Caching::kBySize;
  ThreadPool* pool = nullptr;  // null: only the calling thread
};

// Smallest part for another thread.
inline constexpr std::size_t kMinPartBytes = 1024 * 1024;

// Copies every run. With a pool each part has the same number of bytes; a run may be cut at the end of a part.
void copy(const RunSource& runs, const CopyOptions& options);

// Copies every run, and computes the digest of each record. Record i is runs `record_ends[i - 1]` to `record_ends[i]`,
// in order; the last end is the number of runs. With a pool each part has whole records, of about as many bytes.
void copy_and_digest(const RunSource& runs, const std::int64_t* record_ends, std::size_t num_records,
                     Digest128* digests, const CopyOptions& options);

// Computes the digests without copies; ignores the destinations.
void digest(const RunSource& runs, const std::int64_t* record_ends, std::size_t num_records, Digest128* digests,
            const CopyOptions& options);

// The digest of one range of memory.
Digest128 digest(const void* bytes, std::size_t num_bytes, Level level = best_level());

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_COPY_H_
