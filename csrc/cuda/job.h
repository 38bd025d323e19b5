// Plan of one job of copies between a GPU's memory and pinned host memory: the way of each row of runs, and their
// order. Its time depends on the number of rows. It depends on the number of runs only for batched runs and for rows
// without a contiguous range of host memory.
//
// Three ways:
//
// - batched: the GPU's copy engines, one descriptor for each run. They use no multiprocessors and reach the speed of
//   the link with large runs, but each descriptor costs the host 1 to 2 us. For runs of `large_run_bytes` and more.
// - staged: the kernel packs small runs in staging memory on the GPU, and the copy engines move it in a few long runs;
//   loads use the reverse order. The parts of the staging memory alternate, so that packing and moving overlap.
// - direct: the kernel reads or writes pinned host memory itself. For small jobs, for runs that staging would not make
//   longer, and for copies within the GPU.
//
// Plain C++ without CUDA. `Gpu` is its interface to a GPU: copier.cc implements it with CUDA, tests simulate it on the
// CPU.
#ifndef HYBRIDKV_CUDA_JOB_H_
#define HYBRIDKV_CUDA_JOB_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fragments.h"
#include "hybridkv/copy_run.h"

namespace hybridkv::cuda {

// Number of parts of the staging memory, which alternate: the copy engines move one while the kernel works on another.
inline constexpr int kParts = 4;
// Number of tables in host memory. They alternate too: the host fills one while the GPU has yet to read the others.
inline constexpr int kTables = 64;
// Rows in one table.
inline constexpr std::size_t kTableRows = 1024;

// Copies of a job. No two destinations overlap. Only steps may be negative.
using Rows = std::span<const CopyRow>;

// Copies by the GPU's copy engines: `sizes[i]` bytes, at least one, from `sources[i]` to `destinations[i]`.
struct Runs {
  std::span<const std::uint64_t> sources;
  std::span<const std::uint64_t> destinations;
  std::span<const std::uint64_t> sizes;
};

struct AddressRange {
  std::uint64_t begin;
  std::uint64_t end;
};

struct Limits {
  std::uint64_t large_run_bytes;     // smallest size of a batched run; at most `part_bytes`
  std::uint64_t direct_job_bytes;    // limit for the sum of small runs of one direction that are direct
  std::uint64_t part_bytes;          // of staging memory
  std::uint64_t tile_bytes;          // bytes that one warp of the kernel copies at a time
  std::uint64_t registration_bytes;  // a registration of host memory ends at each multiple of this power of two
};

// The two streams. One stream runs its steps in order; only events order two streams.
enum class Queue { kKernel, kTransfer };

// The streams, the events and the memory of jobs. Each call except `host_wait` and `drain` enqueues. A call that fails
// throws.
class Gpu {
 public:
  // `queue` waits for everything that the caller's stream held before the current job.
  virtual void wait_for_caller(Queue queue) = 0;
  // Records the event of `part` in `queue`, after everything that `queue` holds.
  virtual void record(Queue queue, int part) = 0;
  // `queue` waits for the last recorded event of `part` in `other`.
  virtual void wait(Queue queue, Queue other, int part) = 0;
  // Host memory for the `kTableRows` rows of a table.
  virtual FragmentRun* rows(int table) = 0;
  // Enqueues the copy kernel in kKernel, for the first `count` rows of a table. The GPU reads them before the kernel.
  virtual void launch(int table, std::size_t count, std::uint64_t num_tiles) = 0;
  // Waits on the host until the GPU has read the rows of the table's last launch.
  virtual void host_wait(int table) = 0;
  // Enqueues copies by the copy engines in kTransfer, in any order.
  virtual void transfer(const Runs& runs) = 0;
  // Returns when both queues are empty.
  virtual void drain() = 0;

 protected:
  ~Gpu() = default;
};

// The table of the copy kernel. Runs of one size with equal steps between their sources and between their destinations
// become one row, also if they are added one by one.
class Table {
 public:
  Table(FragmentRun* rows, std::size_t max_rows, std::uint64_t tile_bytes)
      : rows_(rows), max_rows_(max_rows), tile_bytes_(tile_bytes) {}

  // Adds the first runs of a row, as many as fit. Returns their number.
  std::uint64_t add(const CopyRow& row);
  std::size_t num_rows() const { return num_rows_; }
  std::uint64_t num_tiles() const { return num_tiles_; }

 private:
  bool continues(const FragmentRun& last, const CopyRow& row) const;

  FragmentRun* rows_;
  std::size_t max_rows_;
  std::uint64_t tile_bytes_;
  std::size_t num_rows_ = 0;
  std::uint64_t num_tiles_ = 0;
  std::uint64_t fragment_bytes_ = 0;
  std::uint64_t tiles_per_fragment_ = 0;  // of fragments of `fragment_bytes_`
};

// Enqueues jobs. A job may begin before the earlier ones have ended. The memory of the lists is used again for later
// jobs: new memory costs more time than the plan.
class JobCopier {
 public:
  // `staging`: kParts times `part_bytes` of GPU memory.
  JobCopier(std::uint64_t staging, const Limits& limits, Gpu& gpu)
      : staging_(staging), limits_(limits), gpu_(gpu), moved_(limits.registration_bytes) {}

  // Enqueues a job. Copies within host memory are done when it returns. If a call of the Gpu throws, waits until no copy
  // of any job can still write, and throws the same exception.
  //
  // `device`: ranges of GPU memory, ascending, without overlaps. All other addresses are host memory.
  void enqueue(Rows rows, std::span<const AddressRange> device);

 private:
  enum class Way : std::uint8_t { kWithinHost, kBatched, kDirect, kStaged };

  // Runs for the copy engines: neighbours are joined, and no run crosses two registrations.
  class Transfers {
   public:
    explicit Transfers(std::uint64_t registration_bytes) : mask_(registration_bytes - 1) {}
    void clear();
    Runs runs() const { return {sources_, destinations_, sizes_}; }
    void add(std::uint64_t source, std::uint64_t destination, std::uint64_t num_bytes);

   private:
    std::uint64_t to_border(std::uint64_t address) const { return mask_ + 1 - (address & mask_); }
    void add_piece(std::uint64_t source, std::uint64_t destination, std::uint64_t num_bytes);

    std::uint64_t mask_;
    std::vector<std::uint64_t> sources_, destinations_, sizes_;
  };

  // The small rows of one direction. Their runs are neighbours on the host.
  struct Small {
    std::vector<std::uint32_t> indices;
    std::uint64_t num_bytes = 0;
    bool is_sorted = true;  // by the host's addresses
    std::uint64_t host_end = 0;

    void clear() {
      indices.clear();
      num_bytes = 0;
      is_sorted = true;
      host_end = 0;
    }
    void add(std::size_t index, std::uint64_t host, std::uint64_t size) {
      is_sorted = is_sorted && host >= host_end;
      host_end = host + size;
      num_bytes += size;
      indices.push_back(static_cast<std::uint32_t>(index));
    }
  };

  void enqueue_all(Rows rows, std::span<const AddressRange> device);
  void choose_ways(Rows rows, std::span<const AddressRange> device);
  void add_row(const CopyRow& row, Way way);
  void sort_or_drop(Small& small, bool is_store);
  void enqueue_batched();
  void enqueue_direct();
  void enqueue_staged(const Small& small, bool is_store);
  void enqueue_store(int part, const Table& table);
  void enqueue_load(int part, const Table& table);
  void launch(const Table& table);
  void copy_within_host() const;
  static std::uint32_t bit(Way way) { return 1U << static_cast<int>(way); }
  bool has(Way way) const { return (ways_in_job_ & bit(way)) != 0; }
  int next_part() { return static_cast<int>(num_parts_++ % kParts); }
  Table next_table();
  void record(Queue queue, int part);
  void wait_if_recorded(Queue queue, Queue other, int part);

  const std::uint64_t staging_;
  const Limits limits_;
  Gpu& gpu_;
  // State of the current job.
  std::vector<CopyRow> rows_;
  std::vector<Way> ways_;          // of each row
  std::uint32_t ways_in_job_ = 0;  // bits of these ways; kStaged may be set without staged rows
  Small stores_, loads_;
  Transfers moved_;
  // State over all jobs.
  std::uint64_t num_parts_ = 0;
  std::uint64_t num_tables_ = 0;
  int current_table_ = 0;
  bool is_recorded_[2][kParts] = {};
};

}  // namespace hybridkv::cuda

#endif  // HYBRIDKV_CUDA_JOB_H_
