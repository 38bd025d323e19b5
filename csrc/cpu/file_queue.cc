#include "csrc/cpu/file_queue.h"

#include <atomic>
#include <cerrno>

#include "csrc/cpu/file_threads.h"
#include "csrc/cpu/uring.h"

namespace hybridkv::cpu {

bool has_uring() {
  enum class Answer { kUnknown, kYes, kNo };
  static std::atomic<Answer> known{Answer::kUnknown};
  const Answer answer = known.load();
  if (answer != Answer::kUnknown) return answer == Answer::kYes;
  const bool has = Uring::open(1) != nullptr;
  // A temporary error is not cached.
  if (has || !is_passing(errno)) known.store(has ? Answer::kYes : Answer::kNo);
  return has;
}

bool is_passing(int uring_error) {
  switch (uring_error) {
    case EAGAIN:
    case EBUSY:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
    case ETIME:
      return true;
    default:
      return false;
  }
}

std::unique_ptr<FileQueue> make_file_queue(FileBackend backend, std::size_t max_in_flight, std::size_t num_threads) {
  if (backend == FileBackend::kUring) return Uring::open(max_in_flight);
  return std::make_unique<FileThreads>(max_in_flight, num_threads);
}

}  // namespace hybridkv::cpu
