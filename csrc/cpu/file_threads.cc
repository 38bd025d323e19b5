#include "csrc/cpu/file_threads.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "csrc/cpu/file_progress.h"
#include "csrc/cpu/wait.h"

namespace hybridkv::cpu {
namespace {

FileCompletion carry_out(FileRequest request) {
  FileProgress progress(std::move(request));
  while (true) {
    const FileRequest& asked = progress.request();
    const std::span<iovec> extents = progress.next();
    const int count = static_cast<int>(extents.size());
    ssize_t result = 0;
    if (asked.operation == FileOperation::kSyncData) {
      result = fdatasync(asked.fd);
    } else if (count == 0) {
      result = 0;
    } else if (asked.operation == FileOperation::kRead) {
      result = preadv(asked.fd, extents.data(), count, progress.next_offset());
    } else {
      result = pwritev(asked.fd, extents.data(), count, progress.next_offset());
    }
    if (progress.advance(result < 0 ? -static_cast<std::int64_t>(errno) : result)) return progress.completion();
  }
}

}  // namespace

FileThreads::FileThreads(std::size_t max_in_flight, std::size_t num_threads) : max_in_flight_(max_in_flight) {
  threads_.reserve(num_threads);
  try {
    while (threads_.size() < num_threads) threads_.emplace_back([this] { work(); });
  } catch (...) {
    if (threads_.empty()) throw;
  }
}

FileThreads::~FileThreads() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  requested_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool FileThreads::submit(FileRequest request) {
  if (num_in_flight_ == max_in_flight_) return false;
  {
    const std::lock_guard lock(mutex_);
    requests_.push_back(std::move(request));
  }
  ++num_in_flight_;
  requested_.notify_one();
  return true;
}

std::vector<FileCompletion> FileThreads::reap(std::size_t min_completions, std::size_t capacity, double timeout_s) {
  const std::size_t wanted = std::min({min_completions, capacity, num_in_flight_});
  std::unique_lock lock(mutex_);
  completed_.wait_for(lock, wait_of(timeout_s), [&] { return completions_.size() >= wanted || is_woken_; });
  is_woken_ = false;
  const auto count = static_cast<std::ptrdiff_t>(std::min(capacity, completions_.size()));
  std::vector<FileCompletion> reaped(completions_.begin(), completions_.begin() + count);
  completions_.erase(completions_.begin(), completions_.begin() + count);
  num_in_flight_ -= reaped.size();
  return reaped;
}

void FileThreads::wake() {
  {
    const std::lock_guard lock(mutex_);
    is_woken_ = true;
  }
  completed_.notify_one();
}

void FileThreads::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    requested_.wait(lock, [this] { return is_closing_ || !requests_.empty(); });
    if (requests_.empty()) return;
    FileRequest request = std::move(requests_.front());
    requests_.pop_front();
    lock.unlock();
    const FileCompletion completion = carry_out(std::move(request));
    lock.lock();
    completions_.push_back(completion);
    completed_.notify_one();
  }
}

}  // namespace hybridkv::cpu
