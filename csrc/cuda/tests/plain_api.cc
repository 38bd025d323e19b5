// The kernels for tests that have a GPU but no torch: a C interface, called through ctypes. Each
// function returns 0, or 1 with the failed call's name in `error`. A function waits only if its comment says so.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>

#include "../batch_copy.h"
#include "../job.h"
#include "../kernels.h"

namespace {

using namespace hybridkv::cuda;

int report(const Status& status, char* error, std::uint64_t error_bytes) {
  if (status.ok()) return 0;
  std::snprintf(error, error_bytes, "%s", status.message().c_str());
  return 1;
}

}  // namespace

extern "C" {

int hybridkv_cuda_make_stream(std::uint64_t* stream, char* error, std::uint64_t error_bytes) {
  return report(check(cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking),
                      "cudaStreamCreateWithFlags"),
                error, error_bytes);
}

int hybridkv_cuda_allocate(int on_device, std::uint64_t num_bytes, std::uint64_t* address, char* error,
                           std::uint64_t error_bytes) {
  auto* place = reinterpret_cast<void**>(address);
  const Status status = on_device != 0 ? check(cudaMalloc(place, num_bytes), "cudaMalloc")
                                       : check(cudaHostAlloc(place, num_bytes, cudaHostAllocPortable), "cudaHostAlloc");
  return report(status, error, error_bytes);
}

int hybridkv_cuda_free(int on_device, std::uint64_t address, char* error, std::uint64_t error_bytes) {
  auto* place = reinterpret_cast<void*>(address);
  return report(on_device != 0 ? check(cudaFree(place), "cudaFree") : check(cudaFreeHost(place), "cudaFreeHost"), error,
                error_bytes);
}

// Waits until the bytes are copied.
int hybridkv_cuda_move(std::uint64_t source, std::uint64_t destination, std::uint64_t num_bytes, char* error,
                       std::uint64_t error_bytes) {
  const Status moved = check(cudaMemcpy(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source),
                                        num_bytes, cudaMemcpyDefault),
                             "cudaMemcpy");
  if (!moved.ok()) return report(moved, error, error_bytes);
  // A copy from pageable memory returns before it is complete, and other streams do not wait for it.
  return report(check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize"), error, error_bytes);
}

// Waits until all work on the stream is complete; reports its failures.
int hybridkv_cuda_synchronize(std::uint64_t stream, char* error, std::uint64_t error_bytes) {
  return report(check(cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(stream)), "cudaStreamSynchronize"), error,
                error_bytes);
}

// Copies with the kernel only. `rows` is host memory for `count` rows, `table` is GPU memory for as many.
int hybridkv_cuda_copy_by_kernel(const std::uint64_t* sources, const std::uint64_t* destinations,
                                 const std::uint64_t* sizes, std::uint64_t count, FragmentRun* rows,
                                 std::uint64_t table, std::uint64_t tile_bytes, std::uint32_t num_blocks,
                                 std::uint64_t stream, char* error, std::uint64_t error_bytes) {
  Table filled(rows, count, tile_bytes);
  for (std::uint64_t i = 0; i < count; ++i) {
    const hybridkv::CopyRow row{static_cast<std::int64_t>(sources[i]), static_cast<std::int64_t>(destinations[i]), 0, 0,
                                static_cast<std::int64_t>(sizes[i]), 1};
    if (filled.add(row) == 0) return report({"Table::add", "full"}, error, error_bytes);
  }
  if (hybridkv_cuda_move(reinterpret_cast<std::uint64_t>(rows), table, filled.num_rows() * sizeof(FragmentRun), error,
                         error_bytes) != 0) {
    return 1;
  }
  return report(launch_copy(reinterpret_cast<const FragmentRun*>(table), filled.num_rows(), filled.num_tiles(),
                            tile_bytes, num_blocks, reinterpret_cast<cudaStream_t>(stream)),
                error, error_bytes);
}

int hybridkv_cuda_copy_batch(const std::uint64_t* sources, const std::uint64_t* destinations,
                             const std::uint64_t* sizes, std::uint64_t count, std::uint64_t stream, char* error,
                             std::uint64_t error_bytes) {
  return report(copy_batch(sources, destinations, sizes, count, reinterpret_cast<cudaStream_t>(stream)), error,
                error_bytes);
}

int hybridkv_cuda_has_batch_copy() { return has_batch_copy() ? 1 : 0; }

}  // extern "C"
