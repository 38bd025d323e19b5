// Backend on io_uring, by its system calls and shared rings. It does not use liburing, so it needs no library.
#ifndef HYBRIDKV_CPU_URING_H_
#define HYBRIDKV_CPU_URING_H_

#include <linux/io_uring.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "csrc/cpu/file_progress.h"
#include "csrc/cpu/file_queue.h"

namespace hybridkv::cpu {

// Memory shared with the kernel.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, std::size_t num_bytes, std::uint64_t offset);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;

  bool is_mapped() const { return start_ != nullptr; }
  template <typename T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(start_) + offset);
  }

 private:
  void* start_ = nullptr;
  std::size_t num_bytes_ = 0;
};

class Uring final : public FileQueue {
 public:
  // Null, with errno set, if the kernel refuses a ring, its use, or a required feature.
  static std::unique_ptr<Uring> open(std::size_t max_in_flight);
  ~Uring() override;

  FileBackend backend() const override { return FileBackend::kUring; }
  std::size_t max_in_flight() const override { return requests_.size(); }
  std::size_t num_in_flight() const override { return requests_.size() - free_.size(); }
  bool submit(FileRequest request) override;
  std::vector<FileCompletion> reap(std::size_t min_completions, std::size_t capacity, double timeout_s) override;
  void wake() override;

 private:
  Uring(int fd, int wake_fd, const io_uring_params& parameters, std::size_t max_in_flight);

  bool is_mapped() const { return submissions_.is_mapped() && completions_.is_mapped() && entries_.is_mapped(); }
  void push(std::size_t slot);
  void push_entry(io_uring_sqe entry);
  int probe();
  void listen_for_wake();
  int enter(unsigned min_complete, double timeout_s);
  bool take_one(std::vector<FileCompletion>& reaped);
  void fail_unsubmitted(int error, std::size_t capacity, std::vector<FileCompletion>& reaped);

  int fd_;
  int wake_fd_;                // eventfd that the ring polls
  bool is_listening_ = false;  // a poll of `wake_fd_` is in flight
  bool is_woken_ = false;
  io_uring_params parameters_;
  Mapping submissions_;
  Mapping completions_;
  Mapping entries_;
  unsigned num_unsubmitted_ = 0;
  std::vector<std::optional<FileProgress>> requests_;  // by slot, the kernel's user_data
  std::vector<std::size_t> free_;
};

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_URING_H_
