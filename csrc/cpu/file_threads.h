// Backend for every system: threads that call preadv, pwritev and fdatasync.
#ifndef HYBRIDKV_CPU_FILE_THREADS_H_
#define HYBRIDKV_CPU_FILE_THREADS_H_

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/cpu/file_queue.h"

namespace hybridkv::cpu {

class FileThreads final : public FileQueue {
 public:
  // Starts fewer threads if the system permits no more; throws std::system_error if it permits none.
  FileThreads(std::size_t max_in_flight, std::size_t num_threads);
  ~FileThreads() override;

  FileBackend backend() const override { return FileBackend::kThreads; }
  std::size_t max_in_flight() const override { return max_in_flight_; }
  std::size_t num_in_flight() const override { return num_in_flight_; }
  bool submit(FileRequest request) override;
  std::vector<FileCompletion> reap(std::size_t min_completions, std::size_t capacity, double timeout_s) override;
  void wake() override;

 private:
  void work();

  const std::size_t max_in_flight_;
  std::size_t num_in_flight_ = 0;  // used by the calling thread only
  std::mutex mutex_;
  std::condition_variable requested_;
  std::condition_variable completed_;
  std::deque<FileRequest> requests_;
  std::deque<FileCompletion> completions_;
  bool is_woken_ = false;
  bool is_closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_FILE_THREADS_H_
