#include "csrc/cpu/thread_pool.h"

#include <utility>

namespace hybridkv::cpu {

ThreadPool::ThreadPool(std::size_t num_threads) {
  threads_.reserve(num_threads);
  try {
    while (threads_.size() + 1 < num_threads) threads_.emplace_back([this] { work(); });
  } catch (...) {
    // The calling thread does the work of the missing ones.
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(std::size_t num_parts, const std::function<void(std::size_t)>& part) {
  const std::lock_guard caller(callers_);
  std::unique_lock lock(mutex_);
  part_ = &part;
  next_ = 0;
  num_parts_ = num_parts;
  if (num_parts > 1) changed_.notify_all();
  take_parts(lock);
  changed_.wait(lock, [this] { return num_running_ == 0; });
  part_ = nullptr;
  if (const std::exception_ptr failure = std::exchange(failure_, nullptr)) std::rethrow_exception(failure);
}

void ThreadPool::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_closing_ || (part_ != nullptr && next_ < num_parts_); });
    if (is_closing_) return;
    take_parts(lock);
    if (num_running_ == 0) changed_.notify_all();
  }
}

void ThreadPool::take_parts(std::unique_lock<std::mutex>& lock) {
  while (next_ < num_parts_) {
    const std::size_t part = next_++;
    ++num_running_;
    lock.unlock();
    std::exception_ptr failure;
    try {
      (*part_)(part);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    --num_running_;
    if (failure == nullptr) continue;
    next_ = num_parts_;
    if (failure_ == nullptr) failure_ = failure;
  }
}

}  // namespace hybridkv::cpu
