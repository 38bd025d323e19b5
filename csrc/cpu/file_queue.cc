#include "csrc/cpu/file_queue.h"

#include "csrc/cpu/file_threads.h"
#include "csrc/cpu/uring.h"

namespace hybridkv::cpu {

bool has_uring() {
  static const bool has = Uring::open(1) != nullptr;
  return has;
}

std::unique_ptr<FileQueue> make_file_queue(FileBackend backend, std::size_t max_in_flight, std::size_t num_threads) {
  if (backend == FileBackend::kUring) return Uring::open(max_in_flight);
  return std::make_unique<FileThreads>(max_in_flight, num_threads);
}

}  // namespace hybridkv::cpu
