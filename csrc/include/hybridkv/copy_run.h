// Run of bytes to copy.
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

}  // namespace hybridkv

#endif  // HYBRIDKV_COPY_RUN_H_
