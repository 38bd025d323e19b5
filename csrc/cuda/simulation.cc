// Simulation of the copier's jobs on the CPU: the plan of job.cc, and the kernel of kernels.cu for every block, warp
// and lane, with the same template (fragments.h) and plain memory. Tests call it through ctypes and compare with a
// plain reference; on a machine without a GPU no other code runs this arithmetic.
//
// It tests the bytes, their order, and that no event is missing. It tests neither timing nor the output of a compiler
// for device code.
#include <algorithm>
#include <cstdint>
#include <ctime>
#include <limits>
#include <stdexcept>
#include <vector>

#include "fragments.h"
#include "host_memory.h"
#include "job.h"

namespace {

using namespace hybridkv::cuda;
using hybridkv::CopyRow;

// Callbacks of a test for each call of a job. 1: the call fails.
struct Calls {
  int (*wait_for_caller)(int queue);
  int (*record)(int queue, int part);
  int (*wait)(int queue, int other, int part);
  int (*launch)(int table, const FragmentRun* rows, std::uint64_t count, std::uint64_t num_tiles);
  int (*host_wait)(int table);
  int (*transfer)(const std::uint64_t* sources, const std::uint64_t* destinations, const std::uint64_t* sizes,
                  std::uint64_t count);
  int (*drain)();
};

class SimulatedGpu final : public Gpu {
 public:
  explicit SimulatedGpu(const Calls& calls) : calls_(calls), rows_(kTables * kTableRows) {}

  void wait_for_caller(Queue queue) override { require(calls_.wait_for_caller(static_cast<int>(queue))); }
  void record(Queue queue, int part) override { require(calls_.record(static_cast<int>(queue), part)); }
  void wait(Queue queue, Queue other, int part) override {
    require(calls_.wait(static_cast<int>(queue), static_cast<int>(other), part));
  }
  FragmentRun* rows(int table) override { return rows_.data() + table * kTableRows; }
  void launch(int table, std::size_t count, std::uint64_t num_tiles) override {
    require(calls_.launch(table, rows(table), count, num_tiles));
  }
  void host_wait(int table) override { require(calls_.host_wait(table)); }
  void transfer(const Runs& runs) override {
    require(calls_.transfer(runs.sources.data(), runs.destinations.data(), runs.sizes.data(), runs.sizes.size()));
  }
  void drain() override { require(calls_.drain()); }

 private:
  static void require(int failed) {
    if (failed != 0) throw std::runtime_error("a call failed");
  }

  const Calls calls_;
  std::vector<FragmentRun> rows_;
};

class SimulatedCopier {
 public:
  SimulatedCopier(std::uint64_t staging, const Limits& limits, const Calls& calls)
      : gpu_(calls), jobs_(staging, limits, gpu_) {}

  void enqueue(Rows rows, std::span<const AddressRange> device) { jobs_.enqueue(rows, device); }

 private:
  SimulatedGpu gpu_;
  JobCopier jobs_;
};

// Does nothing, so that only the plan takes time.
class IdleGpu final : public Gpu {
 public:
  IdleGpu() : rows_(kTables * kTableRows) {}

  void wait_for_caller(Queue) override {}
  void record(Queue, int) override {}
  void wait(Queue, Queue, int) override {}
  FragmentRun* rows(int table) override { return rows_.data() + table * kTableRows; }
  void launch(int, std::size_t, std::uint64_t) override {}
  void host_wait(int) override {}
  void transfer(const Runs&) override {}
  void drain() override {}

 private:
  std::vector<FragmentRun> rows_;
};

double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace

extern "C" {

// Returns the number of 16-byte words moved, or -1 if a word was not aligned.
std::int64_t hybridkv_simulate_table(const FragmentRun* rows, std::uint64_t num_rows, std::uint64_t num_tiles,
                                     std::uint64_t tile_bytes, std::uint32_t num_warps) {
  HostMemory memory;
  for (std::uint32_t warp = 0; warp < num_warps; ++warp) {
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
      copy_fragments(rows, static_cast<std::uint32_t>(num_rows), num_tiles, tile_bytes, warp, num_warps, lane, memory);
    }
  }
  return memory.misaligned ? -1 : static_cast<std::int64_t>(memory.wide_words);
}

// Writes the kernel's table of copies to `rows`, at most `max_rows`. Returns the number of its runs.
std::uint64_t hybridkv_fill_table(const CopyRow* copies, std::uint64_t count, std::uint64_t tile_bytes,
                                  FragmentRun* rows, std::uint64_t max_rows, std::uint64_t* num_rows,
                                  std::uint64_t* num_tiles) {
  Table table(rows, max_rows, tile_bytes);
  std::uint64_t done = 0;
  for (const CopyRow& row : Rows(copies, count)) {
    const std::uint64_t added = table.add(row);
    done += added;
    if (added < static_cast<std::uint64_t>(row.num_runs)) break;
  }
  *num_rows = table.num_rows();
  *num_tiles = table.num_tiles();
  return done;
}

// `limits`: as `Limits`. The result is for the two functions below.
void* hybridkv_simulate_copier(std::uint64_t staging, const Limits* limits, const Calls* calls) {
  return new SimulatedCopier(staging, *limits, *calls);
}

void hybridkv_simulate_close(void* copier) { delete static_cast<SimulatedCopier*>(copier); }

// Returns 1 if a call failed.
int hybridkv_simulate_enqueue(void* copier, const CopyRow* rows, std::uint64_t count, const AddressRange* device,
                              std::uint64_t num_ranges) {
  try {
    static_cast<SimulatedCopier*>(copier)->enqueue({rows, count}, {device, num_ranges});
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

// Returns the processor time of the plan of a job, in seconds: the best of `rounds`, on a GPU that does nothing.
double hybridkv_time_plan(const CopyRow* rows, std::uint64_t count, const AddressRange* device,
                          std::uint64_t num_ranges, std::uint64_t staging, const Limits* limits,
                          std::uint64_t rounds) {
  IdleGpu gpu;
  JobCopier copier(staging, *limits, gpu);
  double best = std::numeric_limits<double>::infinity();
  for (std::uint64_t round = 0; round < rounds; ++round) {
    const double began = thread_seconds();
    copier.enqueue({rows, count}, {device, num_ranges});
    best = std::min(best, thread_seconds() - began);
  }
  return best;
}

std::uint64_t hybridkv_job_parts() { return kParts; }
std::uint64_t hybridkv_job_tables() { return kTables; }
std::uint64_t hybridkv_job_table_rows() { return kTableRows; }

}  // extern "C"
