// Result of a CUDA call, as a value. It does not throw, wait or print.
#ifndef HYBRIDKV_CUDA_STATUS_H_
#define HYBRIDKV_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include <string>

namespace hybridkv::cuda {

// The compiler refuses a call that ignores its Status.
struct [[nodiscard]] Status {
  // Name of the failed call, or nullptr.
  const char* call = nullptr;
  std::string reason;

  bool ok() const { return call == nullptr; }
  std::string message() const { return std::string(call) + ": " + reason; }
};

inline Status check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return {};
  // Clears the error in the runtime, so that the next caller does not take it for its own.
  cudaGetLastError();
  return {call, std::string(cudaGetErrorName(code)) + " (" + cudaGetErrorString(code) + ")"};
}

}  // namespace hybridkv::cuda

#endif  // HYBRIDKV_CUDA_STATUS_H_
