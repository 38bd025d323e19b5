#include "csrc/bindings/file_queue_binding.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "csrc/bindings/file_backend.h"
#include "csrc/bindings/unlocked.h"
#include "csrc/cpu/file_queue.h"
#include "hybridkv/canonical_digest.h"

namespace hybridkv::bindings {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

using Integers = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// No two threads have the same, not even one after the other. Never 0.
std::uint64_t this_thread() {
  static std::atomic<std::uint64_t> num_threads{0};
  thread_local const std::uint64_t number = ++num_threads;
  return number;
}

// Python lets other threads in while we wait: they are refused.
class SingleUse {
 public:
  explicit SingleUse(std::atomic<bool>& is_used) : is_used_(is_used) {
    if (is_used_.exchange(true)) throw std::runtime_error("the file queue is used by another thread");
  }
  ~SingleUse() { is_used_ = false; }
  SingleUse(const SingleUse&) = delete;
  SingleUse& operator=(const SingleUse&) = delete;

 private:
  std::atomic<bool>& is_used_;
};

class Queue {
 public:
  Queue(std::size_t max_in_flight, const std::string& backend, std::size_t num_threads)
      : queue_(make_backend(backend, max_in_flight, num_threads).queue) {}
  ~Queue() {
    const Unlocked unlocked;
    queue_.reset();
  }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  const char* backend() const { return name_of(queue_->backend()); }
  std::size_t num_in_flight() const { return queue_->num_in_flight(); }

  // Takes as many of the requests as there is room for, from the first on. How many that were.
  std::size_t submit(const Integers& tags, const Integers& operations, const Integers& fds, const Integers& offsets,
                     const Integers& extent_ends, const Integers& addresses, const Integers& num_bytes,
                     bool wants_digests) {
    require_shapes(tags, operations, fds, offsets, extent_ends, addresses, num_bytes);
    const SingleUse use(is_used_);
    take_over();
    const Unlocked unlocked;
    for (std::size_t number = 0; number < tags.size(); ++number) {
      cpu::FileRequest request;
      request.tag = tags.data()[number];
      request.operation = static_cast<cpu::FileOperation>(operations.data()[number]);
      request.fd = static_cast<int>(fds.data()[number]);
      request.offset = offsets.data()[number];
      request.wants_digest = wants_digests && request.operation == cpu::FileOperation::kRead;
      const auto first = number == 0 ? 0 : static_cast<std::size_t>(extent_ends.data()[number - 1]);
      for (std::size_t extent = first; extent < static_cast<std::size_t>(extent_ends.data()[number]); ++extent) {
        request.extents.push_back(
            {reinterpret_cast<void*>(addresses.data()[extent]), static_cast<std::size_t>(num_bytes.data()[extent])});
      }
      if (!queue_->submit(std::move(request))) return number;
    }
    return tags.size();
  }

  // (tag, errno, num_bytes, digest) of each completion.
  nb::list reap(std::size_t min_completions, double timeout_s) {
    const SingleUse use(is_used_);
    take_over();
    std::vector<cpu::FileCompletion> completions;
    {
      const Unlocked unlocked;
      completions = queue_->reap(min_completions, queue_->max_in_flight(), timeout_s);
    }
    nb::list result;
    for (const cpu::FileCompletion& completion : completions) {
      unsigned char digest[16];
      write_canonical(completion.digest, digest);
      result.append(nb::make_tuple(completion.tag, completion.error, completion.num_bytes,
                                   nb::bytes(reinterpret_cast<const char*>(digest), sizeof digest)));
    }
    return result;
  }

 private:
  void take_over() {
    if (owner_ != this_thread() && queue_->num_in_flight() > 0) {
      throw std::runtime_error("the file queue has something in flight of another thread");
    }
    owner_ = this_thread();
  }
  static void require_shapes(const Integers& tags, const Integers& operations, const Integers& fds,
                             const Integers& offsets, const Integers& extent_ends, const Integers& addresses,
                             const Integers& num_bytes) {
    const auto require = [](bool holds, const char* message) {
      if (!holds) throw std::invalid_argument(message);
    };
    require(operations.size() == tags.size() && fds.size() == tags.size() && offsets.size() == tags.size() &&
                extent_ends.size() == tags.size() && addresses.size() == num_bytes.size(),
            "requests: expected arrays of one length, and extents of one length");
    std::int64_t last = 0;
    for (std::size_t number = 0; number < tags.size(); ++number) {
      const std::int64_t operation = operations.data()[number];
      require(operation >= 0 && operation <= 2, "operations: expected 0, 1 or 2");
      require(extent_ends.data()[number] >= last, "extent_ends: expected ends that do not fall");
      last = extent_ends.data()[number];
    }
    require(tags.size() == 0 || static_cast<std::size_t>(last) == num_bytes.size(),
            "extent_ends: expected the last to be the number of extents");
    for (std::size_t extent = 0; extent < num_bytes.size(); ++extent) {
      require(num_bytes.data()[extent] >= 0, "num_bytes: expected sizes >= 0");
    }
  }

  std::atomic<bool> is_used_{false};
  std::uint64_t owner_ = 0;  // the thread that has something in flight
  std::unique_ptr<cpu::FileQueue> queue_;
};

}  // namespace

void bind_file_queue(nb::module_& module) {
  module.def("has_uring", &cpu::has_uring);
  nb::class_<Queue>(module, "FileQueue")
      .def(nb::init<std::size_t, const std::string&, std::size_t>(), "max_in_flight"_a, "backend"_a = "best",
           "num_threads"_a = 4)
      .def_prop_ro("backend", &Queue::backend)
      .def_prop_ro("num_in_flight", &Queue::num_in_flight)
      .def("submit", &Queue::submit, "tags"_a.noconvert(), "operations"_a.noconvert(), "fds"_a.noconvert(),
           "offsets"_a.noconvert(), "extent_ends"_a.noconvert(), "addresses"_a.noconvert(), "num_bytes"_a.noconvert(),
           "wants_digests"_a)
      .def("reap", &Queue::reap, "min_completions"_a, "timeout_s"_a);
}

}  // namespace hybridkv::bindings
