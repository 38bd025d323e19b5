#include "csrc/bindings/ledger_binding.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/bindings/key_batches.h"
#include "csrc/ledger/ledger.h"

namespace hybridkv::bindings {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

using ledger::Key;
using ledger::KeyState;
using ledger::Places;
using ledger::Refusal;

constexpr std::uint64_t kMostGranuleBytes = std::uint64_t{1} << 32;

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

const char* words_of(KeyState state) {
  switch (state) {
    case KeyState::kReserved:
      return "reserved";
    case KeyState::kCommitted:
      return "committed";
    case KeyState::kDoomedWrite:
      return "invalidated while it is being stored";
    case KeyState::kDoomedRead:
      return "invalidated while it is pinned";
    default:
      return "unknown";
  }
}

std::string hex(Key key) {
  std::string digits;
  for (const char byte : key) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned>(static_cast<unsigned char>(byte)));
    digits += two;
  }
  return digits;
}

nb::bytes bytes_of(std::string_view key) { return nb::bytes(key.data(), key.size()); }

// What Python has for the answers, made of objects that it gave. The interpreter lock is held in every call, so any
// thread may ask; and the ledger has changed already when an object is made for it, since that may run anything.
class GranuleLedger {
 public:
  // `answers`: for MISS, PENDING, HIT. `refusals`: for NO_ROOM, TOO_LARGE, PRESENT, CLOSED. `make_slot`: of a tuple of
  // extents. `misuse`: the type of the error for a call that does not fit.
  GranuleLedger(std::uint64_t num_granules, std::uint64_t granule_bytes, std::uint64_t max_keys, std::uint64_t seed,
                nb::tuple answers, nb::tuple refusals, nb::object make_slot, nb::object misuse)
      : ledger_(checked(num_granules, granule_bytes, max_keys, seed)),
        answers_(std::move(answers)),
        refusals_(std::move(refusals)),
        make_slot_(std::move(make_slot)),
        misuse_(std::move(misuse)) {
    require(answers_.size() == 3 && refusals_.size() == ledger::kNumRefusals - 1,
            "answers, refusals: expected three and four");
  }

  std::uint64_t capacity_bytes() const { return ledger_.capacity_bytes(); }
  std::uint64_t used_bytes() const { return ledger_.used_bytes(); }
  std::uint64_t granule_bytes() const { return ledger_.options().granule_bytes; }
  std::uint64_t max_keys() const { return ledger_.options().max_keys; }
  std::uint64_t most_index_bytes() const { return ledger_.most_bytes(); }
  std::uint64_t leftover_bytes() const { return ledger_.leftover_bytes(); }
  std::uint64_t num_keys() const { return ledger_.num_keys(); }
  std::uint64_t num_reserved() const { return ledger_.num_reserved(); }
  std::uint64_t num_pinned() const { return ledger_.num_pinned(); }
  std::uint64_t generation() const { return ledger_.generation(); }
  bool is_closed() const { return ledger_.is_closed(); }

  // What is asked.

  bool lacks(nb::handle key) const { return ledger_.answer(key_of(key.ptr())) == ledger::Answer::kMiss; }
  nb::object lookup(nb::handle key) const {
    return nb::borrow(answers_[static_cast<std::size_t>(ledger_.answer(key_of(key.ptr())))]);
  }
  std::size_t leading(nb::handle keys) const {
    if (!PyList_Check(keys.ptr()) && !PyTuple_Check(keys.ptr())) return leading_one_by_one(keys);
    KeyBatches batches(keys);
    std::size_t num_leading = batches.size();
    batches.each([&](std::size_t first, std::span<const Key> batch) {
      const std::size_t count = ledger_.leading(batch);
      if (count == batch.size()) return true;
      num_leading = first + count;
      return false;
    });
    return num_leading;
  }
  nb::object last_held(nb::handle keys) const {
    KeyBatches batches(keys);
    for (std::size_t end = batches.size(); end > 0;) {
      // The first few apart: mostly it is among them.
      const std::size_t most = end == batches.size() ? 32 : KeyBatches::kAtATime;
      const std::size_t first = end > most ? end - most : 0;
      const auto last = ledger_.last_held(batches.between(first, end));
      if (last) return nb::int_(first + *last);
      end = first;
    }
    return nb::none();
  }
  bool any_pending(nb::handle keys) const {
    if (ledger_.num_reserved() == 0) return false;
    bool is_any = false;
    KeyBatches(keys).each([&](std::size_t, std::span<const Key> batch) {
      is_any = ledger_.any_pending(batch);
      return !is_any;
    });
    return is_any;
  }
  nb::object find(nb::handle key) const {
    Places places;
    return ledger_.find(key_of(key.ptr()), places) ? slot(places, 0, places.extents.size()) : nb::none();
  }
  nb::list eviction_order() const {
    nb::list keys;
    for (const std::string& key : ledger_.eviction_order()) keys.append(bytes_of(key));
    return keys;
  }

  // What is done.

  nb::object reserve(nb::handle key, nb::handle num_bytes) {
    Places places;
    const Refusal refusal = ledger_.reserve(key_of(key.ptr()), size_of(num_bytes.ptr()), places);
    return refusal == Refusal::kNone ? slot(places, 0, places.extents.size()) : refused(refusal);
  }

  nb::list reserve_all(nb::handle chunks) {
    const nb::object all = nb::steal(PySequence_List(chunks.ptr()));
    if (!all.is_valid()) nb::raise_python_error();
    const auto count = static_cast<std::size_t>(PyList_Size(all.ptr()));
    std::vector<Key> keys;
    std::vector<std::uint64_t> num_bytes;
    keys.reserve(count);
    num_bytes.reserve(count);
    bool is_misused = false;
    for (std::size_t chunk = 0; chunk < count && !is_misused; ++chunk) {
      PyObject* pair = PyList_GetItem(all.ptr(), static_cast<Py_ssize_t>(chunk));
      if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
        throw nb::type_error("reserve_all: expected tuples of a key and a number of bytes");
      }
      const std::int64_t size = integer_of(PyTuple_GetItem(pair, 1));
      is_misused = size <= 0;  // those before it are made
      if (is_misused) break;
      keys.push_back(key_of(PyTuple_GetItem(pair, 0)));
      num_bytes.push_back(static_cast<std::uint64_t>(size));
    }
    std::vector<Refusal> refusals(keys.size());
    Places places;
    ledger_.reserve_all(keys, num_bytes.data(), refusals.data(), places);
    if (is_misused) size_of(PyTuple_GetItem(PyList_GetItem(all.ptr(), static_cast<Py_ssize_t>(keys.size())), 1));
    return answers_of(refusals, places);
  }

  bool commit(nb::handle key) {
    const Key view = key_of(key.ptr());
    bool is_offered = false;
    if (ledger_.commit_all({&view, 1}, &is_offered) == 0) raise_misfit("commit", view);
    return is_offered;
  }
  nb::list commit_all(nb::handle keys) {
    KeyBatches batches(keys);
    const auto are_offered = std::make_unique<bool[]>(batches.size() + 1);
    batches.each([&](std::size_t first, std::span<const Key> batch) {
      const std::size_t done = ledger_.commit_all(batch, are_offered.get() + first);
      if (done < batch.size()) raise_misfit("commit", batch[done]);
      return true;
    });
    nb::list answers;
    for (std::size_t key = 0; key < batches.size(); ++key) answers.append(nb::bool_(are_offered[key]));
    return answers;
  }
  void abort(nb::handle key) {
    const Key view = key_of(key.ptr());
    if (ledger_.abort_all({&view, 1}) == 0) raise_misfit("abort", view);
  }
  bool invalidate(nb::handle key, nb::handle) {
    const Key view = key_of(key.ptr());
    return ledger_.invalidate_all({&view, 1}) == 1;
  }
  std::size_t invalidate_all(nb::handle keys) {
    std::size_t count = 0;
    KeyBatches(keys).each([&](std::size_t, std::span<const Key> batch) {
      count += ledger_.invalidate_all(batch);
      return true;
    });
    return count;
  }
  void touch(nb::handle keys) {
    KeyBatches(keys).each([&](std::size_t, std::span<const Key> batch) {
      ledger_.touch(batch);
      return true;
    });
  }
  void demote(nb::handle keys) {
    KeyBatches(keys).each([&](std::size_t, std::span<const Key> batch) {
      ledger_.demote(batch);
      return true;
    });
  }
  nb::object pin(nb::handle key) {
    const Key view = key_of(key.ptr());
    std::uint32_t found = 0;
    if (!ledger_.find_committed({&view, 1}, &found)) return nb::none();
    Places places;
    ledger_.pin_found({&found, 1}, places);
    return slot(places, 0, places.extents.size());
  }
  nb::object pin_all(nb::handle keys) {
    KeyBatches batches(keys);
    std::vector<std::uint32_t> found(batches.size());
    bool are_all = true;
    batches.each([&](std::size_t first, std::span<const Key> batch) {
      return are_all = ledger_.find_committed(batch, found.data() + first);
    });
    if (!are_all) return nb::none();
    Places places;
    places.extents.reserve(found.size());
    places.ends.reserve(found.size());
    ledger_.pin_found(found, places);
    return answers_of(std::vector<Refusal>(found.size(), Refusal::kNone), places);
  }
  void unpin(nb::handle key) {
    const Key view = key_of(key.ptr());
    if (ledger_.unpin_all({&view, 1}) == 0) raise_not_pinned(view);
  }
  void unpin_all(nb::handle keys) {
    KeyBatches(keys).each([&](std::size_t, std::span<const Key> batch) {
      const std::size_t done = ledger_.unpin_all(batch);
      if (done < batch.size()) raise_not_pinned(batch[done]);
      return true;
    });
  }

  std::uint64_t clear() { return ledger_.forget_all(); }
  void close() { ledger_.close(); }

  nb::tuple take_tally() {
    const ledger::Tally tally = ledger_.take_tally();
    nb::dict refused_how_often;
    for (std::size_t refusal = 1; refusal < ledger::kNumRefusals; ++refusal) {
      if (tally.refusals[refusal] > 0) refused_how_often[refusals_[refusal - 1]] = tally.refusals[refusal];
    }
    return nb::make_tuple(tally.reservations, tally.commits, tally.aborts, tally.invalidations, tally.evictions,
                          tally.evicted_bytes, refused_how_often);
  }
  void watch_at_most(std::size_t max_keys) { ledger_.watch(max_keys); }
  nb::tuple take_changed() {
    const ledger::Changes changes = ledger_.take_changes();
    nb::object keys = nb::steal(PySet_New(nullptr));
    for (const std::string& key : changes.keys) {
      if (PySet_Add(keys.ptr(), bytes_of(key).ptr()) != 0) nb::raise_python_error();
    }
    return nb::make_tuple(keys, changes.is_any);
  }

 private:
  static ledger::LedgerOptions checked(std::uint64_t num_granules, std::uint64_t granule_bytes, std::uint64_t max_keys,
                                       std::uint64_t seed) {
    require(num_granules >= 1 && num_granules < ledger::kNone, "num_granules: expected 1 to 2^32 - 2");
    require(granule_bytes >= 1 && granule_bytes <= kMostGranuleBytes, "granule_bytes: expected 1 to 2^32");
    require(max_keys >= 1 && max_keys <= num_granules, "max_keys: expected 1 to num_granules");
    return {static_cast<std::uint32_t>(num_granules), granule_bytes, static_cast<std::uint32_t>(max_keys), seed};
  }

  std::size_t leading_one_by_one(nb::handle keys) const {
    std::size_t num_leading = 0;
    const nb::object all = nb::steal(PyObject_GetIter(keys.ptr()));
    if (!all.is_valid()) nb::raise_python_error();
    while (PyObject* key = PyIter_Next(all.ptr())) {
      const nb::object held = nb::steal(key);
      if (lacks(held)) return num_leading;
      ++num_leading;
    }
    if (PyErr_Occurred() != nullptr) nb::raise_python_error();
    return num_leading;
  }

  // As many as fit into 63 bits, which is more than any ledger has room for.
  static std::int64_t integer_of(PyObject* object) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (value == -1 && overflow == 0 && PyErr_Occurred() != nullptr) nb::raise_python_error();
    if (overflow != 0) return overflow > 0 ? std::numeric_limits<std::int64_t>::max() : -1;
    return value;
  }
  std::uint64_t size_of(PyObject* object) const {
    const std::int64_t value = integer_of(object);
    if (value <= 0) {
      raise("reserve: expected num_bytes > 0, got " + std::string(nb::str(nb::handle(object)).c_str()));
    }
    return static_cast<std::uint64_t>(value);
  }

  nb::object refused(Refusal refusal) const {
    return nb::borrow(refusals_[static_cast<std::size_t>(refusal) - 1]);
  }

  nb::object slot(const Places& places, std::size_t begin, std::size_t end) const {
    const nb::object extents = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(end - begin)));
    if (!extents.is_valid()) nb::raise_python_error();
    for (std::size_t extent = begin; extent < end; ++extent) {
      PyObject* offset = PyLong_FromUnsignedLongLong(places.extents[extent].offset);
      PyObject* num_bytes = PyLong_FromUnsignedLongLong(places.extents[extent].num_bytes);
      PyObject* pair = PyTuple_New(2);
      if (offset == nullptr || num_bytes == nullptr || pair == nullptr) nb::raise_python_error();
      PyTuple_SetItem(pair, 0, offset);
      PyTuple_SetItem(pair, 1, num_bytes);
      PyTuple_SetItem(extents.ptr(), static_cast<Py_ssize_t>(extent - begin), pair);
    }
    PyObject* argument = extents.ptr();
    nb::object made = nb::steal(PyObject_Vectorcall(make_slot_.ptr(), &argument, 1, nullptr));
    if (!made.is_valid()) nb::raise_python_error();
    return made;
  }

  // For each a slot or why there is none, one place for each slot.
  nb::list answers_of(const std::vector<Refusal>& refusals, const Places& places) const {
    nb::list answers = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(refusals.size())));
    if (!answers.is_valid()) nb::raise_python_error();
    std::size_t begin = 0;
    std::size_t taken = 0;
    for (std::size_t chunk = 0; chunk < refusals.size(); ++chunk) {
      nb::object answer;
      if (refusals[chunk] != Refusal::kNone) {
        answer = refused(refusals[chunk]);
      } else {
        answer = slot(places, begin, places.ends[taken]);
        begin = places.ends[taken++];
      }
      PyList_SetItem(answers.ptr(), static_cast<Py_ssize_t>(chunk), answer.release().ptr());
    }
    return answers;
  }

  [[noreturn]] void raise(const std::string& message) const {
    PyErr_SetString(misuse_.ptr(), message.c_str());
    nb::raise_python_error();
  }
  [[noreturn]] void raise_misfit(const char* operation, Key key) const {
    const KeyState state = ledger_.state(key);
    const std::string got = state == KeyState::kUnknown ? "unknown key " + hex(key)
                                                        : hex(key) + " (" + words_of(state) + ")";
    raise(std::string(operation) + ": expected a reserved key, got " + got);
  }
  [[noreturn]] void raise_not_pinned(Key key) const { raise("unpin: expected a pinned key, got " + hex(key)); }

  ledger::Ledger ledger_;
  nb::tuple answers_;
  nb::tuple refusals_;
  nb::object make_slot_;
  nb::object misuse_;
};

}  // namespace

void bind_ledger(nb::module_& module) {
  using Self = GranuleLedger;
  nb::class_<Self>(module, "GranuleLedger")
      .def(nb::init<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, nb::tuple, nb::tuple, nb::object,
                    nb::object>(),
           "num_granules"_a, "granule_bytes"_a, "max_keys"_a, "seed"_a, "answers"_a, "refusals"_a, "make_slot"_a,
           "misuse"_a)
      .def_prop_ro("capacity_bytes", &Self::capacity_bytes)
      .def_prop_ro("used_bytes", &Self::used_bytes)
      .def_prop_ro("granule_bytes", &Self::granule_bytes)
      .def_prop_ro("max_keys", &Self::max_keys)
      .def_prop_ro("most_index_bytes", &Self::most_index_bytes)
      .def_prop_ro("leftover_bytes", &Self::leftover_bytes)
      .def_prop_ro("num_keys", &Self::num_keys)
      .def_prop_ro("num_reserved", &Self::num_reserved)
      .def_prop_ro("num_pinned", &Self::num_pinned)
      .def_prop_ro("generation", &Self::generation)
      .def_prop_ro("is_closed", &Self::is_closed)
      .def("lacks", &Self::lacks, "key"_a)
      .def("lookup", &Self::lookup, "key"_a)
      .def("leading", &Self::leading, "keys"_a)
      .def("last_held", &Self::last_held, "keys"_a)
      .def("any_pending", &Self::any_pending, "keys"_a)
      .def("find", &Self::find, "key"_a)
      .def("eviction_order", &Self::eviction_order)
      .def("reserve", &Self::reserve, "key"_a, "num_bytes"_a)
      .def("reserve_all", &Self::reserve_all, "chunks"_a)
      .def("commit", &Self::commit, "key"_a)
      .def("commit_all", &Self::commit_all, "keys"_a)
      .def("abort", &Self::abort, "key"_a)
      .def("invalidate", &Self::invalidate, "key"_a, "reason"_a = "")
      .def("invalidate_all", &Self::invalidate_all, "keys"_a)
      .def("touch", &Self::touch, "keys"_a)
      .def("demote", &Self::demote, "keys"_a)
      .def("pin", &Self::pin, "key"_a)
      .def("pin_all", &Self::pin_all, "keys"_a)
      .def("unpin", &Self::unpin, "key"_a)
      .def("unpin_all", &Self::unpin_all, "keys"_a)
      .def("clear", &Self::clear)
      .def("close", &Self::close)
      .def("take_tally", &Self::take_tally)
      .def("watch_at_most", &Self::watch_at_most, "max_keys"_a)
      .def("take_changed", &Self::take_changed);
}

}  // namespace hybridkv::bindings
