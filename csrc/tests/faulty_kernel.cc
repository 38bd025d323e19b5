#include "csrc/tests/faulty_kernel.h"

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include "csrc/tests/expect.h"

namespace hybridkv::testing {
namespace {

std::mutex mutex;
Faults faults;
Noise noise(1);
std::atomic<std::uint64_t> failed{0};
std::atomic<std::uint64_t> repeated{0};

// The completions of one ring, in our own mapping.
struct Completions {
  io_uring_params parameters;
  char* start;
  std::size_t num_bytes;
  std::uint32_t num_seen;
};
std::map<int, Completions> rings;

bool is_one_in(std::uint64_t count) { return count != 0 && noise.below(count) == 0; }

// Result of a call that moves `num_bytes`: a negative errno, or the reported number of bytes.
std::int64_t fate_of(std::int64_t num_bytes) {
  const std::lock_guard lock(mutex);
  if (is_one_in(faults.failed_one_in)) {
    ++failed;
    return -EIO;
  }
  if (is_one_in(faults.interrupted_one_in)) {
    ++repeated;
    return noise.below(2) == 0 ? -EINTR : -EAGAIN;
  }
  const auto unit = static_cast<std::int64_t>(faults.unit_bytes);
  if (num_bytes <= unit || !is_one_in(faults.partial_one_in)) return num_bytes;
  ++repeated;
  return unit * static_cast<std::int64_t>(1 + noise.below(static_cast<std::uint64_t>((num_bytes - 1) / unit)));
}

std::vector<iovec> beginning_of(const iovec* extents, int count, std::int64_t num_bytes) {
  std::vector<iovec> beginning;
  for (int place = 0; place < count && num_bytes > 0; ++place) {
    beginning.push_back(extents[place]);
    beginning.back().iov_len = std::min(extents[place].iov_len, static_cast<std::size_t>(num_bytes));
    num_bytes -= static_cast<std::int64_t>(beginning.back().iov_len);
  }
  return beginning;
}

ssize_t move(long number, int fd, const iovec* extents, int count, off_t offset) {
  std::int64_t num_bytes = 0;
  for (int place = 0; place < count; ++place) num_bytes += static_cast<std::int64_t>(extents[place].iov_len);
  const std::int64_t fate = fate_of(num_bytes);
  if (fate < 0) {
    errno = static_cast<int>(-fate);
    return -1;
  }
  const std::vector<iovec> beginning = beginning_of(extents, count, fate);
  return ::syscall(number, fd, beginning.data(), beginning.size(), offset, 0L);
}

void open_ring(int fd, const io_uring_params& parameters) {
  const std::size_t num_bytes = parameters.cq_off.cqes + parameters.cq_entries * sizeof(io_uring_cqe);
  void* start = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, IORING_OFF_CQ_RING);
  if (start == MAP_FAILED) return;
  const std::lock_guard lock(mutex);
  Completions& ring = rings[fd];
  if (ring.start != nullptr) munmap(ring.start, ring.num_bytes);  // an earlier ring with this descriptor
  ring = {parameters, static_cast<char*>(start), num_bytes, 0};
}

std::uint32_t load(const Completions& ring, std::uint32_t at) {
  return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(ring.start + at)).load(std::memory_order_acquire);
}

// The completions that were not taken yet. The ring's user takes them in the thread that calls this.
void change_completions(int fd) {
  std::unique_lock lock(mutex);
  const auto found = rings.find(fd);
  if (found == rings.end()) return;
  Completions& ring = found->second;
  const std::uint32_t head = load(ring, ring.parameters.cq_off.head);
  if (static_cast<std::int32_t>(head - ring.num_seen) > 0) ring.num_seen = head;
  const std::uint32_t mask = load(ring, ring.parameters.cq_off.ring_mask);
  auto* entries = reinterpret_cast<io_uring_cqe*>(ring.start + ring.parameters.cq_off.cqes);
  const std::uint32_t tail = load(ring, ring.parameters.cq_off.tail);
  for (; ring.num_seen != tail; ++ring.num_seen) {
    io_uring_cqe& entry = entries[ring.num_seen & mask];
    if (entry.user_data == ~std::uint64_t{0} || entry.res < 0) continue;  // the queue's own request, or a real error
    lock.unlock();
    const std::int64_t fate = fate_of(entry.res);
    lock.lock();
    entry.res = static_cast<std::int32_t>(fate);
  }
}

// Result of a call that submits entries: an errno, or 0 and perhaps fewer entries. Then the kernel does not wait.
int change_handing_over(long (&argument)[6]) {
  const std::lock_guard lock(mutex);
  long& count = argument[1];
  if (count > 0 && is_one_in(faults.failed_one_in)) {
    ++failed;
    return ENOMEM;
  }
  if (is_one_in(faults.interrupted_one_in)) {
    ++repeated;
    const int numbers[] = {EINTR, EAGAIN, EBUSY};
    return numbers[noise.below(3)];
  }
  if (count > 1 && is_one_in(faults.partial_one_in)) {
    ++repeated;
    count = static_cast<long>(1 + noise.below(static_cast<std::uint64_t>(count - 1)));
    for (int place = 2; place < 6; ++place) argument[place] = 0;
  }
  return 0;
}

long raw(long number, const long (&argument)[6]) {
  register long fourth asm("r10") = argument[3];
  register long fifth asm("r8") = argument[4];
  register long sixth asm("r9") = argument[5];
  long result = number;
  asm volatile("syscall"
               : "+a"(result)
               : "D"(argument[0]), "S"(argument[1]), "d"(argument[2]), "r"(fourth), "r"(fifth), "r"(sixth)
               : "rcx", "r11", "memory");
  if (result < 0 && result > -4096) {
    errno = static_cast<int>(-result);
    return -1;
  }
  return result;
}

}  // namespace

void set_faults(const Faults& chosen) {
  const std::lock_guard lock(mutex);
  faults = chosen;
  noise = Noise(chosen.seed);
  failed = 0;
  repeated = 0;
}

std::uint64_t num_failed() { return failed; }
std::uint64_t num_repeated() { return repeated; }

}  // namespace hybridkv::testing

// The functions that the queues call.

extern "C" long syscall(long number, ...) noexcept {
  namespace testing = hybridkv::testing;
  va_list list;
  va_start(list, number);
  long argument[6];
  for (long& one : argument) one = va_arg(list, long);
  va_end(list);
  if (number == SYS_io_uring_setup) {
    const long fd = testing::raw(number, argument);
    if (fd >= 0) testing::open_ring(static_cast<int>(fd), *reinterpret_cast<io_uring_params*>(argument[1]));
    return fd;
  }
  if (number != SYS_io_uring_enter) return testing::raw(number, argument);
  const int error = testing::change_handing_over(argument);
  if (error != 0) {
    errno = error;
    return -1;
  }
  const long taken = testing::raw(number, argument);
  const int number_of_error = errno;
  testing::change_completions(static_cast<int>(argument[0]));
  errno = number_of_error;
  return taken;
}

extern "C" ssize_t preadv(int fd, const iovec* extents, int count, off_t offset) {
  return hybridkv::testing::move(SYS_preadv, fd, extents, count, offset);
}

extern "C" ssize_t pwritev(int fd, const iovec* extents, int count, off_t offset) {
  return hybridkv::testing::move(SYS_pwritev, fd, extents, count, offset);
}

extern "C" int fdatasync(int fd) {
  const std::int64_t fate = hybridkv::testing::fate_of(0);
  if (fate < 0) {
    errno = static_cast<int>(-fate);
    return -1;
  }
  return static_cast<int>(syscall(SYS_fdatasync, fd));
}
