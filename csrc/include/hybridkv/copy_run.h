// A copy run: the unit of work that planners hand to whatever moves bytes.
//
// It is a plain struct of fixed layout, because the array of runs is filled in Python and read by
// C++ and device code alike. This header needs neither torch nor CUDA, and no copy is done here.
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

// Whether `next` goes on where `run` ends on both sides, so that the two are one longer run.
constexpr bool continues(const CopyRun& run, const CopyRun& next) {
  return run.source + run.num_bytes == next.source && run.destination + run.num_bytes == next.destination;
}

}  // namespace hybridkv

#endif  // HYBRIDKV_COPY_RUN_H_
