#include "csrc/cpu/uring.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#include <utility>

#include "csrc/cpu/wait.h"

namespace hybridkv::cpu {
namespace {

// user_data of completions without a slot.
constexpr std::uint64_t kWake = ~std::uint64_t{0};

// Timeout for a request without an operation; the kernel completes it at once.
constexpr double kProbeS = 1.0;
// Duration and interval of retries while the kernel lacks memory for the requests.
constexpr std::chrono::milliseconds kLacking{100};
constexpr std::chrono::milliseconds kAgain{1};

// Both rings in one mapping need Linux 5.4, a timeout of io_uring_enter needs 5.11. Older kernels get threads.
constexpr std::uint32_t kNeededFeatures = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_EXT_ARG | IORING_FEAT_NODROP;

std::uint32_t load(std::uint32_t* shared) {
  return std::atomic_ref<std::uint32_t>(*shared).load(std::memory_order_acquire);
}
void store(std::uint32_t* shared, std::uint32_t value) {
  std::atomic_ref<std::uint32_t>(*shared).store(value, std::memory_order_release);
}

}  // namespace

Mapping::Mapping(int fd, std::size_t num_bytes, std::uint64_t offset) : num_bytes_(num_bytes) {
  void* start =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
  if (start != MAP_FAILED) start_ = start;
}
Mapping::~Mapping() {
  if (start_ != nullptr) munmap(start_, num_bytes_);
}
Mapping::Mapping(Mapping&& other) noexcept { *this = std::move(other); }
Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(start_, other.start_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

std::unique_ptr<Uring> Uring::open(std::size_t max_in_flight) {
  io_uring_params parameters{};
  const int wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd < 0) return nullptr;
  const long fd = syscall(SYS_io_uring_setup, static_cast<unsigned>(max_in_flight) + 1, &parameters);
  if (fd < 0) {
    const int refused = errno;
    close(wake_fd);
    errno = refused;
    return nullptr;
  }
  std::unique_ptr<Uring> ring(new Uring(static_cast<int>(fd), wake_fd, parameters, max_in_flight));
  const bool has_needed = (parameters.features & kNeededFeatures) == kNeededFeatures;
  const int error = !has_needed ? EOPNOTSUPP : !ring->is_mapped() ? ENOMEM : ring->probe();
  if (error == 0) return ring;
  ring.reset();
  errno = error;
  return nullptr;
}

// Submits a request without an operation: a container may permit a ring, but not its use. Returns 0 or an errno.
int Uring::probe() {
  io_uring_sqe entry{};
  entry.opcode = IORING_OP_NOP;
  entry.user_data = kWake;
  push_entry(entry);
  const auto end = std::chrono::steady_clock::now() + kLacking;
  int error = enter(1, kProbeS);
  while (error == EINTR || ((error == EAGAIN || error == EBUSY) && std::chrono::steady_clock::now() < end)) {
    if (error != EINTR) std::this_thread::sleep_for(kAgain);
    error = enter(1, kProbeS);
  }
  if (error != 0) return error;
  std::vector<FileCompletion> none;
  return take_one(none) ? 0 : ETIME;
}

Uring::Uring(int fd, int wake_fd, const io_uring_params& parameters, std::size_t max_in_flight)
    : fd_(fd), wake_fd_(wake_fd), parameters_(parameters), requests_(max_in_flight) {
  const std::size_t submission_bytes = parameters.sq_off.array + parameters.sq_entries * sizeof(std::uint32_t);
  const std::size_t completion_bytes = parameters.cq_off.cqes + parameters.cq_entries * sizeof(io_uring_cqe);
  submissions_ = Mapping(fd, submission_bytes, IORING_OFF_SQ_RING);
  completions_ = Mapping(fd, completion_bytes, IORING_OFF_CQ_RING);
  entries_ = Mapping(fd, parameters.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
  for (std::size_t slot = max_in_flight; slot-- > 0;) free_.push_back(slot);
}

Uring::~Uring() {
  // The kernel may still write to memory that the caller will free.
  while (is_mapped() && num_in_flight() > 0) reap(num_in_flight(), num_in_flight(), 1.0);
  close(fd_);
  close(wake_fd_);
}

bool Uring::submit(FileRequest request) {
  if (free_.empty()) return false;
  const std::size_t slot = free_.back();
  requests_[slot].emplace(std::move(request));
  free_.pop_back();
  push(slot);
  // `reap` submits the entries again that the kernel does not take now.
  enter(0, 0.0);
  return true;
}

void Uring::push(std::size_t slot) {
  FileProgress& progress = *requests_[slot];
  io_uring_sqe entry{};
  entry.fd = progress.request().fd;
  entry.user_data = slot;
  const std::span<iovec> extents = progress.next();
  if (progress.request().operation == FileOperation::kSyncData) {
    entry.opcode = IORING_OP_FSYNC;
    entry.fsync_flags = IORING_FSYNC_DATASYNC;
  } else if (extents.empty()) {
    entry.opcode = IORING_OP_NOP;
  } else {
    entry.opcode = progress.request().operation == FileOperation::kRead ? IORING_OP_READV : IORING_OP_WRITEV;
    entry.off = static_cast<std::uint64_t>(progress.next_offset());
    entry.addr = reinterpret_cast<std::uintptr_t>(extents.data());
    entry.len = static_cast<std::uint32_t>(extents.size());
  }
  push_entry(entry);
}

// There is always room: the ring has one entry more than there are slots.
void Uring::push_entry(io_uring_sqe entry) {
  const std::uint32_t tail = load(submissions_.at<std::uint32_t>(parameters_.sq_off.tail));
  const std::uint32_t index = tail & *submissions_.at<std::uint32_t>(parameters_.sq_off.ring_mask);
  entries_.at<io_uring_sqe>(0)[index] = entry;
  submissions_.at<std::uint32_t>(parameters_.sq_off.array)[index] = index;
  store(submissions_.at<std::uint32_t>(parameters_.sq_off.tail), tail + 1);
  ++num_unsubmitted_;
}

void Uring::listen_for_wake() {
  if (is_listening_) return;
  io_uring_sqe entry{};
  entry.opcode = IORING_OP_POLL_ADD;
  entry.fd = wake_fd_;
  entry.poll32_events = POLLIN;
  entry.user_data = kWake;
  push_entry(entry);
  is_listening_ = true;
}

void Uring::wake() { eventfd_write(wake_fd_, 1); }

// Submits waiting entries, and waits. Returns 0 or an errno; ETIME on timeout.
int Uring::enter(unsigned min_complete, double timeout_s) {
  __kernel_timespec timeout{};
  timeout.tv_sec = static_cast<long long>(timeout_s);
  timeout.tv_nsec = static_cast<long long>((timeout_s - std::floor(timeout_s)) * 1e9);
  io_uring_getevents_arg argument{};
  argument.ts = reinterpret_cast<std::uintptr_t>(&timeout);
  const unsigned flags = min_complete > 0 ? IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG : 0;
  const long taken = syscall(SYS_io_uring_enter, fd_, num_unsubmitted_, min_complete, flags,
                             min_complete > 0 ? &argument : nullptr, min_complete > 0 ? sizeof argument : 0);
  if (taken < 0) return errno;
  num_unsubmitted_ -= static_cast<unsigned>(taken);
  return 0;
}

std::vector<FileCompletion> Uring::reap(std::size_t min_completions, std::size_t capacity, double timeout_s) {
  const std::size_t wanted = std::min({min_completions, capacity, num_in_flight()});
  const auto end = std::chrono::steady_clock::now() + wait_of(timeout_s);
  std::vector<FileCompletion> reaped;
  bool is_last = false;
  is_woken_ = false;
  if (wanted > 0) listen_for_wake();
  while (true) {
    while (reaped.size() < capacity && take_one(reaped)) {
    }
    const bool is_enough = reaped.size() >= wanted || is_woken_;
    if (is_last || (is_enough && num_unsubmitted_ == 0)) return reaped;
    const double left_s = std::chrono::duration<double>(end - std::chrono::steady_clock::now()).count();
    is_last = is_enough || left_s <= 0.0;
    const int error = is_last ? enter(0, 0.0) : enter(1, left_s);
    if (error != 0 && error != ETIME && error != EINTR && error != EAGAIN && error != EBUSY) {
      fail_unsubmitted(error, capacity, reaped);
    }
  }
}

// True if it took a completion from the ring. The request may need another system call.
bool Uring::take_one(std::vector<FileCompletion>& reaped) {
  std::uint32_t* shared_head = completions_.at<std::uint32_t>(parameters_.cq_off.head);
  const std::uint32_t head = load(shared_head);
  if (head == load(completions_.at<std::uint32_t>(parameters_.cq_off.tail))) return false;
  const std::uint32_t mask = *completions_.at<std::uint32_t>(parameters_.cq_off.ring_mask);
  const io_uring_cqe entry = completions_.at<io_uring_cqe>(parameters_.cq_off.cqes)[head & mask];
  store(shared_head, head + 1);
  if (entry.user_data == kWake) {
    eventfd_t count = 0;
    eventfd_read(wake_fd_, &count);
    is_listening_ = false;
    is_woken_ = true;
    return true;
  }
  const auto slot = static_cast<std::size_t>(entry.user_data);
  if (!requests_[slot]->advance(entry.res)) {
    push(slot);
    enter(0, 0.0);
    return true;
  }
  reaped.push_back(requests_[slot]->completion());
  requests_[slot].reset();
  free_.push_back(slot);
  return true;
}

// Fails the requests that the kernel refuses, and removes them from the ring.
void Uring::fail_unsubmitted(int error, std::size_t capacity, std::vector<FileCompletion>& reaped) {
  std::uint32_t* shared_tail = submissions_.at<std::uint32_t>(parameters_.sq_off.tail);
  const std::uint32_t mask = *submissions_.at<std::uint32_t>(parameters_.sq_off.ring_mask);
  for (; num_unsubmitted_ > 0 && reaped.size() < capacity; --num_unsubmitted_) {
    const std::uint32_t tail = load(shared_tail) - 1;
    const std::uint64_t refused = entries_.at<io_uring_sqe>(0)[tail & mask].user_data;
    store(shared_tail, tail);
    if (refused == kWake) {
      is_listening_ = false;
      continue;
    }
    const auto slot = static_cast<std::size_t>(refused);
    requests_[slot]->advance(-static_cast<std::int64_t>(error));
    reaped.push_back(requests_[slot]->completion());
    requests_[slot].reset();
    free_.push_back(slot);
  }
}

}  // namespace hybridkv::cpu
