// Both backends write records byte for byte and verify them on load, for any alignment of memory. A device that hangs
// blocks no caller.
#include "csrc/cpu/record_queue.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "csrc/tests/expect.h"
#include "hybridkv/canonical_digest.h"

namespace {

using hybridkv::Digest128;
using hybridkv::cpu::FileBackend;
using hybridkv::cpu::FileCompletion;
using hybridkv::cpu::FileOperation;
using hybridkv::cpu::FileQueue;
using hybridkv::cpu::FileRequest;
using hybridkv::cpu::kRecordPageBytes;
using hybridkv::cpu::RecordCompletion;
using hybridkv::cpu::RecordOutcome;
using hybridkv::cpu::RecordQueue;
using hybridkv::cpu::RecordRequest;
using hybridkv::testing::expect;
using hybridkv::testing::Memory;

constexpr double kLongS = 60.0;
constexpr std::size_t kDigestAt = 24;
constexpr std::size_t kBatchBytes = 256 * 1024;

class File {
 public:
  explicit File(int flags) {
    const char* directory = std::getenv("TEST_TMPDIR");
    std::string path = std::string(directory == nullptr ? "/tmp" : directory) + "/record_queue_XXXXXX";
    plain_ = mkstemp(path.data());
    fd_ = open(path.c_str(), O_RDWR | flags);
    unlink(path.c_str());
    expect(plain_ >= 0, "a file can be made");
  }
  ~File() {
    close(fd_);
    close(plain_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  bool is_there() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  std::vector<unsigned char> read(std::int64_t offset, std::size_t num_bytes) const {
    std::vector<unsigned char> bytes(num_bytes, 0x77);
    const ssize_t got = pread(plain_, bytes.data(), num_bytes, offset);
    bytes.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    return bytes;
  }
  void flip(std::int64_t offset) {
    unsigned char byte = read(offset, 1).at(0) ^ 0x10;
    expect(pwrite(plain_, &byte, 1, offset) == 1, "a byte can be changed");
  }
  void cut(std::int64_t num_bytes) { expect(ftruncate(plain_, num_bytes) == 0, "a file can be cut"); }

 private:
  int plain_;
  int fd_;
};

// A real file queue with completions that a test can delay. The test sees the calls and can make them fail.
class Scripted final : public FileQueue {
 public:
  struct Script {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_open = true;
    bool is_woken = false;
    bool is_reaping = false;
    bool ignores_wakes = false;
    std::vector<std::pair<FileOperation, std::int64_t>> calls;
    std::function<int(const FileRequest&)> error = [](const FileRequest&) { return 0; };

    void hold() {
      const std::lock_guard lock(mutex);
      is_open = false;
    }
    // When the queue's thread is in `reap`, it stays there until `release`, even if it is woken: until then it takes no
    // submitted record.
    void hold_asleep() {
      std::unique_lock lock(mutex);
      expect(changed.wait_for(lock, std::chrono::duration<double>(kLongS), [&] { return is_reaping && !is_woken; }),
             "the thread waits in reap");
      ignores_wakes = true;
    }
    void release() {
      const std::lock_guard lock(mutex);
      is_open = true;
      ignores_wakes = false;
      changed.notify_all();
    }
    void wait_for_calls(std::size_t count) {
      std::unique_lock lock(mutex);
      expect(changed.wait_for(lock, std::chrono::duration<double>(kLongS), [&] { return calls.size() >= count; }),
             "as many calls are made");
    }
    std::vector<std::pair<FileOperation, std::int64_t>> calls_so_far() {
      const std::lock_guard lock(mutex);
      return calls;
    }
  };

  Scripted(std::unique_ptr<FileQueue> inner, Script& script) : inner_(std::move(inner)), script_(script) {}

  FileBackend backend() const override { return inner_->backend(); }
  std::size_t max_in_flight() const override { return inner_->max_in_flight(); }
  std::size_t num_in_flight() const override { return inner_->num_in_flight(); }
  bool submit(FileRequest request) override {
    {
      const std::lock_guard lock(script_.mutex);
      script_.calls.emplace_back(request.operation, request.offset);
      errors_[request.tag] = script_.error(request);
      script_.changed.notify_all();
    }
    return inner_->submit(std::move(request));
  }
  std::vector<FileCompletion> reap(std::size_t min_completions, std::size_t capacity, double timeout_s) override {
    {
      std::unique_lock lock(script_.mutex);
      script_.is_reaping = true;
      script_.changed.notify_all();
      script_.changed.wait(lock, [&] { return script_.is_open || script_.is_woken; });
      script_.is_reaping = script_.is_woken = false;
      if (!script_.is_open) return {};
    }
    std::vector<FileCompletion> completions = inner_->reap(min_completions, capacity, timeout_s);
    for (FileCompletion& completion : completions) {
      if (errors_[completion.tag] != 0) completion.error = errors_[completion.tag];
    }
    return completions;
  }
  void wake() override {
    {
      const std::lock_guard lock(script_.mutex);
      script_.is_woken = !script_.ignores_wakes;
      script_.changed.notify_all();
    }
    inner_->wake();
  }

 private:
  std::unique_ptr<FileQueue> inner_;
  Script& script_;
  std::map<std::int64_t, int> errors_;
};

std::unique_ptr<FileQueue> files_of(FileBackend backend, std::size_t max_in_flight) {
  return hybridkv::cpu::make_file_queue(backend, max_in_flight, max_in_flight);
}

std::vector<unsigned char> header_of(std::int64_t tag) {
  std::vector<unsigned char> header(kDigestAt + 16 + 40);
  for (std::size_t byte = 0; byte < header.size(); ++byte) header[byte] = static_cast<unsigned char>(tag * 31 + byte);
  std::fill_n(header.begin() + kDigestAt, 16, 0);
  return header;
}

// Memory of one record: parts of the given sizes and offsets in a page, with poison around them.
struct Payload {
  std::vector<std::unique_ptr<Memory>> parts;

  Payload(const std::vector<std::size_t>& sizes, std::size_t misalignment) {
    for (const std::size_t size : sizes) parts.push_back(std::make_unique<Memory>(size, misalignment));
  }
  void fill(std::uint64_t seed) {
    for (const auto& part : parts) part->fill(++seed);
  }
  std::vector<iovec> extents() {
    std::vector<iovec> extents;
    for (const auto& part : parts) extents.push_back({part->data(), part->size()});
    return extents;
  }
  std::vector<unsigned char> bytes() {
    std::vector<unsigned char> all;
    for (const auto& part : parts) all.insert(all.end(), part->data(), part->data() + part->size());
    return all;
  }
};

// The expected content of the file.
std::vector<unsigned char> expected_bytes(std::int64_t tag, const std::vector<unsigned char>& payload) {
  std::vector<unsigned char> record = header_of(tag);
  hybridkv::write_canonical(hybridkv::xxh3::digest(payload.data(), payload.size()), record.data() + kDigestAt);
  const std::size_t size = record.size();
  record.resize(size + 16);
  hybridkv::write_canonical(hybridkv::xxh3::digest(record.data(), size), record.data() + size);
  record.resize(kRecordPageBytes);
  record.insert(record.end(), payload.begin(), payload.end());
  record.resize((record.size() + kRecordPageBytes - 1) / kRecordPageBytes * kRecordPageBytes);
  return record;
}

RecordRequest record_of(std::int64_t tag, bool is_store, const File& file, bool is_direct, std::int64_t offset,
                        Payload& payload, bool syncs = false) {
  return {tag, is_store, is_direct, syncs, file.fd(), offset, header_of(tag), payload.extents()};
}

std::map<std::int64_t, RecordCompletion> finish(RecordQueue& queue) {
  expect(queue.wait_until_idle(kLongS), "the queue becomes idle");
  std::map<std::int64_t, RecordCompletion> completions;
  for (RecordCompletion& completion : queue.take()) {
    const std::int64_t tag = completion.tag;
    expect(completions.emplace(tag, std::move(completion)).second, "a record ends once");
  }
  return completions;
}

const std::vector<std::vector<std::size_t>> kShapes = {
    {1},      {4095},         {4096},         {4097},        {100000},          {4096, 4096}, {4096, 8192, 5},
    {8192, 1}, {1, 4096, 4096}, {100, 200, 300}, {65536, 65536}, {4096, 12288, 4000}, {300000},
};

void check_bytes(FileBackend backend, bool is_direct) {
  File file(is_direct ? O_DIRECT : 0);
  if (!file.is_there()) return;  // a file system without O_DIRECT
  Scripted::Script script;
  RecordQueue queue(std::make_unique<Scripted>(files_of(backend, 3), script), {kBatchBytes, kDigestAt});
  std::vector<Payload> written;
  std::vector<Payload> read;
  std::vector<std::int64_t> offsets;
  std::int64_t end = 8192;
  for (const std::size_t misalignment : {std::size_t{0}, std::size_t{7}, std::size_t{512}}) {
    for (const std::vector<std::size_t>& shape : kShapes) {
      written.emplace_back(shape, misalignment);
      written.back().fill(written.size());
      read.emplace_back(shape, (misalignment + 512 * (written.size() % 2)) % 1024);
      offsets.push_back(end);
      end += static_cast<std::int64_t>(expected_bytes(0, written.back().bytes()).size());
    }
  }
  script.hold();  // most records wait, so that adjacent ones are batched
  for (std::size_t number = 0; number < written.size(); ++number) {
    expect(queue.submit(record_of(static_cast<std::int64_t>(number), true, file, is_direct, offsets[number],
                                  written[number])),
           "an open queue takes records");
  }
  script.release();
  for (const auto& [tag, completion] : finish(queue)) {
    const std::vector<unsigned char> payload = written[static_cast<std::size_t>(tag)].bytes();
    expect(completion.outcome == RecordOutcome::kDone, "a record is stored");
    expect(completion.digest == hybridkv::xxh3::digest(payload.data(), payload.size()),
           "the completion has its digest");
    const std::vector<unsigned char> wanted = expected_bytes(tag, payload);
    expect(file.read(offsets[static_cast<std::size_t>(tag)], wanted.size()) == wanted, "the file holds every byte");
  }
  expect(queue.num_transfers() < static_cast<std::int64_t>(written.size()) / 2, "adjacent records are moved together");
  // Out of order, so that some have neighbours and some do not.
  for (std::size_t number = 0; number < read.size(); ++number) {
    const std::size_t place = number * 5 % read.size();
    queue.submit(record_of(static_cast<std::int64_t>(place), false, file, is_direct, offsets[place], read[place]));
  }
  const std::map<std::int64_t, RecordCompletion> loaded = finish(queue);
  expect(loaded.size() == read.size(), "every load ends");
  for (std::size_t place = 0; place < read.size(); ++place) {
    const RecordCompletion& completion = loaded.at(static_cast<std::int64_t>(place));
    expect(completion.outcome == RecordOutcome::kDone, "a record is loaded");
    expect(read[place].bytes() == written[place].bytes(), "a load returns the stored bytes");
    for (const auto& part : read[place].parts) {
      const std::vector<unsigned char>& all = part->everything();
      const auto poisoned = std::count(all.begin(), all.end(), hybridkv::testing::kPoison);
      const auto inside = std::count(part->data(), part->data() + part->size(), hybridkv::testing::kPoison);
      expect(static_cast<std::size_t>(poisoned - inside) == all.size() - part->size(),
             "no byte around the memory changes");
    }
  }
}

void check_damage(FileBackend backend, bool is_direct) {
  File file(is_direct ? O_DIRECT : 0);
  if (!file.is_there()) return;
  RecordQueue queue(files_of(backend, 2), {kBatchBytes, kDigestAt});
  constexpr std::size_t kNum = 6;
  std::vector<Payload> payloads;
  for (std::size_t number = 0; number < kNum; ++number) payloads.emplace_back(std::vector<std::size_t>{5000}, 0);
  const auto offset_of = [](std::size_t number) { return static_cast<std::int64_t>(number * 3 * kRecordPageBytes); };
  const auto submit_all = [&](bool is_store) {
    for (std::size_t number = 0; number < kNum; ++number) {
      queue.submit(record_of(static_cast<std::int64_t>(number), is_store, file, is_direct, offset_of(number),
                             payloads[number]));
    }
    return finish(queue);
  };
  for (std::size_t number = 0; number < kNum; ++number) payloads[number].fill(number);
  submit_all(true);
  file.flip(offset_of(1));                                                          // its header
  file.flip(offset_of(2) + static_cast<std::int64_t>(kRecordPageBytes) + 4999);     // its last byte
  file.flip(offset_of(3) + static_cast<std::int64_t>(kDigestAt));                   // the digest of its payload
  file.flip(offset_of(4) + static_cast<std::int64_t>(header_of(4).size()) + 15);    // the digest of its header
  file.cut(offset_of(5) + static_cast<std::int64_t>(2 * kRecordPageBytes));         // it ends too early
  for (Payload& payload : payloads) payload.parts[0]->poison();
  const std::map<std::int64_t, RecordCompletion> ended = submit_all(false);
  expect(ended.at(0).outcome == RecordOutcome::kDone, "an intact record is loaded");
  expect(ended.at(1).outcome == RecordOutcome::kOtherHeader, "another header is detected");
  expect(ended.at(1).page == file.read(offset_of(1), kRecordPageBytes), "the page is returned");
  expect(ended.at(2).outcome == RecordOutcome::kOtherPayload, "another payload is detected");
  expect(ended.at(3).outcome == RecordOutcome::kOtherHeader, "a header with a changed digest counts as another header");
  expect(ended.at(4).outcome == RecordOutcome::kOtherHeader, "the digest of a header is checked");
  expect(ended.at(5).outcome == RecordOutcome::kFailed && ended.at(5).error == ENODATA,
         "the end of a file is an error");
}

void check_errors(FileBackend backend) {
  File file(0);
  RecordQueue queue(files_of(backend, 2), {kBatchBytes, kDigestAt});
  Payload payload({5000}, 0);
  RecordRequest record = record_of(1, true, file, false, 0, payload);
  record.fd = -1;
  queue.submit(std::move(record));
  const std::map<std::int64_t, RecordCompletion> ended = finish(queue);
  expect(ended.at(1).outcome == RecordOutcome::kFailed && ended.at(1).error == EBADF, "an error is reported");
  for (const double timeout_s : {std::numeric_limits<double>::infinity(), 1e300, 9223372036.0}) {
    expect(queue.wait_until_idle(timeout_s), "an idle queue is idle with any timeout");
    queue.submit(record_of(2, true, file, false, 0, payload));
    expect(queue.wait_until_idle(timeout_s) && queue.take().size() == 1, "a long wait does not end early");
  }
  expect(queue.close(std::numeric_limits<double>::infinity()), "an idle queue closes");
  expect(!queue.submit(record_of(2, true, file, false, 0, payload)), "a closed queue takes no record");
}

// One of several adjacent records fails; the others are still moved.
void check_neighbours(FileBackend backend) {
  File file(0);
  Scripted::Script script;
  script.error = [](const FileRequest& request) {
    const auto end = request.offset + static_cast<std::int64_t>(request.extents.size() * kRecordPageBytes);
    return request.offset <= 8192 && 8192 < end ? EIO : 0;
  };
  script.hold();
  RecordQueue queue(std::make_unique<Scripted>(files_of(backend, 1), script), {kBatchBytes, kDigestAt});
  std::vector<Payload> payloads;
  for (std::size_t number = 0; number < 4; ++number) payloads.emplace_back(std::vector<std::size_t>{4096}, 0);
  for (std::int64_t tag = 0; tag < 4; ++tag) {
    queue.submit(record_of(tag, true, file, false, tag * 8192, payloads[static_cast<std::size_t>(tag)]));
    // Otherwise the thread may prepare the next record before its neighbours are queued.
    if (tag == 0) script.hold_asleep();
  }
  script.release();
  const std::map<std::int64_t, RecordCompletion> ended = finish(queue);
  for (const auto& [tag, completion] : ended) {
    expect((completion.outcome == RecordOutcome::kFailed) == (tag == 1), "only the record at the bad place fails");
  }
  expect(ended.size() == 4 && queue.num_transfers() == 5,
         "the first is moved alone, three are moved together, and then each of these alone");
}

void check_order(FileBackend backend) {
  File file(0);
  Scripted::Script script;
  script.hold();
  RecordQueue queue(std::make_unique<Scripted>(files_of(backend, 1), script), {kBatchBytes, kDigestAt});
  Payload payload({100}, 0);
  const auto submit = [&](std::int64_t tag, bool is_store) {
    queue.submit(record_of(tag, is_store, file, false, tag * 65536, payload));  // with gaps
  };
  submit(0, true);
  script.wait_for_calls(1);
  for (std::int64_t tag = 1; tag <= 3; ++tag) submit(tag, true);
  for (std::int64_t tag = 4; tag < 16; ++tag) submit(tag, false);
  script.release();
  finish(queue);
  std::vector<std::int64_t> order;
  for (const auto& call : script.calls_so_far()) order.push_back(call.second / 65536);
  const std::vector<std::int64_t> wanted = {0, 4, 5, 6, 7, 8, 9, 10, 11, 1, 12, 13, 14, 15, 2, 3};
  expect(order == wanted, "loads go first, and the wait of a store is limited");
}

void check_sync(FileBackend backend, int sync_error) {
  File file(0);
  Scripted::Script script;
  script.error = [&](const FileRequest& request) {
    return request.operation == FileOperation::kSyncData ? sync_error : 0;
  };
  RecordQueue queue(std::make_unique<Scripted>(files_of(backend, 1), script), {kBatchBytes, kDigestAt});
  Payload payload({100}, 0);
  queue.submit(record_of(1, true, file, false, 0, payload, true));
  const RecordCompletion completion = finish(queue).at(1);
  expect(completion.error == sync_error, "a store that could not be synced has failed");
  const auto calls = script.calls_so_far();
  expect(calls.size() == 2 && calls[1].first == FileOperation::kSyncData, "a store is synced before it ends");
  queue.submit(record_of(1, false, file, false, 0, payload, true));
  finish(queue);
  expect(script.calls_so_far().size() == 3, "a load is not synced");
}

// A failed sync fails every store to its file that was begun before its end, and no store to another file.
void check_shared_sync(FileBackend backend, int sync_error) {
  File file(0);
  File other(0);
  Scripted::Script script;
  bool is_first = true;
  script.error = [&](const FileRequest& request) {
    if (request.operation != FileOperation::kSyncData || request.fd != file.fd()) return 0;
    if (!std::exchange(is_first, false)) return 0;
    script.is_open = false;  // the mutex is held: the queue's thread is blocked
    return sync_error;
  };
  RecordQueue queue(std::make_unique<Scripted>(files_of(backend, 3), script), {kBatchBytes, kDigestAt});
  Payload payload({100}, 0);
  const auto submit = [&](std::int64_t tag, const File& target) {
    queue.submit(record_of(tag, true, target, false, tag * 65536, payload, true));
  };
  submit(0, file);
  script.wait_for_calls(2);
  submit(1, file);
  script.wait_for_calls(3);
  submit(2, other);
  script.wait_for_calls(4);
  script.release();
  const std::map<std::int64_t, RecordCompletion> ended = finish(queue);
  expect(ended.at(0).error == sync_error, "the store that syncs gets the error");
  expect(ended.at(1).error == sync_error, "a store that began before the end of the sync gets it too");
  expect(ended.at(2).error == 0, "a store to another file does not get it");
  submit(3, file);
  expect(finish(queue).at(3).error == 0, "a later store does not get it");
}

void check_blocked_device(FileBackend backend) {
  File file(0);
  Scripted::Script script;
  script.hold();
  auto queue =
      std::make_unique<RecordQueue>(std::make_unique<Scripted>(files_of(backend, 2), script),
                                    hybridkv::cpu::RecordQueueOptions{kBatchBytes, kDigestAt});
  Payload payload({100}, 0);
  queue->submit(record_of(0, true, file, false, 0, payload));
  script.wait_for_calls(1);
  queue->submit(record_of(1, true, file, false, 65536, payload));
  script.wait_for_calls(2);  // the thread was woken although no request had ended
  for (std::int64_t tag = 2; tag < 5; ++tag) queue->submit(record_of(tag, tag < 4, file, false, tag * 65536, payload));
  expect(queue->take().empty() && !queue->wait_until_idle(0.0), "a blocked record has not ended");
  expect(!queue->close(0.0), "closing does not wait for it");
  std::vector<std::int64_t> cancelled;
  for (const RecordCompletion& completion : queue->take()) {
    expect(completion.outcome == RecordOutcome::kCancelled, "records that were not started are cancelled");
    cancelled.push_back(completion.tag);
  }
  script.release();
  expect(queue->close(kLongS), "close succeeds after the release");
  for (const RecordCompletion& completion : queue->take()) {
    if (completion.outcome == RecordOutcome::kCancelled) cancelled.push_back(completion.tag);
  }
  std::sort(cancelled.begin(), cancelled.end());
  expect(cancelled == std::vector<std::int64_t>({2, 3, 4}), "each of them is cancelled once");
}

// Records of a failed batch count as started: close waits for them, as for all records in flight.
void check_close_between_attempts(FileBackend backend) {
  File file(0);
  Scripted::Script script;
  script.error = [&](const FileRequest& request) {
    if (request.extents.size() > 2) return EIO;               // the batch of two
    if (script.calls.size() == 3) script.is_open = false;     // only the first of them
    return 0;
  };
  script.hold();
  RecordQueue queue(std::make_unique<Scripted>(files_of(backend, 1), script), {kBatchBytes, kDigestAt});
  std::vector<Payload> payloads;
  for (std::size_t number = 0; number < 3; ++number) payloads.emplace_back(std::vector<std::size_t>{4096}, 0);
  for (std::int64_t tag = 0; tag < 3; ++tag) {
    queue.submit(record_of(tag, true, file, false, tag * 8192, payloads[static_cast<std::size_t>(tag)]));
    script.wait_for_calls(1);
  }
  script.release();
  script.wait_for_calls(3);
  expect(!queue.close(0.0), "one record is in flight");
  script.release();
  expect(queue.close(kLongS), "and ends");
  std::size_t num_done = 0;
  for (const RecordCompletion& completion : queue.take()) num_done += completion.outcome == RecordOutcome::kDone;
  expect(num_done == 3, "a started record is not cancelled");
}

}  // namespace

int main() {
  for (const FileBackend backend : {FileBackend::kUring, FileBackend::kThreads}) {
    if (backend == FileBackend::kUring && !hybridkv::cpu::has_uring()) continue;
    for (const bool is_direct : {false, true}) {
      check_bytes(backend, is_direct);
      check_damage(backend, is_direct);
    }
    check_errors(backend);
    check_neighbours(backend);
    check_order(backend);
    check_sync(backend, 0);
    check_sync(backend, EIO);
    check_shared_sync(backend, EIO);
    check_shared_sync(backend, 0);
    check_blocked_device(backend);
    check_close_between_attempts(backend);
  }
  return 0;
}
