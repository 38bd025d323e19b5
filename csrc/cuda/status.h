// How a CUDA call ended, as a value: nothing here throws, waits or prints.
#ifndef HYBRIDKV_CUDA_STATUS_H_
#define HYBRIDKV_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include <string>

namespace hybridkv::cuda {

// Not to be ignored: the compiler refuses a call whose Status nobody looks at.
struct [[nodiscard]] Status {
  // The call that failed, nullptr when none did.
  const char* call = nullptr;
  std::string reason;

  bool ok() const { return call == nullptr; }
  std::string message() const { return std::string(call) + ": " + reason; }
};

inline Status check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return {};
  // The runtime remembers a call that failed; the next caller must not take it for its own.
  cudaGetLastError();
  return {call, std::string(cudaGetErrorName(code)) + " (" + cudaGetErrorString(code) + ")"};
}

}  // namespace hybridkv::cuda

#endif  // HYBRIDKV_CUDA_STATUS_H_
