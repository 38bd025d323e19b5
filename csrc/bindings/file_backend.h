// Which file queue Python asks for, by name.
#ifndef HYBRIDKV_BINDINGS_FILE_BACKEND_H_
#define HYBRIDKV_BINDINGS_FILE_BACKEND_H_

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>

#include "csrc/cpu/file_queue.h"

namespace hybridkv::bindings {

inline constexpr std::size_t kMaxThreads = 256;

inline const char* name_of(cpu::FileBackend backend) {
  return backend == cpu::FileBackend::kUring ? "io_uring" : "threads";
}

// std::invalid_argument for arguments that fit no queue, std::runtime_error where there is no io_uring.
inline std::unique_ptr<cpu::FileQueue> make_backend(const std::string& backend, std::size_t max_in_flight,
                                                    std::size_t num_threads) {
  if (max_in_flight < 1 || max_in_flight > cpu::kMaxInFlight) {
    throw std::invalid_argument("max_in_flight: expected 1 to 4096, got " + std::to_string(max_in_flight));
  }
  if (num_threads < 1 || num_threads > kMaxThreads) {
    throw std::invalid_argument("num_threads: expected 1 to 256, got " + std::to_string(num_threads));
  }
  if (backend != "best" && backend != "io_uring" && backend != "threads") {
    throw std::invalid_argument("backend: expected best, io_uring or threads, got " + backend);
  }
  std::unique_ptr<cpu::FileQueue> queue;
  if (backend != "threads") queue = make_file_queue(cpu::FileBackend::kUring, max_in_flight, num_threads);
  if (queue == nullptr && backend == "io_uring") throw std::runtime_error("this kernel gives us no io_uring");
  if (queue == nullptr) queue = make_file_queue(cpu::FileBackend::kThreads, max_in_flight, num_threads);
  return queue;
}

}  // namespace hybridkv::bindings

#endif  // HYBRIDKV_BINDINGS_FILE_BACKEND_H_
