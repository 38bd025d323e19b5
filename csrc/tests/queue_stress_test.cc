// Many threads call one queue until it is closed during their calls. Every record ends once. Under the thread sanitizer
// this test would show a race. It begins there with a negative control: two threads use a file queue, which is for one
// thread, and the sanitizer must report that.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "csrc/cpu/file_queue.h"
#include "csrc/cpu/record_queue.h"
#include "csrc/tests/expect.h"

namespace {

using hybridkv::cpu::FileBackend;
using hybridkv::cpu::FileOperation;
using hybridkv::cpu::FileQueue;
using hybridkv::cpu::kRecordPageBytes;
using hybridkv::cpu::RecordOutcome;
using hybridkv::cpu::RecordQueue;
using hybridkv::testing::expect;
using hybridkv::testing::Memory;
using hybridkv::testing::Noise;

constexpr double kLongS = 60.0;
constexpr std::size_t kDigestAt = 24;
constexpr std::size_t kNumRounds = 12;
constexpr std::int64_t kNumSubmitters = 3;
constexpr std::int64_t kRecordsEach = 60;
constexpr std::size_t kPayloadBytes = 5000;

class File {
 public:
  File() {
    const char* directory = std::getenv("TEST_TMPDIR");
    std::string path = std::string(directory == nullptr ? "/tmp" : directory) + "/queue_stress_XXXXXX";
    fd_ = mkstemp(path.data());
    expect(fd_ >= 0, "a file can be made: " + path);
    unlink(path.c_str());
  }
  ~File() { close(fd_); }
  File(const File&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

// One record for each thread and number, stored by that thread and then loaded.
class Round {
 public:
  Round(FileBackend backend, std::size_t number) : number_(number) {
    for (std::int64_t tag = 0; tag < kNumSubmitters * kRecordsEach; ++tag) {
      memory_.push_back(std::make_unique<Memory>(kPayloadBytes, 0));
      memory_.back()->fill(static_cast<std::uint64_t>(tag));
    }
    const std::size_t max_in_flight = 1 + number % 5;
    queue_ = std::make_unique<RecordQueue>(hybridkv::cpu::make_file_queue(backend, max_in_flight, max_in_flight),
                                           hybridkv::cpu::RecordQueueOptions{1 << 16, kDigestAt});
  }

  void run() {
    std::vector<std::thread> threads;
    for (std::int64_t submitter = 0; submitter < kNumSubmitters; ++submitter) {
      threads.emplace_back([this, submitter] { submit_all(submitter); });
    }
    threads.emplace_back([this] { take_until_closed(); });
    threads.emplace_back([this] { take_until_closed(); });
    threads.emplace_back([this] {
      while (!is_over_) queue_->wait_until_idle(0.0001 * static_cast<double>(1 + queue_->num_transfers() % 3));
    });
    if (number_ % 3 == 0) {  // during the calls
      while (queue_->num_transfers() < 5) std::this_thread::yield();
      queue_->close(0.0);
    }
    for (std::int64_t submitter = 0; submitter < kNumSubmitters; ++submitter) {
      threads[static_cast<std::size_t>(submitter)].join();
    }
    expect(queue_->close(kLongS), "a queue closes");
    is_over_ = true;
    for (std::size_t thread = kNumSubmitters; thread < threads.size(); ++thread) threads[thread].join();
    take();
    expect(num_ended_of_.size() == num_taken_, "every record that was taken has ended");
    for (const auto& [tag, count] : num_ended_of_) expect(count == 1, "each record ends once");
    expect(num_taken_ == 2 * kNumSubmitters * kRecordsEach || number_ % 3 == 0, "an open queue takes all records");
  }

 private:
  void submit_all(std::int64_t submitter) {
    for (std::int64_t number = 0; number < 2 * kRecordsEach; ++number) {
      const bool is_store = number < kRecordsEach;
      const std::int64_t record = submitter * kRecordsEach + number % kRecordsEach;
      Memory& memory = *memory_[static_cast<std::size_t>(record)];
      // Loads have their own memory, since a store may still be in flight.
      auto into = std::make_unique<Memory>(is_store ? 1 : kPayloadBytes, 0);
      unsigned char* payload = is_store ? memory.data() : into->data();
      {
        const std::lock_guard lock(mutex_);
        loaded_.push_back(std::move(into));
      }
      std::vector<unsigned char> header(kDigestAt + 16 + 8);
      std::memcpy(header.data(), &record, sizeof record);
      const bool is_taken =
          queue_->submit({2 * record + is_store, is_store, false, number % 7 == 0, file_.fd(),
                          record * 3 * static_cast<std::int64_t>(kRecordPageBytes), header, {{payload, kPayloadBytes}}});
      if (!is_taken) return;  // the queue is closed
      ++num_taken_;
    }
  }

  void take_until_closed() {
    while (!is_over_) {
      take();
      std::this_thread::yield();
    }
  }

  void take() {
    for (const hybridkv::cpu::RecordCompletion& completion : queue_->take()) {
      const bool is_load = completion.tag % 2 == 0;  // the record may not be stored yet
      const bool is_right = completion.outcome == RecordOutcome::kDone ||
                            completion.outcome == RecordOutcome::kCancelled || is_load;
      expect(is_right, "a record ends with a valid outcome");
      const std::lock_guard lock(mutex_);
      ++num_ended_of_[completion.tag];
    }
  }

  const std::size_t number_;
  const File file_;
  std::vector<std::unique_ptr<Memory>> memory_;
  std::vector<std::unique_ptr<Memory>> loaded_;
  std::mutex mutex_;
  std::map<std::int64_t, int> num_ended_of_;
  std::atomic<std::size_t> num_taken_{0};
  std::atomic<bool> is_over_{false};
  std::unique_ptr<RecordQueue> queue_;
};

// One thread drives it, as required; all others wake it.
void check_wakes(FileBackend backend) {
  const File file;
  const std::unique_ptr<FileQueue> queue = hybridkv::cpu::make_file_queue(backend, 4, 2);
  Memory memory(kRecordPageBytes, 0);
  std::atomic<bool> is_over{false};
  std::vector<std::thread> wakers;
  for (int waker = 0; waker < 3; ++waker) {
    wakers.emplace_back([&] {
      while (!is_over) queue->wake();
    });
  }
  std::size_t num_ended = 0;
  for (std::int64_t number = 0; num_ended < 300;) {
    const FileOperation operation = number % 5 == 0 ? FileOperation::kSyncData : FileOperation::kWrite;
    number += queue->submit({number, operation, file.fd(), 0, {{memory.data(), memory.size()}}, false});
    num_ended += queue->reap(1, 4, kLongS).size();
  }
  is_over = true;
  for (std::thread& waker : wakers) waker.join();
}

#ifdef __SANITIZE_THREAD__
// Forbidden by the queue: two threads that drive it.
void race() {
  const File file;
  const std::unique_ptr<FileQueue> queue = hybridkv::cpu::make_file_queue(FileBackend::kThreads, 1000, 1);
  const auto submit = [&] {
    for (int number = 0; number < 200; ++number) queue->submit({0, FileOperation::kSyncData, file.fd(), 0, {}, false});
  };
  std::thread other(submit);
  submit();
  other.join();
}

// In a child process, to keep its report out of this test's output.
void check_that_a_race_is_found() {
  const File report;
  const pid_t child = fork();
  if (child == 0) {
    dup2(report.fd(), STDERR_FILENO);
    race();
    std::exit(EXIT_SUCCESS);  // the sanitizer exits with another status
  }
  int status = 0;
  expect(waitpid(child, &status, 0) == child && status != 0, "a race makes the process fail");
  std::string words(100000, ' ');
  expect(pread(report.fd(), words.data(), words.size(), 0) > 0, "the sanitizer writes a report");
  expect(words.find("data race") != std::string::npos && words.find("FileThreads::submit") != std::string::npos,
         "the report has the place of the race");
}
#endif

}  // namespace

int main() {
#ifdef __SANITIZE_THREAD__
  check_that_a_race_is_found();
#endif
  for (const FileBackend backend : {FileBackend::kUring, FileBackend::kThreads}) {
    if (backend == FileBackend::kUring && !hybridkv::cpu::has_uring()) continue;
    for (std::size_t number = 0; number < kNumRounds; ++number) Round(backend, number).run();
    check_wakes(backend);
  }
  return 0;
}
