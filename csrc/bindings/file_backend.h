// File queue by its name in Python.
#ifndef HYBRIDKV_BINDINGS_FILE_BACKEND_H_
#define HYBRIDKV_BINDINGS_FILE_BACKEND_H_

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "csrc/cpu/file_queue.h"

namespace hybridkv::bindings {

inline constexpr std::size_t kMaxThreads = 256;

inline const char* name_of(cpu::FileBackend backend) {
  return backend == cpu::FileBackend::kUring ? "io_uring" : "threads";
}

struct MadeBackend {
  std::unique_ptr<cpu::FileQueue> queue;
  int uring_error;  // errno with which the kernel refused io_uring, or 0
};

// Throws std::invalid_argument for invalid arguments, std::runtime_error without io_uring, and std::system_error
// without threads.
inline MadeBackend make_backend(const std::string& backend, std::size_t max_in_flight, std::size_t num_threads) {
  if (max_in_flight < 1 || max_in_flight > cpu::kMaxInFlight) {
    throw std::invalid_argument("max_in_flight: expected 1 to 4096, got " + std::to_string(max_in_flight));
  }
  if (num_threads < 1 || num_threads > kMaxThreads) {
    throw std::invalid_argument("num_threads: expected 1 to 256, got " + std::to_string(num_threads));
  }
  if (backend != "best" && backend != "io_uring" && backend != "threads") {
    throw std::invalid_argument("backend: expected best, io_uring or threads, got " + backend);
  }
  int uring_error = 0;
  if (backend != "threads") {
    auto ring = make_file_queue(cpu::FileBackend::kUring, max_in_flight, num_threads);
    if (ring != nullptr) return {std::move(ring), 0};
    uring_error = errno;
  }
  if (backend == "io_uring") {
    throw std::runtime_error(std::string("this kernel does not allow io_uring: ") + std::strerror(uring_error));
  }
  return {make_file_queue(cpu::FileBackend::kThreads, max_in_flight, num_threads), uring_error};
}

}  // namespace hybridkv::bindings

#endif  // HYBRIDKV_BINDINGS_FILE_BACKEND_H_
