// Random sequences of requests, on either backend, over a kernel with injected faults, leave the same bytes as a model.
// Two requests for the same bytes are not in flight together if one of them writes, because the result is undefined.
#include "csrc/cpu/file_queue.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/tests/expect.h"
#include "csrc/tests/faulty_kernel.h"
#include "csrc/tests/fuzz.h"

namespace {

using hybridkv::cpu::FileBackend;
using hybridkv::cpu::FileCompletion;
using hybridkv::cpu::FileOperation;
using hybridkv::cpu::FileQueue;
using hybridkv::testing::Choices;
using hybridkv::testing::expect;
using hybridkv::testing::Memory;

constexpr double kLongS = 50.0;
constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kLargestFileBytes = 40 * kPageBytes;
constexpr std::size_t kMaxSteps = 120;

// A file and its expected content.
class File {
 public:
  explicit File(bool is_direct) : is_direct_(is_direct) {
    const char* directory = std::getenv("TEST_TMPDIR");
    std::string path = std::string(directory == nullptr ? "/tmp" : directory) + "/file_queue_fuzz_XXXXXX";
    plain_ = mkstemp(path.data());
    expect(plain_ >= 0, "a file can be made: " + path);
    fd_ = open(path.c_str(), O_RDWR | (is_direct ? O_DIRECT : 0));
    if (fd_ < 0) {  // a file system without O_DIRECT
      is_direct_ = false;
      fd_ = open(path.c_str(), O_RDWR);
    }
    read_only_ = open(path.c_str(), O_RDONLY);
    unlink(path.c_str());
  }
  ~File() {
    for (const int fd : {plain_, fd_, read_only_}) close(fd);
  }
  File(const File&) = delete;

  int fd() const { return fd_; }
  int read_only() const { return read_only_; }
  std::size_t unit() const { return is_direct_ ? kPageBytes : 1; }
  std::size_t size() const { return bytes_.size(); }

  void wrote(std::size_t offset, const unsigned char* data, std::size_t num_bytes) {
    if (num_bytes == 0) return;
    grow(offset + num_bytes, 0);
    std::copy_n(data, num_bytes, bytes_.begin() + static_cast<std::ptrdiff_t>(offset));
  }
  // After a failed write: a part of it may be in the file, which is read to update the model.
  void may_have_written(std::size_t offset, std::size_t num_bytes) {
    struct stat found {};
    expect(fstat(plain_, &found) == 0, "a file has a size");
    grow(static_cast<std::size_t>(found.st_size), 0);
    for (std::size_t byte = offset; byte < std::min(offset + num_bytes, bytes_.size()); ++byte) bytes_[byte] = kUnknown;
  }
  void resize(std::size_t num_bytes) {
    expect(ftruncate(plain_, static_cast<off_t>(num_bytes)) == 0, "a file can be cut");
    bytes_.resize(num_bytes, 0);
  }
  bool holds(std::size_t offset, const unsigned char* data, std::size_t num_bytes) const {
    for (std::size_t byte = 0; byte < num_bytes; ++byte) {
      if (bytes_[offset + byte] != kUnknown && bytes_[offset + byte] != data[byte]) return false;
    }
    return true;
  }
  void check() const {
    std::vector<unsigned char> found(bytes_.size() + 1);
    const ssize_t got = pread(plain_, found.data(), found.size(), 0);
    expect(got == static_cast<ssize_t>(bytes_.size()), "the file is as long as the model");
    expect(holds(0, found.data(), bytes_.size()), "the file equals the model");
  }

 private:
  static constexpr short kUnknown = -1;
  void grow(std::size_t num_bytes, short with) {
    if (num_bytes > bytes_.size()) bytes_.resize(num_bytes, with);
  }

  bool is_direct_;
  int plain_;
  int fd_;
  int read_only_;
  std::vector<short> bytes_;
};

struct Pending {
  FileOperation operation;
  File* file;
  std::size_t offset;
  std::size_t num_bytes;
  int error;  // expected result, if no fault is injected
  bool wants_digest;
  std::unique_ptr<Memory> memory;

  std::size_t end() const { return offset + num_bytes; }
  bool writes() const { return operation == FileOperation::kWrite && error == 0; }
};

class Session {
 public:
  Session(FileBackend backend, bool is_direct, Choices& choices) : choices_(choices) {
    files_[0] = std::make_unique<File>(false);
    files_[1] = std::make_unique<File>(is_direct);
    max_in_flight_ = choices_.between(1, 9);
    queue_ = hybridkv::cpu::make_file_queue(backend, max_in_flight_, choices_.between(1, 4));
    expect(queue_ != nullptr && queue_->max_in_flight() == max_in_flight_, "a queue can be made");
  }

  void run() {
    for (std::size_t step = 0; step < kMaxSteps && !choices_.is_used_up(); ++step) {
      switch (choices_.below(10)) {
        case 0:
        case 1:
        case 2:
          reap(choices_.below(max_in_flight_ + 2), choices_.below(max_in_flight_ + 2), choices_.below(3));
          break;
        case 3:
          wake();
          break;
        case 4:
          resize();
          break;
        default:
          submit();
      }
    }
    // Some queues are destroyed with requests in flight, for which the destructor waits.
    const bool is_cut_off = choices_.one_in(3);
    while (!is_cut_off && !pending_.empty()) reap(pending_.size(), max_in_flight_, 2);
    queue_.reset();
    for (auto& [tag, one] : pending_) {
      if (one.writes()) one.file->may_have_written(one.offset, one.num_bytes);
    }
    for (const auto& file : files_) file->check();
  }

 private:
  void submit() {
    Pending one{};
    one.file = files_[choices_.below(2)].get();
    one.operation = static_cast<FileOperation>(choices_.below(3));
    const std::size_t unit = one.file->unit();
    const bool is_sync = one.operation == FileOperation::kSyncData;
    one.num_bytes = is_sync ? 0 : choices_.below(choices_.one_in(4) ? 12 * kPageBytes : 700) * unit % (13 * kPageBytes);
    one.offset = choices_.below(kLargestFileBytes - one.num_bytes) / unit * unit;
    if (collides(one)) return;
    one.wants_digest = choices_.one_in(2);
    one.memory = std::make_unique<Memory>(one.num_bytes, one.file->unit() == 1 ? choices_.below(64) : 0);
    if (one.operation == FileOperation::kWrite) one.memory->fill(++num_submitted_);
    int fd = one.file->fd();
    if (choices_.one_in(12) && one.num_bytes > 0) {
      fd = one.operation == FileOperation::kWrite ? one.file->read_only() : -1;
      one.error = EBADF;
    } else if (one.operation == FileOperation::kRead && one.end() > one.file->size() && one.num_bytes > 0) {
      one.error = ENODATA;
    }
    const bool is_taken = queue_->submit({next_tag_, one.operation, fd, static_cast<std::int64_t>(one.offset),
                                          extents_of(*one.memory, unit), one.wants_digest});
    expect(is_taken == (pending_.size() < max_in_flight_), "a queue takes requests up to its limit");
    if (is_taken) pending_.emplace(next_tag_++, std::move(one));
    expect(queue_->num_in_flight() == pending_.size(), "the queue counts the requests in flight");
  }

  bool collides(const Pending& one) const {
    for (const auto& [tag, other] : pending_) {
      if (other.file != one.file) continue;
      const bool overlaps = one.offset < other.end() && other.offset < one.end();
      const bool either_writes =
          one.operation == FileOperation::kWrite || other.operation == FileOperation::kWrite;
      // Reads past the end depend on the size of the file.
      const bool moves_the_end = std::max(one.end(), other.end()) > one.file->size();
      if (either_writes && (overlaps || moves_the_end)) return true;
    }
    return false;
  }

  // The memory as extents, some of them empty; sometimes more than the limit of one system call.
  std::vector<iovec> extents_of(Memory& memory, std::size_t unit) {
    std::vector<iovec> extents;
    const std::size_t largest = choices_.one_in(5) ? 2 : memory.size() / unit + 1;
    for (std::size_t at = 0; at < memory.size();) {
      const std::size_t count = std::min(choices_.between(extents.size() % 2, largest) * unit, memory.size() - at);
      extents.push_back({memory.data() + at, count});
      at += count;
      if (choices_.is_used_up() && at < memory.size()) {
        extents.push_back({memory.data() + at, memory.size() - at});
        break;
      }
    }
    return extents;
  }

  void reap(std::size_t min_completions, std::size_t capacity, std::uint64_t patience) {
    const double timeouts_s[] = {0.0, 0.0005, kLongS};
    const std::size_t wanted = std::min({min_completions, capacity, pending_.size()});
    const std::vector<FileCompletion> reaped = queue_->reap(min_completions, capacity, timeouts_s[patience]);
    expect(reaped.size() <= capacity, "reap returns at most its capacity");
    if (patience == 2 && reaped.size() < wanted) {
      expect(num_wakes_ > 0, "a long wait returns completions, unless it was woken");
      --num_wakes_;
    }
    for (const FileCompletion& completion : reaped) end(completion);
    expect(queue_->num_in_flight() == pending_.size(), "reaped requests are no longer in flight");
  }

  void end(const FileCompletion& completion) {
    const auto found = pending_.find(completion.tag);
    expect(found != pending_.end(), "a request ends once");
    Pending one = std::move(found->second);
    pending_.erase(found);
    const auto moved = static_cast<std::size_t>(completion.num_bytes);
    const bool has_failed = completion.error == EIO || completion.error == ENOMEM;
    if (has_failed) expect(hybridkv::testing::num_failed() > 0, "a request fails only with an injected fault");
    if (!has_failed) {
      expect(completion.error == one.error, "it ends with " + std::to_string(one.error) + ", not " + std::to_string(completion.error));
    }
    expect(moved <= one.num_bytes, "at most the requested bytes are moved");
    if (completion.error == 0) expect(moved == one.num_bytes, "a successful request moves all bytes");
    if (one.writes()) {
      one.file->may_have_written(one.offset, has_failed ? one.num_bytes : 0);
      one.file->wrote(one.offset, one.memory->data(), moved);
    } else if (one.operation == FileOperation::kRead) {
      check_read(one, completion, moved);
    }
  }

  void check_read(Pending& one, const FileCompletion& completion, std::size_t moved) {
    const std::size_t size = one.file->size();
    if (completion.error == ENODATA) {
      expect(moved == (one.offset < size ? size - one.offset : 0), "a read moves bytes up to the end of the file");
    }
    expect(one.file->holds(one.offset, one.memory->data(), moved), "a read returns the written bytes");
    const bool has_digest = one.wants_digest && completion.error == 0;
    const hybridkv::Digest128 digest =
        has_digest ? hybridkv::xxh3::digest(one.memory->data(), one.num_bytes) : hybridkv::Digest128{};
    expect(completion.digest == digest, "a completion has the digest, if requested");
    const std::vector<unsigned char>& all = one.memory->everything();
    const auto inside = static_cast<std::size_t>(one.memory->data() - all.data());
    for (std::size_t byte = 0; byte < all.size(); ++byte) {
      if (byte >= inside && byte < inside + one.num_bytes) continue;
      expect(all[byte] == hybridkv::testing::kPoison, "no byte around the memory changes");
    }
  }

  void wake() {
    ++num_wakes_;
    if (choices_.one_in(2)) {
      queue_->wake();
      return;
    }
    std::thread other([this] { queue_->wake(); });
    reap(1, max_in_flight_, 2);
    other.join();
  }

  void resize() {
    if (!pending_.empty()) return;
    files_[choices_.below(2)]->resize(choices_.below(kLargestFileBytes));
  }

  Choices& choices_;
  std::array<std::unique_ptr<File>, 2> files_;
  std::size_t max_in_flight_ = 0;
  // Declared after the memory: its destructor waits for requests in flight.
  std::map<std::int64_t, Pending> pending_;
  std::unique_ptr<FileQueue> queue_;
  std::int64_t next_tag_ = 1;
  std::uint64_t num_submitted_ = 0;
  std::size_t num_wakes_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Choices choices(data, size);
  const bool has_uring = hybridkv::cpu::has_uring();
  const FileBackend backend = has_uring && choices.one_in(2) ? FileBackend::kUring : FileBackend::kThreads;
  hybridkv::testing::set_faults({});
  try {
    const bool is_direct = choices.one_in(2);
    Session session(backend, is_direct, choices);
    const std::uint64_t rates[] = {0, 0, 30, 3};
    hybridkv::testing::set_faults({choices.below(1 << 16), rates[choices.below(4)], rates[choices.below(4)],
                                   choices.one_in(4) ? 20u : 0u, is_direct ? kPageBytes : 1});
    session.run();
  } catch (const std::exception& error) {
    expect(false, std::string("no exception is thrown: ") + error.what());
  }
  return 0;
}
