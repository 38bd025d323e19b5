#include "csrc/bindings/record_queue_binding.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "csrc/bindings/file_backend.h"
#include "csrc/bindings/unlocked.h"
#include "csrc/cpu/record_queue.h"
#include "hybridkv/canonical_digest.h"

namespace hybridkv::bindings {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

nb::bytes bytes_of(const std::vector<unsigned char>& bytes) {
  return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Python's buffers, held until this object ends.
class Buffers {
 public:
  Buffers() = default;
  Buffers(Buffers&& other) noexcept : buffers_(std::exchange(other.buffers_, {})) {}
  Buffers& operator=(Buffers&&) = delete;
  ~Buffers() {
    for (Py_buffer& buffer : buffers_) PyBuffer_Release(&buffer);
  }

  void add(nb::handle object, bool is_written) {
    Py_buffer buffer;
    const int access = is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    if (PyObject_GetBuffer(object.ptr(), &buffer, access) != 0) nb::raise_python_error();
    buffers_.push_back(buffer);
  }
  std::vector<iovec> extents() const {
    std::vector<iovec> extents;
    for (const Py_buffer& buffer : buffers_) {
      if (buffer.len > 0) extents.push_back({buffer.buf, static_cast<std::size_t>(buffer.len)});
    }
    return extents;
  }

 private:
  std::vector<Py_buffer> buffers_;
};

constexpr std::int64_t kLargestOffset = std::int64_t{1} << 62;
constexpr std::size_t kLargestPayload = 0xFFFFFFFF;  // limit of the size in a record's header

// The name differs from the file queue's, because nanobind tells types apart by name.
class Records {
 public:
  Records(std::size_t max_in_flight, std::size_t batch_bytes, std::size_t digest_at, const std::string& backend)
      : digest_at_(digest_at) {
    require(digest_at <= cpu::kRecordPageBytes - 2 * cpu::kDigestBytes,
            "digest_at: expected room for two digests after it in a page");
    require(batch_bytes >= 1, "batch_bytes: expected at least 1");
    // Requests beyond the number of threads wait. If the system permits few threads, the file queue must leave one for
    // the record queue.
    for (std::size_t num_threads = std::min(max_in_flight, kMaxThreads); queue_ == nullptr; num_threads /= 2) {
      MadeBackend made = make_backend(backend, max_in_flight, num_threads);
      uring_error_ = made.uring_error;
      try {
        queue_ =
            std::make_unique<cpu::RecordQueue>(std::move(made.queue), cpu::RecordQueueOptions{batch_bytes, digest_at});
      } catch (const std::system_error&) {
        if (num_threads == 1) throw;
      }
    }
  }
  // Records that have not ended continue, with their memory: a request to a device cannot be cancelled.
  ~Records() {
    bool is_over = false;
    {
      const Unlocked unlocked;
      is_over = queue_->close(0.0);
      if (is_over) queue_.reset();
    }
    if (is_over) return;
    (void)queue_.release();
    (void)new std::unordered_map<std::int64_t, Buffers>(std::move(buffers_));
  }
  Records(const Records&) = delete;
  Records& operator=(const Records&) = delete;

  const char* backend() const { return name_of(queue_->backend()); }
  int uring_error() const { return uring_error_; }
  std::int64_t num_transfers() const { return queue_->num_transfers(); }

  bool submit(std::int64_t tag, bool is_store, int fd, std::int64_t offset, bool is_direct, bool syncs,
              const nb::bytes& header, const nb::sequence& buffers) {
    require(fd >= 0, "fd: expected an open file");
    require(offset >= 0 && offset <= kLargestOffset && offset % static_cast<std::int64_t>(cpu::kRecordPageBytes) == 0,
            "offset: expected a multiple of 4096, at most 2^62");
    require(
        header.size() >= digest_at_ + cpu::kDigestBytes && header.size() + cpu::kDigestBytes <= cpu::kRecordPageBytes,
        "header: expected room for the payload's digest in it, and for its own digest after it in a page");
    Buffers held;
    for (const nb::handle buffer : buffers) held.add(buffer, !is_store);
    cpu::RecordRequest record{tag, is_store, is_direct, syncs, fd, offset, {}, held.extents()};
    const std::size_t payload_bytes = record.payload_bytes();
    require(payload_bytes >= 1 && payload_bytes <= kLargestPayload, "buffers: expected 1 to 2^32 - 1 bytes");
    const auto* bytes = static_cast<const unsigned char*>(header.data());
    record.header.assign(bytes, bytes + header.size());
    // Held before the record can be written. `close` is checked here, because Python code may have run since the call
    // began.
    const auto [place, is_new] = buffers_.try_emplace(tag, std::move(held));
    require(is_new, "tag: expected one that no submitted record has until it is taken");
    bool is_taken = false;
    try {
      is_taken = queue_->submit(std::move(record));
    } catch (...) {
      buffers_.erase(place);
      throw;
    }
    if (!is_taken) buffers_.erase(place);
    return is_taken;
  }

  // A tuple (tag, outcome, errno, digest, page) for each.
  nb::list take() {
    nb::list result;
    for (const cpu::RecordCompletion& completion : queue_->take()) {
      const auto held = buffers_.extract(completion.tag);  // released last, because that may run Python code
      unsigned char digest[cpu::kDigestBytes];
      write_canonical(completion.digest, digest);
      result.append(nb::make_tuple(completion.tag, static_cast<int>(completion.outcome), completion.error,
                                   nb::bytes(reinterpret_cast<const char*>(digest), sizeof digest),
                                   bytes_of(completion.page)));
    }
    return result;
  }

  bool wait_until_idle(double timeout_s) {
    const Unlocked unlocked;
    return queue_->wait_until_idle(timeout_s);
  }

  bool close(double timeout_s) {
    const Unlocked unlocked;
    return queue_->close(timeout_s);
  }

 private:
  static void require(bool holds, const char* message) {
    if (!holds) throw std::invalid_argument(message);
  }

  std::size_t digest_at_;
  int uring_error_ = 0;
  std::unique_ptr<cpu::RecordQueue> queue_;
  std::unordered_map<std::int64_t, Buffers> buffers_;  // by tag; the caller holds the interpreter lock
};

}  // namespace

void bind_record_queue(nb::module_& module) {
  module.def("has_uring", &cpu::has_uring);
  nb::class_<Records>(module, "RecordQueue")
      .def(nb::init<std::size_t, std::size_t, std::size_t, const std::string&>(), "max_in_flight"_a, "batch_bytes"_a,
           "digest_at"_a, "backend"_a = "best")
      .def_prop_ro("backend", &Records::backend)
      .def_prop_ro("uring_error", &Records::uring_error)
      .def_prop_ro("num_transfers", &Records::num_transfers)
      .def("submit", &Records::submit, "tag"_a, "is_store"_a, "fd"_a, "offset"_a, "is_direct"_a, "syncs"_a, "header"_a,
           "buffers"_a)
      .def("take", &Records::take)
      .def("wait_until_idle", &Records::wait_until_idle, "timeout_s"_a)
      .def("close", &Records::close, "timeout_s"_a);
}

}  // namespace hybridkv::bindings
