// Run of bytes to copy, and rows of runs.
//
// A plain struct of fixed layout: Python fills arrays of runs, C++ and device code read them. This header needs neither
// torch nor CUDA, and copies nothing.
#ifndef HYBRIDKV_COPY_RUN_H_
#define HYBRIDKV_COPY_RUN_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace hybridkv {

// `num_bytes` bytes from address `source` to address `destination`; the two ranges do not overlap.
struct CopyRun {
  std::uint64_t source;
  std::uint64_t destination;
  std::uint64_t num_bytes;
};

static_assert(std::is_trivially_copyable_v<CopyRun> && std::is_standard_layout_v<CopyRun>);
static_assert(sizeof(CopyRun) == 24 && alignof(CopyRun) == 8);
static_assert(offsetof(CopyRun, source) == 0);
static_assert(offsetof(CopyRun, destination) == 8);
static_assert(offsetof(CopyRun, num_bytes) == 16);

// True if `next` begins where `run` ends, at source and destination: both are one longer run.
constexpr bool continues(const CopyRun& run, const CopyRun& next) {
  return run.source + run.num_bytes == next.source && run.destination + run.num_bytes == next.destination;
}

// `num_runs` runs of `num_bytes` each, from `source`, `source + source_step`, ... to `destination`,
// `destination + destination_step`, ... Pages of one block in layers that lie equally far apart are one row.
struct CopyRow {
  std::int64_t source;
  std::int64_t destination;
  std::int64_t source_step;
  std::int64_t destination_step;
  std::int64_t num_bytes;  // of one run
  std::int64_t num_runs;   // at least 1
};

static_assert(std::is_trivially_copyable_v<CopyRow> && std::is_standard_layout_v<CopyRow>);
static_assert(sizeof(CopyRow) == 48 && alignof(CopyRow) == 8);

}  // namespace hybridkv

#endif  // HYBRIDKV_COPY_RUN_H_
