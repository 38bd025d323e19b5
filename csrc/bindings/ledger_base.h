// Common part of the bindings of all ledgers.
#ifndef HYBRIDKV_BINDINGS_LEDGER_BASE_H_
#define HYBRIDKV_BINDINGS_LEDGER_BASE_H_

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/bindings/key_batches.h"
#include "csrc/ledger/basic_ledger.h"

namespace hybridkv::bindings {

namespace nb = nanobind;

using ledger::Key;
using ledger::KeyState;
using ledger::Refusal;

inline void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

inline const char* words_of(KeyState state) {
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

inline const char* words_of(Refusal refusal) {
  switch (refusal) {
    case Refusal::kNoRoom:
      return "there is no room";
    case Refusal::kTooLarge:
      return "too large";
    case Refusal::kPresent:
      return "present";
    case Refusal::kClosed:
      return "the ledger is closed";
    default:
      return "nothing";
  }
}

inline std::string hex(Key key) {
  std::string digits;
  for (const char byte : key) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned>(static_cast<unsigned char>(byte)));
    digits += two;
  }
  return digits;
}

inline nb::bytes bytes_of(std::string_view key) { return nb::bytes(key.data(), key.size()); }

// Returns Python's objects for answers. Each call holds the interpreter lock, so any thread may call. The ledger makes
// its changes before it makes an object, because that may run Python code.
template <class Ledger>
class LedgerBase {
 public:
  std::uint64_t max_index_bytes() const { return ledger_.most_bytes(); }
  std::uint64_t leftover_bytes() const { return ledger_.leftover_bytes(); }
  std::uint64_t num_keys() const { return ledger_.num_keys(); }
  std::uint64_t num_reserved() const { return ledger_.num_reserved(); }
  std::uint64_t num_pinned() const { return ledger_.num_pinned(); }
  std::uint64_t generation() const { return ledger_.generation(); }
  bool is_closed() const { return ledger_.is_closed(); }

  // Queries.

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
      // The first few keys separately: the answer is mostly among them.
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
  nb::list eviction_order() const {
    nb::list keys;
    for (const std::string& key : ledger_.eviction_order()) keys.append(bytes_of(key));
    return keys;
  }

  // Changes.

  nb::tuple take_tally() {
    const ledger::Tally tally = ledger_.take_tally();
    nb::dict refused_how_often;
    for (std::size_t refusal = 1; refusal < ledger::kNumRefusals; ++refusal) {
      if (tally.refusals[refusal] > 0) refused_how_often[refusals_[refusal - 1]] = tally.refusals[refusal];
    }
    return nb::make_tuple(tally.reservations, tally.commits, tally.aborts, tally.invalidations, tally.evictions,
                          tally.evicted_units * ledger_.unit_bytes(), refused_how_often);
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

 protected:
  // `answers`: objects for MISS, PENDING, HIT. `refusals`: objects for NO_ROOM, TOO_LARGE, PRESENT, CLOSED.
  // `make_slot`: makes a slot from a tuple of extents. `misuse`: exception type for a key in a wrong state.
  template <class Options>
  LedgerBase(const Options& options, nb::tuple answers, nb::tuple refusals, nb::object make_slot, nb::object misuse)
      : ledger_(options),
        answers_(std::move(answers)),
        refusals_(std::move(refusals)),
        make_slot_(std::move(make_slot)),
        misuse_(std::move(misuse)) {
    require(answers_.size() == 3 && refusals_.size() == ledger::kNumRefusals - 1,
            "answers, refusals: expected three and four");
    if (PyCallable_Check(make_slot_.ptr()) == 0) throw nb::type_error("make_slot: expected a callable");
    if (!PyExceptionClass_Check(misuse_.ptr())) throw nb::type_error("misuse: expected a type of exceptions");
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

  // Limited to 63 bits, more than any ledger has room for.
  static std::int64_t integer_of(PyObject* object) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (value == -1 && overflow == 0 && PyErr_Occurred() != nullptr) nb::raise_python_error();
    if (overflow != 0) return overflow > 0 ? std::numeric_limits<std::int64_t>::max() : -1;
    return value;
  }
  nb::object refused(Refusal refusal) const {
    return nb::borrow(refusals_[static_cast<std::size_t>(refusal) - 1]);
  }

  // A tuple of at most two candidates: a key extends the first one that is present.
  static ledger::Extends extended_of(PyObject* object) {
    const Py_ssize_t count = PyTuple_Check(object) ? PyTuple_Size(object) : -1;
    if (count < 0 || count > 2) throw nb::type_error("extends: expected a tuple of at most two keys");
    ledger::Extends extends;
    if (count > 0) extends.first = key_of(PyTuple_GetItem(object, 0));
    if (count > 1) extends.second = key_of(PyTuple_GetItem(object, 1));
    return extends;
  }
  // `extends`: empty, or one for each key, as for `extended_of`.
  void extend(KeyBatches& batches, nb::handle extends) {
    const nb::object all = nb::steal(PySequence_List(extends.ptr()));
    if (!all.is_valid()) nb::raise_python_error();
    if (PyList_Size(all.ptr()) == 0) return;
    require(static_cast<std::size_t>(PyList_Size(all.ptr())) == batches.size(), "extends: expected one for each key");
    ledger::Extends extended[KeyBatches::kAtATime];
    batches.each([&](std::size_t first, std::span<const Key> batch) {
      for (std::size_t key = 0; key < batch.size(); ++key) {
        extended[key] = extended_of(PyList_GetItem(all.ptr(), static_cast<Py_ssize_t>(first + key)));
      }
      ledger_.extend(batch, {extended, batch.size()});
      return true;
    });
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

  // The entries of committed keys. False if one is not committed.
  bool find_committed(nb::handle keys, std::vector<std::uint32_t>& found) const {
    KeyBatches batches(keys);
    found.resize(batches.size());
    bool are_all = true;
    batches.each([&](std::size_t first, std::span<const Key> batch) {
      return are_all = ledger_.find_committed(batch, found.data() + first);
    });
    return are_all;
  }

  // A tuple of (offset, num_bytes).
  template <class Extent>
  static nb::object extents_of(std::span<const Extent> extents) {
    nb::object all = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(extents.size())));
    if (!all.is_valid()) nb::raise_python_error();
    for (std::size_t extent = 0; extent < extents.size(); ++extent) {
      PyObject* offset = PyLong_FromUnsignedLongLong(extents[extent].offset);
      PyObject* num_bytes = PyLong_FromUnsignedLongLong(extents[extent].num_bytes);
      PyObject* pair = PyTuple_New(2);
      if (offset == nullptr || num_bytes == nullptr || pair == nullptr) nb::raise_python_error();
      PyTuple_SetItem(pair, 0, offset);
      PyTuple_SetItem(pair, 1, num_bytes);
      PyTuple_SetItem(all.ptr(), static_cast<Py_ssize_t>(extent), pair);
    }
    return all;
  }
  nb::object slot_of(const nb::object& extents) const {
    PyObject* argument = extents.ptr();
    nb::object made = nb::steal(PyObject_Vectorcall(make_slot_.ptr(), &argument, 1, nullptr));
    if (!made.is_valid()) nb::raise_python_error();
    return made;
  }

  Ledger ledger_;
  nb::tuple answers_;
  nb::tuple refusals_;
  nb::object make_slot_;
  nb::object misuse_;
};

// Methods of all ledgers.
template <class Self>
void bind_base(nb::class_<Self>& self) {
  using namespace nb::literals;
  self.def_prop_ro("num_keys", &Self::num_keys)
      .def_prop_ro("num_reserved", &Self::num_reserved)
      .def_prop_ro("num_pinned", &Self::num_pinned)
      .def_prop_ro("generation", &Self::generation)
      .def_prop_ro("is_closed", &Self::is_closed)
      .def_prop_ro("max_index_bytes", &Self::max_index_bytes)
      .def_prop_ro("leftover_bytes", &Self::leftover_bytes)
      .def("lacks", &Self::lacks, "key"_a)
      .def("lookup", &Self::lookup, "key"_a)
      .def("leading", &Self::leading, "keys"_a)
      .def("last_held", &Self::last_held, "keys"_a)
      .def("any_pending", &Self::any_pending, "keys"_a)
      .def("eviction_order", &Self::eviction_order)
      .def("take_tally", &Self::take_tally)
      .def("watch_at_most", &Self::watch_at_most, "max_keys"_a)
      .def("take_changed", &Self::take_changed);
}

}  // namespace hybridkv::bindings

#endif  // HYBRIDKV_BINDINGS_LEDGER_BASE_H_
