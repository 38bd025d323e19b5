// Random sequences of stores and loads, on either backend, over a kernel with injected faults: each record ends once,
// with the outcome of a plain model, also if the queue is closed or destroyed meanwhile, or the file is damaged.
#include "csrc/cpu/record_queue.h"

#include <fcntl.h>
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
#include <utility>
#include <vector>

#include "csrc/tests/expect.h"
#include "csrc/tests/faulty_kernel.h"
#include "csrc/tests/fuzz.h"
#include "hybridkv/canonical_digest.h"

namespace {

using hybridkv::cpu::FileBackend;
using hybridkv::cpu::kRecordPageBytes;
using hybridkv::cpu::RecordCompletion;
using hybridkv::cpu::RecordOutcome;
using hybridkv::cpu::RecordQueue;
using hybridkv::cpu::RecordRequest;
using hybridkv::testing::Choices;
using hybridkv::testing::expect;
using hybridkv::testing::Memory;

constexpr double kLongS = 50.0;
constexpr std::size_t kDigestAt = 24;
constexpr std::size_t kNumPlaces = 16;
// A record fills its place, or is smaller: then the next record is not adjacent to it.
constexpr std::size_t kPlacePages = 4;
constexpr std::size_t kLargestPayloadBytes = (kPlacePages - 1) * kRecordPageBytes;
constexpr std::size_t kMaxSteps = 150;

enum class Content { kNothing, kRecord, kOtherHeader, kOtherPayload, kUnknown };

// Content of one place of the file, and the pending stores and loads there.
struct Place {
  Content content = Content::kNothing;
  std::int64_t version = 0;  // of the completely stored record
  std::vector<std::size_t> sizes;
  std::size_t num_loads = 0;
  std::size_t num_stores = 0;
};

struct Pending {
  bool is_store;
  bool is_impossible;  // its file is read-only, or its descriptor is invalid
  std::size_t place;
  std::int64_t version;
  std::vector<std::size_t> sizes;
  std::vector<std::unique_ptr<Memory>> parts;

  std::vector<iovec> extents() const {
    std::vector<iovec> extents;
    for (const auto& part : parts) extents.push_back({part->data(), part->size()});
    return extents;
  }
};

std::vector<unsigned char> header_of(std::int64_t version) {
  std::vector<unsigned char> header(kDigestAt + 16 + 24);
  for (std::size_t byte = 0; byte < header.size(); ++byte) {
    header[byte] = static_cast<unsigned char>(version >> byte % 8 ^ static_cast<std::int64_t>(byte));
  }
  std::fill_n(header.begin() + kDigestAt, 16, 0);
  return header;
}

void fill(const std::vector<std::unique_ptr<Memory>>& parts, std::int64_t version) {
  for (std::size_t part = 0; part < parts.size(); ++part) parts[part]->fill(static_cast<std::uint64_t>(version) * 8 + part);
}

std::vector<unsigned char> bytes_of(const std::vector<std::unique_ptr<Memory>>& parts) {
  std::vector<unsigned char> bytes;
  for (const auto& part : parts) bytes.insert(bytes.end(), part->data(), part->data() + part->size());
  return bytes;
}

class Session {
 public:
  Session(FileBackend backend, Choices& choices) : choices_(choices), is_direct_(choices.one_in(2)) {
    open_file();
    const std::size_t max_in_flight = choices_.between(1, 6);
    auto files = hybridkv::cpu::make_file_queue(backend, max_in_flight, max_in_flight);
    expect(files != nullptr, "a queue can be made");
    const std::size_t batch_bytes = choices_.between(1, 8) * kPlacePages * kRecordPageBytes;
    queue_ = std::make_unique<RecordQueue>(std::move(files), hybridkv::cpu::RecordQueueOptions{batch_bytes, kDigestAt});
  }
  ~Session() {
    queue_.reset();
    for (const int fd : {plain_, fd_, read_only_}) close(fd);
  }
  Session(const Session&) = delete;

  bool is_direct() const { return is_direct_; }

  void run() {
    for (std::size_t step = 0; step < kMaxSteps && !choices_.is_used_up(); ++step) {
      switch (choices_.below(12)) {
        case 0:
        case 1:
          take();
          break;
        case 2:
          wait();
          break;
        case 3:
          damage();
          break;
        case 4:
          if (choices_.one_in(12)) close_early();
          break;
        default:
          submit();
      }
    }
    if (choices_.one_in(4)) return;  // destroyed with records in flight
    expect(queue_->close(kLongS), "a queue closes");
    is_closed_ = true;
    take();
    expect(pending_.empty(), "all records of a closed queue have ended");
    for (std::size_t place = 0; place < kNumPlaces; ++place) {
      if (places_[place].content == Content::kRecord) check_file(place);
    }
  }

 private:
  void open_file() {
    const char* directory = std::getenv("TEST_TMPDIR");
    std::string path = std::string(directory == nullptr ? "/tmp" : directory) + "/record_queue_fuzz_XXXXXX";
    plain_ = mkstemp(path.data());
    expect(plain_ >= 0, "a file can be made: " + path);
    fd_ = open(path.c_str(), O_RDWR | (is_direct_ ? O_DIRECT : 0));
    is_direct_ = is_direct_ && fd_ >= 0;
    if (fd_ < 0) fd_ = open(path.c_str(), O_RDWR);
    read_only_ = open(path.c_str(), O_RDONLY | (is_direct_ ? O_DIRECT : 0));
    unlink(path.c_str());
  }

  static std::int64_t offset_of(std::size_t place) {
    return static_cast<std::int64_t>(place * kPlacePages * kRecordPageBytes);
  }

  void submit() {
    // Often adjacent, so that records are batched.
    last_place_ = choices_.one_in(3) ? choices_.below(kNumPlaces) : (last_place_ + 1) % kNumPlaces;
    Place& place = places_[last_place_];
    Pending one{choices_.one_in(2), choices_.one_in(15), last_place_, 0, {}, {}};
    if (place.num_stores > 0 || (one.is_store && place.num_loads > 0)) return;
    if (one.is_store) {
      one.version = next_version_++;
      one.sizes = some_sizes();
    } else {
      // Sometimes another record than the stored one.
      one.version = choices_.one_in(8) ? next_version_++ : place.version;
      one.sizes = place.version != 0 ? place.sizes : some_sizes();
    }
    const std::size_t misalignments[] = {0, 0, 512, 7};
    const std::size_t misalignment = misalignments[choices_.below(4)];
    for (const std::size_t size : one.sizes) one.parts.push_back(std::make_unique<Memory>(size, misalignment));
    if (one.is_store) fill(one.parts, one.version);
    const int fd = !one.is_impossible ? fd_ : one.is_store ? read_only_ : -1;
    const std::int64_t tag = next_tag_++;
    RecordRequest request{tag,
                          one.is_store,
                          is_direct_,
                          choices_.one_in(3),
                          fd,
                          offset_of(one.place),
                          header_of(one.version),
                          one.extents()};
    (one.is_store ? place.num_stores : place.num_loads) += 1;
    pending_.emplace(tag, std::move(one));  // before it can end
    if (queue_->submit(std::move(request))) {
      expect(!is_closed_, "a closed queue takes no record");
    } else {
      expect(is_closed_, "only a closed queue refuses a record");
      forget(tag);
    }
  }

  std::vector<std::size_t> some_sizes() {
    std::vector<std::size_t> sizes;
    std::size_t left = choices_.one_in(3) ? choices_.between(1, kLargestPayloadBytes) : kLargestPayloadBytes;
    for (std::uint64_t parts = choices_.below(4); parts > 0 && left > 1; --parts) {
      const std::size_t size = choices_.one_in(2) ? choices_.between(1, left - 1)
                                                  : std::min(left - 1, kRecordPageBytes);
      sizes.push_back(size);
      left -= size;
    }
    sizes.push_back(left);
    return sizes;
  }

  Pending forget(std::int64_t tag) {
    const auto found = pending_.find(tag);
    expect(found != pending_.end(), "a record ends once");
    Pending one = std::move(found->second);
    pending_.erase(found);
    Place& place = places_[one.place];
    (one.is_store ? place.num_stores : place.num_loads) -= 1;
    return one;
  }

  void take() {
    for (const RecordCompletion& completion : queue_->take()) end(forget(completion.tag), completion);
  }

  void wait() {
    const bool is_long = choices_.one_in(2);
    const bool is_idle = queue_->wait_until_idle(is_long ? kLongS : 0.0005);
    expect(is_idle || !is_long, "the queue becomes idle");
    take();
    if (is_idle) expect(pending_.empty(), "all records of an idle queue have ended");
  }

  void close_early() {
    is_closed_ = true;
    const bool is_over = queue_->close(choices_.one_in(2) ? kLongS : 0.0);
    take();
    if (is_over) expect(pending_.empty(), "all records of a closed queue have ended");
  }

  void end(const Pending& one, const RecordCompletion& completion) {
    const RecordOutcome outcome = completion.outcome;
    const bool has_failed =
        outcome == RecordOutcome::kFailed && (completion.error == EIO || completion.error == ENOMEM);
    if (outcome == RecordOutcome::kCancelled) {
      expect(is_closed_, "records are cancelled only by close");
    } else if (has_failed) {
      expect(hybridkv::testing::num_failed() > 0, "a record fails only with an injected fault");
      if (one.is_store) places_[one.place].content = Content::kUnknown;
    } else if (one.is_impossible) {
      expect(outcome == RecordOutcome::kFailed && completion.error == EBADF, "an impossible record fails");
    } else if (one.is_store) {
      end_store(one, completion);
    } else {
      end_load(one, completion);
    }
    if (outcome != RecordOutcome::kOtherHeader)
      expect(completion.page.empty(), "a page is returned only for another header");
    for (const auto& part : one.parts) check_around(*part);
  }

  void end_store(const Pending& one, const RecordCompletion& completion) {
    expect(completion.outcome == RecordOutcome::kDone && completion.error == 0, "a store is done");
    const std::vector<unsigned char> payload = bytes_of(one.parts);
    const hybridkv::Digest128 digest = hybridkv::xxh3::digest(payload.data(), payload.size());
    expect(completion.digest == digest, "a completion has its digest");
    Place& place = places_[one.place];
    place.content = Content::kRecord;
    place.version = one.version;
    place.sizes = one.sizes;
    check_file(one.place);
  }

  // Compares every byte, including the zeros.
  void check_file(std::size_t number) {
    const Place& place = places_[number];
    std::vector<std::unique_ptr<Memory>> parts;
    for (const std::size_t size : place.sizes) parts.push_back(std::make_unique<Memory>(size, 0));
    fill(parts, place.version);
    const std::vector<unsigned char> payload = bytes_of(parts);
    std::vector<unsigned char> wanted = header_of(place.version);
    hybridkv::write_canonical(hybridkv::xxh3::digest(payload.data(), payload.size()), wanted.data() + kDigestAt);
    const std::size_t size = wanted.size();
    wanted.resize(size + 16);
    hybridkv::write_canonical(hybridkv::xxh3::digest(wanted.data(), size), wanted.data() + size);
    wanted.resize(kRecordPageBytes);
    wanted.insert(wanted.end(), payload.begin(), payload.end());
    wanted.resize((wanted.size() + kRecordPageBytes - 1) / kRecordPageBytes * kRecordPageBytes);
    std::vector<unsigned char> found(wanted.size());
    expect(pread(plain_, found.data(), found.size(), offset_of(number)) == static_cast<ssize_t>(found.size()) &&
               found == wanted,
           "the file holds every byte of a record");
  }

  void end_load(const Pending& one, const RecordCompletion& completion) {
    const Place& place = places_[one.place];
    const bool is_there = place.content == Content::kRecord && place.version == one.version;
    const bool is_damaged = place.content == Content::kOtherPayload && place.version == one.version;
    if (completion.outcome == RecordOutcome::kDone) {
      expect(is_there || place.content == Content::kUnknown, "only a stored record is loaded");
      std::vector<std::unique_ptr<Memory>> written;
      for (const std::size_t size : one.sizes) written.push_back(std::make_unique<Memory>(size, 0));
      fill(written, one.version);
      const std::vector<unsigned char> payload = bytes_of(written);
      expect(bytes_of(one.parts) == payload, "a load returns the stored bytes");
      expect(completion.digest == hybridkv::xxh3::digest(payload.data(), payload.size()),
             "a load returns their digest");
    } else if (completion.outcome == RecordOutcome::kFailed) {
      expect(completion.error == ENODATA && !is_there, "a load fails at the end of the file");
    } else if (completion.outcome == RecordOutcome::kOtherPayload) {
      expect(is_damaged || place.content == Content::kUnknown, "another payload is reported only for damage");
    } else {
      expect(!is_there && !is_damaged, "another header is reported only if it differs");
      expect(completion.page.size() == kRecordPageBytes, "the page is returned");
    }
  }

  static void check_around(Memory& part) {
    const std::vector<unsigned char>& all = part.everything();
    const auto inside = static_cast<std::size_t>(part.data() - all.data());
    for (std::size_t byte = 0; byte < all.size(); ++byte) {
      if (byte >= inside && byte < inside + part.size()) continue;
      expect(all[byte] == hybridkv::testing::kPoison, "no byte around a part is written");
    }
  }

  // Flips a bit of a record that is not in flight.
  void damage() {
    const std::size_t number = choices_.below(kNumPlaces);
    Place& place = places_[number];
    if (place.content != Content::kRecord || place.num_loads + place.num_stores > 0) return;
    const bool is_header = choices_.one_in(2);
    std::size_t payload_bytes = 0;
    for (const std::size_t size : place.sizes) payload_bytes += size;
    const std::size_t at = is_header ? choices_.below(header_of(0).size() + 16)
                                     : kRecordPageBytes + choices_.below(payload_bytes);
    const off_t offset = offset_of(number) + static_cast<off_t>(at);
    unsigned char byte = 0;
    expect(pread(plain_, &byte, 1, offset) == 1, "a byte can be read");
    byte = static_cast<unsigned char>(byte ^ 1 << choices_.below(8));
    expect(pwrite(plain_, &byte, 1, offset) == 1, "and changed");
    place.content = is_header ? Content::kOtherHeader : Content::kOtherPayload;
  }

  Choices& choices_;
  bool is_direct_;
  int plain_ = -1;
  int fd_ = -1;
  int read_only_ = -1;
  std::array<Place, kNumPlaces> places_;
  std::map<std::int64_t, Pending> pending_;
  std::unique_ptr<RecordQueue> queue_;
  std::int64_t next_tag_ = 0;
  std::int64_t next_version_ = 1;
  std::size_t last_place_ = 0;
  bool is_closed_ = false;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Choices choices(data, size);
  const bool has_uring = hybridkv::cpu::has_uring();
  const FileBackend backend = has_uring && choices.one_in(2) ? FileBackend::kUring : FileBackend::kThreads;
  hybridkv::testing::set_faults({});
  try {
    Session session(backend, choices);
    const std::uint64_t rates[] = {0, 0, 30, 3};
    hybridkv::testing::set_faults({choices.below(1 << 16), rates[choices.below(4)], rates[choices.below(4)],
                                   choices.one_in(4) ? 20u : 0u, session.is_direct() ? kRecordPageBytes : 1});
    session.run();
  } catch (const std::exception& error) {
    expect(false, std::string("no exception is thrown: ") + error.what());
  }
  return 0;
}
