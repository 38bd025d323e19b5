#include "batch_copy.h"

#include <cuda.h>

#include <algorithm>
#include <string>
#include <vector>

namespace hybridkv::cuda {
namespace {

#if CUDA_VERSION >= 12080

// Copies in one call. The driver crashes with about 50,000; 512, 4,096 and 32,768 are equally fast on an H100.
constexpr std::size_t kMostCopies = 4096;

// The driver's entry point, of either signature: CUDA 13 removed the index of the failing copy.
using BatchCopy12 = CUresult (*)(CUdeviceptr*, CUdeviceptr*, std::size_t*, std::size_t, CUmemcpyAttributes*,
                                 std::size_t*, std::size_t, std::size_t*, CUstream);
using BatchCopy13 = CUresult (*)(CUdeviceptr*, CUdeviceptr*, std::size_t*, std::size_t, CUmemcpyAttributes*,
                                 std::size_t*, std::size_t, CUstream);
using ErrorName = CUresult (*)(CUresult, const char**);

struct Driver {
  BatchCopy12 copy12 = nullptr;
  BatchCopy13 copy13 = nullptr;
  ErrorName error_name = nullptr;

  bool has_batch_copy() const { return copy12 != nullptr || copy13 != nullptr; }
};

void* find(const char* symbol, unsigned int version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t code = cudaGetDriverEntryPointByVersion(symbol, &found, version, cudaEnableDefault, &result);
  if (code != cudaSuccess) cudaGetLastError();  // no driver, or one without the function: clear the error
  return code == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : nullptr;
}

const Driver& driver() {
  static const Driver found = [] {
    Driver looked_up;
    looked_up.copy13 = reinterpret_cast<BatchCopy13>(find("cuMemcpyBatchAsync", 13000));
    if (looked_up.copy13 == nullptr) {
      looked_up.copy12 = reinterpret_cast<BatchCopy12>(find("cuMemcpyBatchAsync", 12080));
    }
    looked_up.error_name = reinterpret_cast<ErrorName>(find("cuGetErrorName", 6000));
    return looked_up;
  }();
  return found;
}

std::string name_of(CUresult code) {
  const char* name = nullptr;
  if (driver().error_name != nullptr && driver().error_name(code, &name) == CUDA_SUCCESS) return name;
  return "CUresult " + std::to_string(static_cast<int>(code));
}

CUresult call_driver(const std::uint64_t* sources, const std::uint64_t* destinations, const std::uint64_t* sizes,
                     std::size_t count, CUstream stream) {
  static_assert(sizeof(CUdeviceptr) == sizeof(std::uint64_t) && sizeof(std::size_t) == sizeof(std::uint64_t));
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
  std::size_t from_first = 0;
  // The driver takes its arrays without const and does not write to them. They are copied, because
  // CUdeviceptr and size_t are other types than uint64_t on some hosts.
  std::vector<CUdeviceptr> to(destinations, destinations + count), from(sources, sources + count);
  std::vector<std::size_t> bytes(sizes, sizes + count);
  if (driver().copy13 != nullptr) {
    return driver().copy13(to.data(), from.data(), bytes.data(), count, &attributes, &from_first, 1, stream);
  }
  std::size_t failed = 0;
  return driver().copy12(to.data(), from.data(), bytes.data(), count, &attributes, &from_first, 1, &failed, stream);
}

#endif

Status copy_one_by_one(const std::uint64_t* sources, const std::uint64_t* destinations, const std::uint64_t* sizes,
                       std::size_t count, cudaStream_t stream) {
  for (std::size_t i = 0; i < count; ++i) {
    const Status status = check(cudaMemcpyAsync(reinterpret_cast<void*>(destinations[i]),
                                                reinterpret_cast<const void*>(sources[i]), sizes[i],
                                                cudaMemcpyDefault, stream),
                                "cudaMemcpyAsync");
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace

bool has_batch_copy() {
#if CUDA_VERSION >= 12080
  return driver().has_batch_copy();
#else
  return false;
#endif
}

Status copy_batch(const std::uint64_t* sources, const std::uint64_t* destinations, const std::uint64_t* sizes,
                  std::size_t count, cudaStream_t stream) {
  if (count == 0) return {};
#if CUDA_VERSION >= 12080
  if (count > 1 && has_batch_copy()) {
    // The runtime makes a context current when it needs one; the driver fails without.
    int device = 0;
    Status status = check(cudaGetDevice(&device), "cudaGetDevice");
    if (status.ok()) status = check(cudaSetDevice(device), "cudaSetDevice");
    if (!status.ok()) return status;
    CUresult code = CUDA_SUCCESS;
    for (std::size_t first = 0; first < count && code == CUDA_SUCCESS; first += kMostCopies) {
      const std::size_t part = std::min(kMostCopies, count - first);
      code = call_driver(sources + first, destinations + first, sizes + first, part, stream);
    }
    if (code == CUDA_SUCCESS) return {};
    if (code != CUDA_ERROR_NOT_SUPPORTED) return {"cuMemcpyBatchAsync", name_of(code)};
  }
#endif
  return copy_one_by_one(sources, destinations, sizes, count, stream);
}

}  // namespace hybridkv::cuda
