// Fixed number of threads that execute the parts of one call at a time.
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

// At most `num_threads` threads work, the caller's included. A second caller waits for the first.
class ThreadPool {
 public:
  // `num_threads` is at least 1 and counts the calling thread. Starts fewer if the system permits no more.
  explicit ThreadPool(std::size_t num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::size_t num_threads() const { return threads_.size() + 1; }

  // Calls `part(0)` to `part(num_parts - 1)`, each once, on any free thread, and returns after the last one. After an
  // exception it starts no other part, waits for the running ones, and throws the exception.
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
  std::exception_ptr failure_;  // first exception
  bool is_closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_THREAD_POOL_H_
