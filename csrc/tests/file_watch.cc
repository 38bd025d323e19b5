// Preloaded into a process (LD_PRELOAD): logs all writes and syncs that the process submits to the kernel, and when
// each ended, by io_uring, by the threads of a file queue, and by Python. A test uses the log to compute what a loss
// of power would leave. The library under test is not changed.
//
// It reads the entries of a ring when they are submitted, and completions where the kernel writes them. So the log has
// the requests that the kernel really got. Every write to the log first reads the rings, so anything that depends on a
// completion is logged after that completion.
//
// It does not log reads, directories or sizes; the process notes the last two itself.
#include <dlfcn.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

enum Kind : std::uint32_t { kWrite = 1, kSync = 2, kEnd = 3, kNote = 4, kUnknown = 5 };

// Entry of the log, followed by `data_bytes` bytes.
struct Event {
  Kind kind;
  std::int32_t result;  // for kEnd: that of the system call; for kUnknown: the operation
  std::uint64_t id;     // for kWrite, kSync and their kEnd
  std::uint64_t inode;
  std::int64_t offset;
  std::uint64_t data_bytes;
};
static_assert(sizeof(Event) == 40);

struct Ring {
  int fd;
  io_uring_params parameters;
  char* submissions = nullptr;
  char* completions = nullptr;
  char* entries = nullptr;
  std::uint32_t num_seen = 0;                     // completions
  std::map<std::uint64_t, std::uint64_t> id_of{};  // by user_data, for requests in flight
};

std::mutex mutex;
std::vector<Ring> rings;
int log_fd = -1;
bool forgets_syncs = false;
std::uint64_t next_id = 1;

std::uint32_t load(char* ring, std::uint32_t offset) {
  return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(ring + offset)).load(std::memory_order_acquire);
}

template <typename Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

// The mutex must be held from here on.

void write_log(Event event, const iovec* data, std::size_t count) {
  std::vector<iovec> parts = {{&event, sizeof event}};
  for (std::size_t part = 0; part < count; ++part) event.data_bytes += data[part].iov_len;
  parts.insert(parts.end(), data, data + count);
  for (const iovec& part : parts) {
    for (std::size_t done = 0; done < part.iov_len;) {
      const ssize_t written = write(log_fd, static_cast<char*>(part.iov_base) + done, part.iov_len - done);
      if (written < 0 && errno != EINTR) std::abort();  // a log with a gap proves nothing
      if (written > 0) done += static_cast<std::size_t>(written);
    }
  }
}

std::uint64_t begin(Kind kind, int fd, std::int64_t offset, const iovec* data, std::size_t count) {
  struct stat found {};
  fstat(fd, &found);
  write_log({kind, 0, next_id, found.st_ino, offset, 0}, data, count);
  return next_id++;
}

void end(std::uint64_t id, std::int64_t result) {
  write_log({kEnd, static_cast<std::int32_t>(result), id, 0, 0, 0}, nullptr, 0);
}

void look_at_completions(Ring& ring) {
  if (ring.completions == nullptr) return;
  const io_cqring_offsets& at = ring.parameters.cq_off;
  const std::uint32_t mask = load(ring.completions, at.ring_mask);
  for (const std::uint32_t tail = load(ring.completions, at.tail); ring.num_seen != tail; ++ring.num_seen) {
    const auto* entries = reinterpret_cast<const io_uring_cqe*>(ring.completions + at.cqes);
    const io_uring_cqe& entry = entries[ring.num_seen & mask];
    const auto found = ring.id_of.find(entry.user_data);
    if (found == ring.id_of.end()) continue;
    if (log_fd >= 0) end(found->second, entry.res);
    ring.id_of.erase(found);
  }
}

void look() {
  for (Ring& ring : rings) look_at_completions(ring);
}

void begin_entry(Ring& ring, io_uring_sqe& entry) {
  if (entry.opcode == IORING_OP_WRITEV && entry.flags == 0) {
    const auto* extents = reinterpret_cast<const iovec*>(entry.addr);
    ring.id_of[entry.user_data] = begin(kWrite, entry.fd, static_cast<std::int64_t>(entry.off), extents, entry.len);
  } else if (entry.opcode == IORING_OP_FSYNC && entry.flags == 0) {
    if (forgets_syncs) {
      entry.opcode = IORING_OP_NOP;
      entry.fsync_flags = 0;
    } else {
      ring.id_of[entry.user_data] = begin(kSync, entry.fd, 0, nullptr, 0);
    }
  } else if (entry.flags != 0 || (entry.opcode != IORING_OP_NOP && entry.opcode != IORING_OP_READV &&
                                  entry.opcode != IORING_OP_POLL_ADD)) {
    // Linked, drained, or an unknown operation. A reader of the log must handle it explicitly.
    write_log({kUnknown, entry.opcode, 0, 0, entry.flags, 0}, nullptr, 0);
  }
}

// Entries that the kernel has not taken yet. An entry that it does not take now is submitted again as a new one.
void look_at_entries(Ring& ring) {
  if (log_fd < 0 || ring.submissions == nullptr || ring.entries == nullptr) return;
  const io_sqring_offsets& at = ring.parameters.sq_off;
  const std::uint32_t mask = load(ring.submissions, at.ring_mask);
  const std::uint32_t tail = load(ring.submissions, at.tail);
  const auto* order = reinterpret_cast<const std::uint32_t*>(ring.submissions + at.array);
  for (std::uint32_t place = load(ring.submissions, at.head); place != tail; ++place) {
    begin_entry(ring, reinterpret_cast<io_uring_sqe*>(ring.entries)[order[place & mask]]);
  }
}

Ring* ring_of(int fd) {
  for (Ring& ring : rings) {
    if (ring.fd == fd) return &ring;
  }
  return nullptr;
}

// The mutex is not held from here on.

template <typename Call>
auto logged(Kind kind, int fd, std::int64_t offset, const iovec* data, int count, const Call& call) {
  std::uint64_t id = 0;
  {
    const std::lock_guard lock(mutex);
    if (log_fd >= 0) {
      look();
      if (kind == kSync && forgets_syncs) return decltype(call()){0};
      id = begin(kind, fd, offset, data, static_cast<std::size_t>(count));
    }
  }
  const auto result = call();
  const int error = errno;
  if (id != 0) {
    const std::lock_guard lock(mutex);
    look();
    end(id, result < 0 ? -error : static_cast<std::int64_t>(result));
    errno = error;
  }
  return result;
}

}  // namespace

// Starts to log into this descriptor. With `forgets`, syncs report success without a sync: a negative control.
EXPORTED void file_watch_start(int fd, bool forgets) {
  const std::lock_guard lock(mutex);
  look();
  log_fd = fd;
  forgets_syncs = forgets;
}

// Logs a note of the process, in order with the other entries.
EXPORTED void file_watch_note(const char* text, std::size_t num_bytes) {
  const std::lock_guard lock(mutex);
  if (log_fd < 0) return;
  look();
  const iovec data{const_cast<char*>(text), num_bytes};
  write_log({kNote, 0, 0, 0, 0, 0}, &data, 1);
}

// Functions of the C library that the process calls.

EXPORTED long syscall(long number, ...) noexcept {
  static auto* const real = next<long(long, ...)>("syscall");
  va_list list;
  va_start(list, number);
  long argument[6];
  for (long& one : argument) one = va_arg(list, long);
  va_end(list);
  const auto call = [&] {
    return real(number, argument[0], argument[1], argument[2], argument[3], argument[4], argument[5]);
  };
  if (number == SYS_io_uring_setup) {
    const long fd = call();
    const std::lock_guard lock(mutex);
    if (fd >= 0) rings.push_back({static_cast<int>(fd), *reinterpret_cast<io_uring_params*>(argument[1])});
    return fd;
  }
  if (number != SYS_io_uring_enter) return call();
  {
    const std::lock_guard lock(mutex);
    look();
    if (Ring* ring = ring_of(static_cast<int>(argument[0]))) look_at_entries(*ring);
  }
  return call();
}

EXPORTED void* mmap(void* start, std::size_t num_bytes, int access, int flags, int fd, off_t offset) noexcept {
  static auto* const real = next<void*(void*, std::size_t, int, int, int, off_t)>("mmap");
  void* mapped = real(start, num_bytes, access, flags, fd, offset);
  if (fd < 0 || mapped == MAP_FAILED) return mapped;
  const std::lock_guard lock(mutex);
  Ring* ring = ring_of(fd);
  if (ring == nullptr) return mapped;
  const auto at = static_cast<std::uint64_t>(offset);
  (at == IORING_OFF_SQES ? ring->entries : at == IORING_OFF_CQ_RING ? ring->completions : ring->submissions) =
      static_cast<char*>(mapped);
  return mapped;
}

EXPORTED int munmap(void* start, std::size_t num_bytes) noexcept {
  static auto* const real = next<int(void*, std::size_t)>("munmap");
  {
    const std::lock_guard lock(mutex);
    for (std::size_t place = 0; place < rings.size(); ++place) {
      Ring& ring = rings[place];
      if (start != ring.submissions && start != ring.completions && start != ring.entries) continue;
      look_at_completions(ring);
      rings.erase(rings.begin() + static_cast<std::ptrdiff_t>(place));
      break;
    }
  }
  return real(start, num_bytes);
}

EXPORTED ssize_t pwritev(int fd, const iovec* data, int count, off_t offset) {
  static auto* const real = next<ssize_t(int, const iovec*, int, off_t)>("pwritev");
  return logged(kWrite, fd, offset, data, count, [&] { return real(fd, data, count, offset); });
}

EXPORTED ssize_t pwritev64v2(int fd, const iovec* data, int count, off_t offset, int flags) {
  static auto* const real = next<ssize_t(int, const iovec*, int, off_t, int)>("pwritev64v2");
  return logged(kWrite, fd, offset, data, count, [&] { return real(fd, data, count, offset, flags); });
}

EXPORTED int fsync(int fd) {
  static auto* const real = next<int(int)>("fsync");
  return logged(kSync, fd, 0, nullptr, 0, [&] { return real(fd); });
}

EXPORTED int fdatasync(int fd) {
  static auto* const real = next<int(int)>("fdatasync");
  return logged(kSync, fd, 0, nullptr, 0, [&] { return real(fd); });
}
