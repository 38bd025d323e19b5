// The C interface of libhybridkv_cuda.so, which hybridkv.transfer.cuda calls through ctypes: copies of jobs on one GPU.
//
// A function returns 0, or 1 with the failed CUDA call's name in `error`. Streams and events are CUDA's own handles, so
// any other CUDA runtime in the process may have created them, such as torch's.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <optional>
#include <span>
#include <stdexcept>

#include "batch_copy.h"
#include "job.h"
#include "kernels.h"

namespace {

using namespace hybridkv::cuda;

// Version of this interface. Increment it when a function changes.
constexpr std::int32_t kInterfaceVersion = 3;

void require(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

void require(cudaError_t code, const char* call) { require(check(code, call)); }

// The streams, events and memory of one copy engine. One thread at a time copies with it.
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
      make_event(end_);
      require(cudaMalloc(&staging_, kParts * limits.part_bytes), "cudaMalloc");
      job_.emplace(reinterpret_cast<std::uint64_t>(staging_), limits_, *this);
      require(cudaMalloc(reinterpret_cast<void**>(&table_), kParts * kPartRows * sizeof(FragmentRun)), "cudaMalloc");
      require(cudaHostAlloc(reinterpret_cast<void**>(&rows_), kParts * kPartRows * sizeof(FragmentRun),
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

  void copy(Rows rows, std::span<const AddressRange> device, cudaEvent_t caller) {
    enter();
    caller_ = caller;
    job_->copy(rows, device);
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
  void host_wait(Queue other, int part) override {
    require(cudaEventSynchronize(event(other, part)), "cudaEventSynchronize");
  }
  FragmentRun* rows(int part) override { return rows_ + part * kPartRows; }
  void upload(Queue queue, int part, std::size_t count) override {
    require(cudaMemcpyAsync(table_of(part), rows(part), count * sizeof(FragmentRun), cudaMemcpyHostToDevice,
                            stream(queue)),
            "cudaMemcpyAsync");
  }
  void launch(int part, std::size_t count, std::uint64_t num_tiles) override {
    require(launch_copy(table_of(part), count, num_tiles, limits_.tile_bytes, num_blocks_, stream(Queue::kKernel)));
  }
  void transfer(const Runs& runs) override {
    require(copy_batch(runs.sources.data(), runs.destinations.data(), runs.sizes.data(), runs.sizes.size(),
                       stream(Queue::kTransfer)));
  }
  void finish() override {
    // cudaStreamSynchronize would keep a core busy.
    require(cudaEventRecord(end_, stream(Queue::kKernel)), "cudaEventRecord");
    require(cudaStreamWaitEvent(stream(Queue::kTransfer), end_, 0), "cudaStreamWaitEvent");
    require(cudaEventRecord(end_, stream(Queue::kTransfer)), "cudaEventRecord");
    require(cudaEventSynchronize(end_), "cudaEventSynchronize");
  }

 private:
  // The calling thread may have another GPU's context.
  void enter() const { require(cudaSetDevice(device_), "cudaSetDevice"); }

  static void make_event(cudaEvent_t& event) {
    // A thread that waits for this event sleeps; without the flag it would spin.
    require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
            "cudaEventCreateWithFlags");
  }

  cudaStream_t stream(Queue queue) const { return streams_[static_cast<int>(queue)]; }
  cudaEvent_t event(Queue queue, int part) const { return events_[static_cast<int>(queue)][part]; }
  FragmentRun* table_of(int part) const { return table_ + part * kPartRows; }

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
    if (end_ != nullptr) static_cast<void>(cudaEventDestroy(end_));
    static_cast<void>(cudaFree(staging_));
    static_cast<void>(cudaFree(table_));
    static_cast<void>(cudaFreeHost(rows_));
  }

  const int device_;
  const Limits limits_;
  const std::uint32_t num_blocks_;
  cudaStream_t streams_[2] = {};
  cudaEvent_t events_[2][kParts] = {};
  cudaEvent_t end_ = nullptr;
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

// Copies `count` rows of runs after the event `caller`, and returns after all bytes are copied. `device` holds the
// (begin, end) of ranges of GPU memory, ascending, without overlaps.
int hybridkv_cuda_copy(void* copier, std::uint64_t caller, const hybridkv::CopyRow* rows, std::uint64_t count,
                       const std::uint64_t* device, std::uint64_t num_ranges, char* error, std::uint64_t error_bytes) {
  static_assert(sizeof(AddressRange) == 2 * sizeof(std::uint64_t));
  return guarded(error, error_bytes, [&] {
    const std::span<const AddressRange> ranges(reinterpret_cast<const AddressRange*>(device), num_ranges);
    static_cast<Copier*>(copier)->copy({rows, count}, ranges, reinterpret_cast<cudaEvent_t>(caller));
  });
}

}  // extern "C"
