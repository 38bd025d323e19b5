// hybridkv.native._cpu: csrc/cpu and csrc/ledger for Python. It checks shapes and releases the interpreter lock for
// long calls. Addresses are plain integers, as everywhere in hybridkv.transfer; the caller keeps their memory alive.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "csrc/bindings/ledger_binding.h"
#include "csrc/bindings/lowering_binding.h"
#include "csrc/bindings/record_queue_binding.h"
#include "csrc/bindings/unlocked.h"
#include "csrc/cpu/copy.h"
#include "csrc/cpu/level.h"
#include "csrc/cpu/run_source.h"
#include "csrc/cpu/thread_pool.h"
#include "hybridkv/canonical_digest.h"

namespace hybridkv::bindings {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

using Integers = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

cpu::Level level_of(const std::string& name) {
  if (name == "best") return cpu::best_level();
  for (const cpu::Level level : cpu::supported_levels()) {
    if (name == cpu::name_of(level)) return level;
  }
  throw std::invalid_argument("level: expected one of levels(), got " + name);
}

cpu::Caching caching_of(const std::string& name) {
  if (name == "by_size") return cpu::Caching::kBySize;
  if (name == "cached") return cpu::Caching::kCached;
  if (name == "streamed") return cpu::Caching::kStreamed;
  throw std::invalid_argument("caching: expected by_size, cached or streamed, got " + name);
}

// Options of a copier, for all its calls.
struct MemoryCopier {
  cpu::CopyOptions options;
  cpu::ThreadPool pool;

  MemoryCopier(std::size_t num_threads, const std::string& level, const std::string& caching)
      : options{level_of(level), caching_of(caching), nullptr}, pool(checked(num_threads)) {
    if (num_threads > 1) options.pool = &pool;
  }

  static std::size_t checked(std::size_t num_threads) {
    if (num_threads < 1 || num_threads > 256) {
      throw std::invalid_argument("num_threads: expected 1 to 256, got " + std::to_string(num_threads));
    }
    return num_threads;
  }
};

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

// Limit for addresses.
constexpr std::int64_t kMemoryEnd = std::int64_t{1} << 56;

// True if a process can have memory there. The caller must know that it has.
bool may_be_memory(std::int64_t address, std::int64_t num_bytes) {
  return num_bytes == 0 || (num_bytes > 0 && num_bytes < kMemoryEnd && address > 0 && address <= kMemoryEnd - num_bytes);
}

void require_memory(const char* name, const Integers& addresses, const Integers& num_bytes) {
  for (std::size_t run = 0; run < num_bytes.size(); ++run) {
    if (may_be_memory(addresses.data()[run], num_bytes.data()[run])) continue;
    throw std::invalid_argument(std::string(name) + ", num_bytes: expected memory, got " +
                                std::to_string(num_bytes.data()[run]) + " bytes at " +
                                std::to_string(addresses.data()[run]));
  }
}

cpu::RunArrays runs_of(const Integers& sources, const Integers& destinations, const Integers& num_bytes) {
  require(sources.size() == num_bytes.size() && destinations.size() == num_bytes.size(),
          "sources, destinations, num_bytes: expected arrays of one length");
  require_memory("sources", sources, num_bytes);
  require_memory("destinations", destinations, num_bytes);
  return {sources.data(), destinations.data(), num_bytes.data(), num_bytes.size()};
}

// Copy of the ends, because another thread may write to the array while the interpreter lock is released.
std::vector<std::int64_t> checked_ends(const Integers& record_ends, std::size_t num_runs) {
  std::vector<std::int64_t> ends(record_ends.data(), record_ends.data() + record_ends.size());
  std::int64_t last = 0;
  for (const std::int64_t end : ends) {
    require(end >= last, "record_ends: expected ends that do not decrease");
    last = end;
  }
  require(static_cast<std::size_t>(last) == num_runs, "record_ends: expected the last to be the number of runs");
  return ends;
}

nb::bytes bytes_of(const std::vector<Digest128>& digests) {
  std::vector<unsigned char> bytes(digests.size() * 16);
  for (std::size_t digest = 0; digest < digests.size(); ++digest) {
    write_canonical(digests[digest], bytes.data() + digest * 16);
  }
  return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

void copy(MemoryCopier& copier, const Integers& sources, const Integers& destinations, const Integers& num_bytes) {
  const cpu::RunArrays runs = runs_of(sources, destinations, num_bytes);
  const Unlocked unlocked;
  cpu::copy(runs, copier.options);
}

nb::bytes copy_and_digest(MemoryCopier& copier, const Integers& sources, const Integers& destinations,
                          const Integers& num_bytes, const Integers& record_ends) {
  const cpu::RunArrays runs = runs_of(sources, destinations, num_bytes);
  const std::vector<std::int64_t> ends = checked_ends(record_ends, runs.size());
  std::vector<Digest128> digests(ends.size());
  {
    const Unlocked unlocked;
    cpu::copy_and_digest(runs, ends.data(), digests.size(), digests.data(), copier.options);
  }
  return bytes_of(digests);
}

nb::bytes digest(MemoryCopier& copier, const Integers& addresses, const Integers& num_bytes,
                 const Integers& record_ends) {
  require(addresses.size() == num_bytes.size(), "addresses, num_bytes: expected arrays of one length");
  require_memory("addresses", addresses, num_bytes);
  const std::vector<std::int64_t> ends = checked_ends(record_ends, num_bytes.size());
  std::vector<Digest128> digests(ends.size());
  {
    const Unlocked unlocked;
    const cpu::RunArrays runs(addresses.data(), nullptr, num_bytes.data(), num_bytes.size());
    cpu::digest(runs, ends.data(), digests.size(), digests.data(), copier.options);
  }
  return bytes_of(digests);
}

// memcpy of the C library, for benchmarks without the cost of ctypes.
void copy_with_memcpy(std::int64_t source, std::int64_t destination, std::int64_t num_bytes) {
  require(may_be_memory(source, num_bytes) && may_be_memory(destination, num_bytes),
          "source, destination, num_bytes: expected memory");
  const Unlocked unlocked;
  std::memcpy(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source),
              static_cast<std::size_t>(num_bytes));
}

std::vector<std::string> levels() {
  std::vector<std::string> names;
  for (const cpu::Level level : cpu::supported_levels()) names.emplace_back(cpu::name_of(level));
  return names;
}

}  // namespace

NB_MODULE(_cpu, module) {
  // An object that lives until the process ends, such as a library's copier, is not a leak.
  nb::set_leak_warnings(false);
  module.def("levels", &levels);
  module.def("copy_with_memcpy", &copy_with_memcpy, "source"_a, "destination"_a, "num_bytes"_a);
  nb::class_<MemoryCopier>(module, "MemoryCopier")
      .def(nb::init<std::size_t, const std::string&, const std::string&>(), "num_threads"_a = 1, "level"_a = "best",
           "caching"_a = "by_size")
      .def("copy", &copy, "sources"_a.noconvert(), "destinations"_a.noconvert(), "num_bytes"_a.noconvert())
      .def("copy_and_digest", &copy_and_digest, "sources"_a.noconvert(), "destinations"_a.noconvert(),
           "num_bytes"_a.noconvert(), "record_ends"_a.noconvert())
      .def("digest", &digest, "addresses"_a.noconvert(), "num_bytes"_a.noconvert(), "record_ends"_a.noconvert());
  bind_ledger(module);
  bind_record_ledger(module);
  bind_lowering(module);
  bind_record_queue(module);
}

}  // namespace hybridkv::bindings
