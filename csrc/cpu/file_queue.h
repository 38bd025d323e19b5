// Queue of file reads and writes. Completions come in any order.
//
// It has two backends: io_uring, by system calls alone, if the kernel has and permits it; otherwise threads that call
// preadv and pwritev. The caller owns the memory, and aligns memory and offsets for files opened with O_DIRECT. A queue
// keeps no data, opens and closes no file, and does not depend on a file format.
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

// The joined `extents` are the bytes of the file from `offset` on. They must stay valid until the completion is reaped.
// kSyncData uses neither; it covers the writes that were reaped before.
struct FileRequest {
  std::int64_t tag;  // the completion returns it
  FileOperation operation;
  int fd;
  std::int64_t offset;
  std::vector<iovec> extents;
  bool wants_digest;  // reads only: XXH3-128 of all bytes, computed while other requests are in flight
};

struct FileCompletion {
  std::int64_t tag;
  int error;               // 0, or an errno; ENODATA if the file is too short
  std::int64_t num_bytes;  // bytes moved, also after an error
  Digest128 digest;        // zeros if it was not requested, or not all bytes were read
};

enum class FileBackend { kUring, kThreads };

// True if this process may use io_uring with the features that the queue needs. The answer is cached, except after a
// temporary error.
bool has_uring();

// True for an errno of a temporary shortage, such as of memory or file descriptors.
bool is_passing(int uring_error);

// For one thread, which must outlive its requests: the kernel cancels the io_uring requests of a thread that ends.
// Another thread may take over while nothing is in flight.
class FileQueue {
 public:
  virtual ~FileQueue() = default;
  virtual FileBackend backend() const = 0;
  virtual std::size_t max_in_flight() const = 0;
  // Requests that are not reaped yet.
  virtual std::size_t num_in_flight() const = 0;

  // Starts a request. False, without any effect, if `max_in_flight` requests are in flight. No effect if it throws.
  virtual bool submit(FileRequest request) = 0;

  // Waits until there are `min_completions`, nothing is in flight, `timeout_s` has passed, or `wake` is called. Returns
  // at most `capacity` completions, each once.
  virtual std::vector<FileCompletion> reap(std::size_t min_completions, std::size_t capacity, double timeout_s) = 0;

  // Ends the wait of the current `reap`, or of the next one. The only call for any thread.
  virtual void wake() = 0;
};

// Makes a queue for 1 to 4096 requests in flight. kUring: null, with errno set, if the kernel refuses a ring of that
// size. kThreads: fewer than `num_threads` if the system permits no more; std::system_error if it permits none. The
// destructor of a queue waits for requests in flight, because the kernel still writes to their memory.
std::unique_ptr<FileQueue> make_file_queue(FileBackend backend, std::size_t max_in_flight, std::size_t num_threads);

inline constexpr std::size_t kMaxInFlight = 4096;

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_FILE_QUEUE_H_
