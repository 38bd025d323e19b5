// Reads and writes many pieces of files at once: requests in, completions out, no order between them.
//
// Two backends do the same: io_uring, spoken to by system calls alone, where the kernel has it and lets us; and threads
// that call preadv and pwritev everywhere else. Memory and file positions are the caller's, who aligns both where a
// file was opened with O_DIRECT. A queue keeps no data, opens and closes no file, and knows no format.
#ifndef HYBRIDKV_CPU_FILE_QUEUE_H_
#define HYBRIDKV_CPU_FILE_QUEUE_H_

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "hybridkv/xxh3.h"

namespace hybridkv::cpu {

enum class FileOperation : std::int32_t { kRead = 0, kWrite = 1, kSyncData = 2 };

// `extents` in order are the bytes of the file from `offset` on. They must stay valid until the completion was reaped.
// kSyncData takes neither; it covers what was written by requests that were reaped before.
struct FileRequest {
  std::int64_t tag;  // comes back with the completion; means nothing here
  FileOperation operation;
  int fd;
  std::int64_t offset;
  std::vector<iovec> extents;
  bool wants_digest;  // of a read: XXH3-128 of all its bytes, taken while other requests are in flight
};

struct FileCompletion {
  std::int64_t tag;
  int error;               // 0, or an errno; ENODATA when the file ended before the extents did
  std::int64_t num_bytes;  // that were moved, also when there was an error
  Digest128 digest;        // zeros when none was asked for, or not all bytes came
};

enum class FileBackend { kUring, kThreads };

// Whether this kernel lets this process use io_uring, with what the queue needs of it. Looked up once, unless something
// was lacking: then it is asked again at the next call.
bool has_uring();

// Whether an errno with which io_uring was not to be had says that something is lacking now, memory or files, say.
bool is_passing(int uring_error);

// For one thread, which outlives what it has in flight: the kernel cancels what a thread asked of io_uring when that
// thread ends. While nothing is in flight another thread may take over.
class FileQueue {
 public:
  virtual ~FileQueue() = default;
  virtual FileBackend backend() const = 0;
  virtual std::size_t max_in_flight() const = 0;
  // Not reaped yet.
  virtual std::size_t num_in_flight() const = 0;

  // Starts the request. False, and nothing is done, when `max_in_flight` are. Nothing is done either when it throws.
  virtual bool submit(FileRequest request) = 0;

  // Waits for at least `min_completions`, but no longer than `timeout_s`, no longer than there is something in flight,
  // and not when it was woken. Returns at most `capacity` completions, each once.
  virtual std::vector<FileCompletion> reap(std::size_t min_completions, std::size_t capacity, double timeout_s) = 0;

  // Ends the wait of `reap`, of the next one if there is none now. The one call that any thread may make.
  virtual void wake() = 0;
};

// `max_in_flight` between 1 and 4096. With kUring where the kernel does not let us use a ring of that size: null, and
// errno says why. With kThreads fewer than `num_threads` where the system gives no more, std::system_error where it
// gives none. Destroying a queue waits for what is in flight, since the kernel still writes to its memory.
std::unique_ptr<FileQueue> make_file_queue(FileBackend backend, std::size_t max_in_flight, std::size_t num_threads);

inline constexpr std::size_t kMaxInFlight = 4096;

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_FILE_QUEUE_H_
