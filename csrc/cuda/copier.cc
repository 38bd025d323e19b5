// The C interface of libhybridkv_cuda.so, which hybridkv.transfer.cuda calls through ctypes: jobs of copies on one GPU.
//
// A function returns 0, or 1 with the failed CUDA call's name in `error`. Streams and events are CUDA's own handles, so
// any other CUDA runtime in the process may have created them, such as torch's.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>

#include "batch_copy.h"
#include "job.h"
#include "kernels.h"

namespace {

using namespace hybridkv::cuda;

// Version of this interface. Increment it when a function changes.
constexpr std::int32_t kInterfaceVersion = 4;

void require(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

void require(cudaError_t code, const char* call) { require(check(code, call)); }

// A thread that waits for such an event sleeps; without the flag it would spin.
void make_event(cudaEvent_t& event) {
  require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
          "cudaEventCreateWithFlags");
}

// An enqueued job: events after its last step in each queue.
class EnqueuedJob {
 public:
  EnqueuedJob(int device, const cudaStream_t (&streams)[2]) : device_(device) {
    try {
      for (int queue = 0; queue < 2; ++queue) {
        make_event(ends_[queue]);
        require(cudaEventRecord(ends_[queue], streams[queue]), "cudaEventRecord");
      }
    } catch (...) {
      release();
      throw;
    }
  }
  EnqueuedJob(const EnqueuedJob&) = delete;
  EnqueuedJob& operator=(const EnqueuedJob&) = delete;
  ~EnqueuedJob() { release(); }

  // Waits for both events, also after a failure, and reports the first failure.
  void wait() const {
    Status status = check(cudaSetDevice(device_), "cudaSetDevice");
    for (const cudaEvent_t end : ends_) {
      Status waited = check(cudaEventSynchronize(end), "cudaEventSynchronize");
      if (status.ok()) status = std::move(waited);
    }
    require(status);
  }

 private:
  void release() noexcept {
    for (const cudaEvent_t end : ends_) {
      if (end != nullptr) static_cast<void>(cudaEventDestroy(end));
    }
  }

  const int device_;
  cudaEvent_t ends_[2] = {};
};

// The streams, events and memory of one copy engine. One thread at a time enqueues jobs.
class Copier final : public Gpu {
 public:
  Copier(int device, const Limits& limits, std::uint32_t num_blocks)
      : device_(device), limits_(limits), num_blocks_(num_blocks) {
    enter();
    try {
      // Allocate memory and load code now, because both may wait for the GPU's work.
      require(load_kernels());
      for (cudaStream_t& stream : streams_) {
        require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
      }
      for (auto& of_queue : events_) {
        for (cudaEvent_t& event : of_queue) make_event(event);
      }
      for (cudaEvent_t& event : is_read_) make_event(event);
      require(cudaMalloc(&staging_, kParts * limits.part_bytes), "cudaMalloc");
      job_.emplace(reinterpret_cast<std::uint64_t>(staging_), limits_, *this);
      require(cudaMalloc(reinterpret_cast<void**>(&table_), kTableRows * sizeof(FragmentRun)), "cudaMalloc");
      require(cudaHostAlloc(reinterpret_cast<void**>(&rows_), kTables * kTableRows * sizeof(FragmentRun),
                            cudaHostAllocPortable),
              "cudaHostAlloc");
    } catch (...) {
      release();
      throw;
    }
  }
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;
  ~Copier() { release(); }

  std::unique_ptr<EnqueuedJob> enqueue(Rows rows, std::span<const AddressRange> device, cudaEvent_t caller) {
    enter();
    caller_ = caller;
    job_->enqueue(rows, device);
    try {
      return std::make_unique<EnqueuedJob>(device_, streams_);
    } catch (...) {
      for (const cudaStream_t stream : streams_) static_cast<void>(cudaStreamSynchronize(stream));
      throw;
    }
  }

  void wait_for_caller(Queue queue) override {
    require(cudaStreamWaitEvent(stream(queue), caller_, 0), "cudaStreamWaitEvent");
  }
  void record(Queue queue, int part) override {
    require(cudaEventRecord(event(queue, part), stream(queue)), "cudaEventRecord");
  }
  void wait(Queue queue, Queue other, int part) override {
    require(cudaStreamWaitEvent(stream(queue), event(other, part), 0), "cudaStreamWaitEvent");
  }
  FragmentRun* rows(int table) override { return rows_ + table * kTableRows; }
  void launch(int table, std::size_t count, std::uint64_t num_tiles) override {
    // All launches share the GPU's table: they run in one stream.
    const cudaStream_t kernels = stream(Queue::kKernel);
    require(launch_table(rows(table), table_, count, kernels));
    require(cudaEventRecord(is_read_[table], kernels), "cudaEventRecord");
    require(launch_copy(table_, count, num_tiles, limits_.tile_bytes, num_blocks_, kernels));
  }
  void host_wait(int table) override { require(cudaEventSynchronize(is_read_[table]), "cudaEventSynchronize"); }
  void transfer(const Runs& runs) override {
    require(copy_batch(runs.sources.data(), runs.destinations.data(), runs.sizes.data(), runs.sizes.size(),
                       stream(Queue::kTransfer)));
  }
  void drain() override {
    for (const cudaStream_t stream : streams_) require(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }

 private:
  // The calling thread may have another GPU's context.
  void enter() const { require(cudaSetDevice(device_), "cudaSetDevice"); }

  cudaStream_t stream(Queue queue) const { return streams_[static_cast<int>(queue)]; }
  cudaEvent_t event(Queue queue, int part) const { return events_[static_cast<int>(queue)][part]; }

  // Failures do not matter: the process or the GPU ends.
  void release() noexcept {
    static_cast<void>(cudaSetDevice(device_));
    for (const cudaStream_t stream : streams_) {
      if (stream != nullptr) static_cast<void>(cudaStreamDestroy(stream));
    }
    for (const auto& of_queue : events_) {
      for (const cudaEvent_t event : of_queue) {
        if (event != nullptr) static_cast<void>(cudaEventDestroy(event));
      }
    }
    for (const cudaEvent_t event : is_read_) {
      if (event != nullptr) static_cast<void>(cudaEventDestroy(event));
    }
    static_cast<void>(cudaFree(staging_));
    static_cast<void>(cudaFree(table_));
    static_cast<void>(cudaFreeHost(rows_));
  }

  const int device_;
  const Limits limits_;
  const std::uint32_t num_blocks_;
  cudaStream_t streams_[2] = {};
  cudaEvent_t events_[2][kParts] = {};
  cudaEvent_t is_read_[kTables] = {};  // the GPU has read the table's rows
  cudaEvent_t caller_ = nullptr;
  std::optional<JobCopier> job_;
  void* staging_ = nullptr;
  FragmentRun* table_ = nullptr;  // on the GPU
  FragmentRun* rows_ = nullptr;   // on the host
};

template <class Function>
int guarded(char* error, std::uint64_t error_bytes, Function function) {
  try {
    function();
    return 0;
  } catch (const std::exception& caught) {
    std::snprintf(error, error_bytes, "%s", caught.what());
    return 1;
  }
}

}  // namespace

extern "C" {

std::int32_t hybridkv_cuda_interface_version() { return kInterfaceVersion; }

// True if the driver of this process takes many copies in one call.
int hybridkv_cuda_has_batch_copy() { return has_batch_copy() ? 1 : 0; }

// `limits`: as `Limits`, then the thread blocks of the kernel. `*copier` is for the two functions below.
int hybridkv_cuda_open(std::int32_t device, const std::uint64_t* limits, void** copier, char* error,
                       std::uint64_t error_bytes) {
  return guarded(error, error_bytes, [&] {
    const Limits made{limits[0], limits[1], limits[2], limits[3], limits[4]};
    *copier = new Copier(device, made, static_cast<std::uint32_t>(limits[5]));
  });
}

void hybridkv_cuda_close(void* copier) { delete static_cast<Copier*>(copier); }

// Enqueues the copies of `count` rows of runs, after the event `caller`. `device` holds the (begin, end) of ranges of GPU
// memory, ascending, without overlaps. `*job` is for hybridkv_cuda_wait, which must be called once.
int hybridkv_cuda_enqueue(void* copier, std::uint64_t caller, const hybridkv::CopyRow* rows, std::uint64_t count,
                          const std::uint64_t* device, std::uint64_t num_ranges, void** job, char* error,
                          std::uint64_t error_bytes) {
  static_assert(sizeof(AddressRange) == 2 * sizeof(std::uint64_t));
  return guarded(error, error_bytes, [&] {
    const std::span<const AddressRange> ranges(reinterpret_cast<const AddressRange*>(device), num_ranges);
    *job = static_cast<Copier*>(copier)->enqueue({rows, count}, ranges, reinterpret_cast<cudaEvent_t>(caller)).release();
  });
}

// Returns after all bytes of the job are copied.
int hybridkv_cuda_wait(void* job, char* error, std::uint64_t error_bytes) {
  const std::unique_ptr<EnqueuedJob> enqueued(static_cast<EnqueuedJob*>(job));
  return guarded(error, error_bytes, [&] { enqueued->wait(); });
}

}  // extern "C"
