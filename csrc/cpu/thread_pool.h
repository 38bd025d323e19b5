// A fixed number of threads that carry out the parts of one call at a time.
#ifndef HYBRIDKV_CPU_THREAD_POOL_H_
#define HYBRIDKV_CPU_THREAD_POOL_H_

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace hybridkv::cpu {

// Bounded on both sides: it never has more than `num_threads` at work, the caller's included, and never more than one
// call's parts waiting. A second caller waits for the first.
class ThreadPool {
 public:
  // At least 1; the calling thread is one of them. Where the system gives no more threads, it is fewer.
  explicit ThreadPool(std::size_t num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::size_t num_threads() const { return threads_.size() + 1; }

  // Calls `part(0)` to `part(num_parts - 1)`, each once, on whatever thread is free, and returns when all have
  // returned. When one throws, no other is begun, and what it threw is thrown when those that were begun have returned.
  void run(std::size_t num_parts, const std::function<void(std::size_t)>& part);

 private:
  void work();
  void take_parts(std::unique_lock<std::mutex>& lock);

  std::mutex callers_;
  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void(std::size_t)>* part_ = nullptr;
  std::size_t next_ = 0;
  std::size_t num_parts_ = 0;
  std::size_t num_running_ = 0;
  std::exception_ptr failure_;  // the first
  bool is_closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_THREAD_POOL_H_
