// Sources of the runs of a copy: arrays from Python, or tables that are lowered a few runs at a time. So a transfer of
// any size needs no list of its runs.
#ifndef HYBRIDKV_CPU_RUN_SOURCE_H_
#define HYBRIDKV_CPU_RUN_SOURCE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hybridkv/copy_run.h"
#include "hybridkv/page_set.h"

namespace hybridkv::cpu {

// A sequence of runs. `read` may be called by many threads at once.
class RunSource {
 public:
  virtual ~RunSource() = default;
  virtual std::size_t size() const = 0;
  // Writes runs `first` to `first + count` of the sequence to `out`.
  virtual void read(std::size_t first, std::size_t count, CopyRun* out) const = 0;
};

// Three arrays of one length, such as numpy's.
class RunArrays final : public RunSource {
 public:
  RunArrays(const std::int64_t* sources, const std::int64_t* destinations, const std::int64_t* num_bytes,
            std::size_t size)
      : sources_(sources), destinations_(destinations), num_bytes_(num_bytes), size_(size) {}

  std::size_t size() const override { return size_; }
  void read(std::size_t first, std::size_t count, CopyRun* out) const override;

 private:
  const std::int64_t* sources_;
  const std::int64_t* destinations_;  // null: no copies
  const std::int64_t* num_bytes_;
  std::size_t size_;
};

// Pages of a gather or a scatter, in the order of the sets. For tests only: `Lowering` lowers jobs, because chunks have
// padding. The simulation of the GPU's kernels reads the same sets.
class PageRuns final : public RunSource {
 public:
  PageRuns(const PageSet* sets, std::size_t num_sets, const BlockId* ids, std::uint64_t buffer, Direction direction);

  std::size_t size() const override { return ends_.empty() ? 0 : ends_.back(); }
  void read(std::size_t first, std::size_t count, CopyRun* out) const override;

 private:
  const PageSet* sets_;
  const BlockId* ids_;
  std::uint64_t buffer_;
  Direction direction_;
  std::vector<std::size_t> ends_;  // for each set, the number of pages up to its end
};

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_RUN_SOURCE_H_
