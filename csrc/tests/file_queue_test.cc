// Both backends of the file queue handle the same requests identically.
#include "csrc/cpu/file_queue.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "csrc/tests/expect.h"
#include "csrc/tests/few_threads.h"

namespace {

using hybridkv::Digest128;
using hybridkv::cpu::FileBackend;
using hybridkv::cpu::FileCompletion;
using hybridkv::cpu::FileOperation;
using hybridkv::cpu::FileQueue;
using hybridkv::cpu::FileRequest;
using hybridkv::testing::expect;
using hybridkv::testing::Memory;
using hybridkv::testing::Noise;

constexpr double kLongS = 60.0;

class File {
 public:
  explicit File(int flags = 0) {
    const char* directory = std::getenv("TEST_TMPDIR");
    std::string path = std::string(directory == nullptr ? "/tmp" : directory) + "/file_queue_XXXXXX";
    fd_ = mkstemp(path.data());
    expect(fd_ >= 0, "a file can be made: " + path);
    if (flags != 0) {
      close(fd_);
      fd_ = open(path.c_str(), O_RDWR | flags);
    }
    unlink(path.c_str());
  }
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(const File&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

struct Backend {
  std::string name;
  FileBackend backend;
};

std::unique_ptr<FileQueue> queue_of(const Backend& backend, std::size_t max_in_flight) {
  return hybridkv::cpu::make_file_queue(backend.backend, max_in_flight, 3);
}

FileCompletion only(FileQueue& queue, FileRequest request) {
  expect(queue.submit(std::move(request)), "an empty queue takes a request");
  const std::vector<FileCompletion> reaped = queue.reap(1, 8, kLongS);
  expect(reaped.size() == 1 && queue.num_in_flight() == 0, "a request has one completion");
  return reaped[0];
}

FileRequest request(FileOperation operation, int fd, std::int64_t offset, std::vector<iovec> extents,
                    bool wants_digest = false) {
  return {7, operation, fd, offset, std::move(extents), wants_digest};
}

Digest128 digest_of(Memory& memory) { return hybridkv::xxh3::digest(memory.data(), memory.size()); }

// Many records, written and read out of order through a smaller queue.
void check_many(const Backend& backend, const File& file, std::size_t alignment) {
  constexpr std::size_t kNumRecords = 100;
  const std::size_t sizes[] = {alignment, alignment * 3, alignment * 80};
  std::vector<std::unique_ptr<Memory>> written;
  std::vector<std::unique_ptr<Memory>> read;
  std::vector<std::int64_t> offsets;
  std::int64_t end = 0;
  for (std::size_t record = 0; record < kNumRecords; ++record) {
    const std::size_t size = sizes[record % 3];
    written.push_back(std::make_unique<Memory>(size, 0));
    written.back()->fill(record + 1);
    read.push_back(std::make_unique<Memory>(size, 0));
    offsets.push_back(end);
    end += static_cast<std::int64_t>(size);
  }
  const std::unique_ptr<FileQueue> queue = queue_of(backend, 8);
  for (const FileOperation operation : {FileOperation::kWrite, FileOperation::kRead}) {
    const bool reads = operation == FileOperation::kRead;
    std::map<std::int64_t, FileCompletion> completions;
    std::size_t next = 0;
    while (completions.size() < kNumRecords) {
      while (next < kNumRecords) {
        const std::size_t record = (next * 37) % kNumRecords;
        Memory& memory = reads ? *read[record] : *written[record];
        const std::size_t half = memory.size() / 2 / alignment * alignment;
        FileRequest one = request(operation, file.fd(), offsets[record],
                                  {{memory.data(), half}, {memory.data() + half, memory.size() - half}}, reads);
        one.tag = static_cast<std::int64_t>(record);
        if (!queue->submit(std::move(one))) break;
        ++next;
      }
      expect(queue->num_in_flight() == std::min<std::size_t>(8, kNumRecords - completions.size()),
             "the queue uses its limit");
      for (const FileCompletion& one : queue->reap(1, 5, kLongS)) {
        expect(one.error == 0, backend.name + ": no error, " + std::strerror(one.error));
        expect(completions.emplace(one.tag, one).second, backend.name + ": each request completes once");
      }
    }
    for (std::size_t record = 0; record < kNumRecords; ++record) {
      const FileCompletion& one = completions[static_cast<std::int64_t>(record)];
      expect(one.num_bytes == static_cast<std::int64_t>(written[record]->size()), backend.name + ": all bytes moved");
      if (!reads) continue;
      expect(std::memcmp(read[record]->data(), written[record]->data(), written[record]->size()) == 0,
             backend.name + ": a read returns the written bytes");
      expect(one.digest == digest_of(*written[record]), backend.name + ": a read returns the digest");
    }
  }
  expect(only(*queue, request(FileOperation::kSyncData, file.fd(), 0, {})).error == 0,
         backend.name + ": data is synced");
}

void check_edges(const Backend& backend) {
  const File file;
  const std::unique_ptr<FileQueue> queue = queue_of(backend, 2);
  Memory written(10000, 0);
  written.fill(3);
  expect(queue->reap(1, 8, kLongS).empty(), backend.name + ": an empty queue does not wait");
  expect(only(*queue, request(FileOperation::kWrite, file.fd(), 5, {{written.data(), written.size()}})).error == 0,
         backend.name + ": a write at an unaligned offset");

  // More extents than one system call accepts, including empty ones.
  Memory read(written.size(), 0);
  std::vector<iovec> extents;
  for (std::size_t byte = 0; byte < read.size(); byte += 4) {
    extents.push_back({read.data() + byte, 4});
    extents.push_back({nullptr, 0});
  }
  FileCompletion one = only(*queue, request(FileOperation::kRead, file.fd(), 5, extents, true));
  expect(one.error == 0 && one.digest == digest_of(written), backend.name + ": any number of extents");
  expect(std::memcmp(read.data(), written.data(), read.size()) == 0, backend.name + ": extents are read in order");

  one = only(*queue, request(FileOperation::kRead, file.fd(), 9005, {{read.data(), 2000}}, true));
  expect(one.error == ENODATA && one.num_bytes == 1000 && one.digest == Digest128{},
         backend.name + ": a file that ends too early is an error, and has no digest");
  one = only(*queue, request(FileOperation::kRead, -1, 0, {{read.data(), 10}}));
  expect(one.error == EBADF && one.num_bytes == 0, backend.name + ": a bad descriptor is this request's error");
  one = only(*queue, request(FileOperation::kRead, file.fd(), 0, {}));
  expect(one.error == 0 && one.num_bytes == 0, backend.name + ": no extents, no bytes");

  for (int taken = 0; taken < 2; ++taken) {
    // Each reads into its own buffer, because both may be read concurrently.
    expect(queue->submit(request(FileOperation::kRead, file.fd(), 5, {{read.data() + 10 * taken, 10}})),
           "the queue takes a request");
  }
  expect(!queue->submit(request(FileOperation::kRead, file.fd(), 5, {{read.data(), 10}})),
         backend.name + ": a full queue refuses");
  expect(queue->reap(2, 1, kLongS).size() == 1, backend.name + ": reap returns at most its capacity");
  expect(queue->reap(2, 8, kLongS).size() == 1, backend.name + ": the next reap returns the rest");
}

// A read of a pipe ends after a write to it; until then a request is in flight.
void check_timeout(const Backend& backend) {
  int ends[2];
  expect(pipe(ends) == 0, "a pipe can be made");
  char byte = 0;
  {
    const std::unique_ptr<FileQueue> queue = queue_of(backend, 2);
    FileRequest waits = request(FileOperation::kRead, ends[0], 0, {{&byte, 1}});
    waits.offset = -1;
    expect(queue->submit(std::move(waits)), "the queue takes a request");
    const bool can_wait = backend.backend == FileBackend::kUring;  // preadv refuses pipes
    expect(queue->reap(can_wait ? 1 : 0, 8, 0.01).empty() || !can_wait,
           backend.name + ": a wait ends after its timeout");
    expect(write(ends[1], "x", 1) == 1, "a byte is written");
    const std::vector<FileCompletion> reaped = queue->reap(1, 8, kLongS);
    if (can_wait)
      expect(reaped.size() == 1 && reaped[0].error == 0 && byte == 'x',
             backend.name + ": the read ends after the write");
    // The destructor waits for requests in flight.
    expect(queue->submit(request(FileOperation::kSyncData, ends[0], 0, {})), "the queue takes a request");
  }
  close(ends[0]);
  close(ends[1]);
}

// Timeouts that are longer than a clock can represent.
void check_long_waits(const Backend& backend) {
  const File file;
  const std::unique_ptr<FileQueue> queue = queue_of(backend, 1);
  Memory memory(100000, 0);
  for (const double timeout_s : {std::numeric_limits<double>::infinity(), 1e300, 9223372036.0}) {
    for (int turn = 0; turn < 20; ++turn) {
      expect(queue->submit(request(FileOperation::kWrite, file.fd(), 0, {{memory.data(), memory.size()}})),
             "a request");
      expect(queue->reap(1, 8, timeout_s).size() == 1, backend.name + ": a long wait does not end early");
    }
  }
  expect(queue->submit(request(FileOperation::kWrite, file.fd(), 0, {{memory.data(), memory.size()}})), "a request");
  std::size_t num_ended = 0;
  while (num_ended == 0) {
    for (const double timeout_s : {-1.0, std::numeric_limits<double>::quiet_NaN()}) {
      num_ended += queue->reap(1, 8, timeout_s).size();
    }
  }
  expect(num_ended == 1, backend.name + ": an invalid timeout is no wait");
}

void check_few_threads() {
  const File file;
  const hybridkv::testing::FewThreads few(2);
  const std::unique_ptr<FileQueue> queue = hybridkv::cpu::make_file_queue(FileBackend::kThreads, 8, 64);
  Memory memory(10000, 0);
  for (std::int64_t number = 0; number < 8; ++number) {
    expect(queue->submit(request(FileOperation::kWrite, file.fd(), number, {{memory.data(), memory.size()}})),
           "the queue takes as many requests as before");
  }
  std::size_t num_ended = 0;
  while (num_ended < 8) num_ended += queue->reap(1, 8, kLongS).size();
}

// With the seccomp rules of some containers a ring can be made but not used. Runs in a child: rules are permanent.
void check_refused_enter() {
  const pid_t child = fork();
  if (child == 0) {
    sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_enter, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{sizeof rules / sizeof rules[0], rules};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
      std::puts("this process cannot set seccomp rules: that part did not run");
      _exit(EXIT_SUCCESS);
    }
    const bool is_refused = hybridkv::cpu::make_file_queue(FileBackend::kUring, 4, 1) == nullptr && errno == EPERM;
    _exit(is_refused ? EXIT_SUCCESS : EXIT_FAILURE);
  }
  int status = 0;
  expect(waitpid(child, &status, 0) == child && status == 0,
         "a ring that cannot be used counts as missing, and errno has the reason");
}

// A missing resource may be available at the next call, so the result is not cached. In a child, before the first call.
void check_lacking_ring() {
  const pid_t child = fork();
  if (child == 0) {
    rlimit files{};
    getrlimit(RLIMIT_NOFILE, &files);
    const rlimit none{0, files.rlim_max};
    setrlimit(RLIMIT_NOFILE, &none);
    const bool has_without = hybridkv::cpu::has_uring();
    setrlimit(RLIMIT_NOFILE, &files);
    const bool has_with = hybridkv::cpu::make_file_queue(FileBackend::kUring, 1, 1) != nullptr;
    _exit(!has_without && hybridkv::cpu::has_uring() == has_with ? EXIT_SUCCESS : EXIT_FAILURE);
  }
  int status = 0;
  expect(waitpid(child, &status, 0) == child && status == 0, "a missing ring is tried again");
  expect(hybridkv::cpu::is_passing(EAGAIN) && hybridkv::cpu::is_passing(EMFILE), "missing resources are temporary");
  expect(!hybridkv::cpu::is_passing(EPERM) && !hybridkv::cpu::is_passing(ENOSYS), "refusals are permanent");
}

}  // namespace

int main() {
  check_lacking_ring();
  std::vector<Backend> backends = {{"threads", FileBackend::kThreads}};
  if (hybridkv::cpu::has_uring()) {
    backends.push_back({"io_uring", FileBackend::kUring});
    check_refused_enter();
  } else {
    expect(hybridkv::cpu::make_file_queue(FileBackend::kUring, 4, 1) == nullptr,
           "without io_uring there is no such queue");
    std::puts("io_uring is not available: its half of the test did not run");
  }
  for (const Backend& backend : backends) {
    check_many(backend, File(), 100);
    const File direct(O_DIRECT);
    if (direct.fd() >= 0) {
      check_many(backend, direct, 4096);
    } else {
      std::puts("this file system has no O_DIRECT: that part did not run");
    }
    check_edges(backend);
    check_timeout(backend);
    check_long_waits(backend);
  }
  check_few_threads();
}
