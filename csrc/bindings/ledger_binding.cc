#include "csrc/bindings/ledger_binding.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "csrc/bindings/key_batches.h"
#include "csrc/bindings/ledger_base.h"
#include "csrc/ledger/ledger.h"

namespace hybridkv::bindings {
namespace {

using namespace nb::literals;

using ledger::Places;

constexpr std::uint64_t kMostGranuleBytes = std::uint64_t{1} << 32;

class GranuleLedger : public LedgerBase<ledger::Ledger> {
 public:
  GranuleLedger(std::uint64_t num_granules, std::uint64_t granule_bytes, std::uint64_t max_keys, std::uint64_t seed,
                nb::tuple answers, nb::tuple refusals, nb::object make_slot, nb::object misuse)
      : LedgerBase(checked(num_granules, granule_bytes, max_keys, seed), std::move(answers), std::move(refusals),
                   std::move(make_slot), std::move(misuse)) {}

  std::uint64_t capacity_bytes() const { return ledger_.capacity_bytes(); }
  std::uint64_t used_bytes() const { return ledger_.used_bytes(); }
  std::uint64_t granule_bytes() const { return ledger_.options().granule_bytes; }
  std::uint64_t max_keys() const { return ledger_.options().max_keys; }

  // Queries.

  nb::object find(nb::handle key) const {
    Places places;
    return ledger_.find(key_of(key.ptr()), places) ? slot(places, 0, places.extents.size()) : nb::none();
  }

  // Changes.

  nb::object reserve(nb::handle key, nb::handle num_bytes, nb::handle extends) {
    Places places;
    const Refusal refusal =
        ledger_.reserve(key_of(key.ptr()), size_of(num_bytes.ptr()), extended_of(extends.ptr()), places);
    return refusal == Refusal::kNone ? slot(places, 0, places.extents.size()) : refused(refusal);
  }

  nb::list reserve_all(nb::handle chunks) {
    const nb::object all = nb::steal(PySequence_List(chunks.ptr()));
    if (!all.is_valid()) nb::raise_python_error();
    const auto count = static_cast<std::size_t>(PyList_Size(all.ptr()));
    std::vector<Key> keys;
    std::vector<ledger::Extends> extends;
    std::vector<std::uint64_t> num_bytes;
    keys.reserve(count);
    extends.reserve(count);
    num_bytes.reserve(count);
    bool is_misused = false;
    for (std::size_t chunk = 0; chunk < count && !is_misused; ++chunk) {
      PyObject* pair = PyList_GetItem(all.ptr(), static_cast<Py_ssize_t>(chunk));
      const Py_ssize_t size_of_pair = PyTuple_Check(pair) ? PyTuple_Size(pair) : 0;
      if (size_of_pair != 2 && size_of_pair != 3) {
        throw nb::type_error("reserve_all: expected tuples of a key, a number of bytes, and keys that it extends");
      }
      const std::int64_t size = integer_of(PyTuple_GetItem(pair, 1));
      is_misused = size <= 0;  // the reservations before it are made
      if (is_misused) break;
      keys.push_back(key_of(PyTuple_GetItem(pair, 0)));
      extends.push_back(size_of_pair == 3 ? extended_of(PyTuple_GetItem(pair, 2)) : ledger::Extends());
      num_bytes.push_back(static_cast<std::uint64_t>(size));
    }
    std::vector<Refusal> refusals(keys.size());
    Places places;
    ledger_.reserve_all(keys, num_bytes.data(), extends.data(), refusals.data(), places);
    if (is_misused) size_of(PyTuple_GetItem(PyList_GetItem(all.ptr(), static_cast<Py_ssize_t>(keys.size())), 1));
    return answers_of(refusals, places);
  }

  bool commit(nb::handle key) {
    ledger_.begin_call();
    const Key view = key_of(key.ptr());
    bool is_offered = false;
    if (ledger_.commit_all({&view, 1}, &is_offered) == 0) raise_misfit("commit", view);
    return is_offered;
  }
  nb::list commit_all(nb::handle keys) {
    ledger_.begin_call();
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
  void touch(nb::handle keys, nb::handle extends) {
    KeyBatches batches(keys);
    ledger_.begin_call();
    extend(batches, extends);
    batches.each([&](std::size_t, std::span<const Key> batch) {
      ledger_.touch(batch);
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
    std::vector<std::uint32_t> found;
    if (!find_committed(keys, found)) return nb::none();
    Places places;
    places.extents.reserve(found.size());
    places.ends.reserve(found.size());
    ledger_.pin_found(found, places);
    return answers_of(std::vector<Refusal>(found.size(), Refusal::kNone), places);
  }
  void unpin(nb::handle key) {
    ledger_.begin_call();
    const Key view = key_of(key.ptr());
    if (ledger_.unpin_all({&view, 1}) == 0) raise_not_pinned(view);
  }
  void unpin_all(nb::handle keys) {
    ledger_.begin_call();
    KeyBatches(keys).each([&](std::size_t, std::span<const Key> batch) {
      const std::size_t done = ledger_.unpin_all(batch);
      if (done < batch.size()) raise_not_pinned(batch[done]);
      return true;
    });
  }

  std::uint64_t clear() { return ledger_.forget_all(); }
  void close() { ledger_.close(); }


 private:
  static ledger::LedgerOptions checked(std::uint64_t num_granules, std::uint64_t granule_bytes, std::uint64_t max_keys,
                                       std::uint64_t seed) {
    require(num_granules >= 1 && num_granules < ledger::kNone, "num_granules: expected 1 to 2^32 - 2");
    require(granule_bytes >= 1 && granule_bytes <= kMostGranuleBytes, "granule_bytes: expected 1 to 2^32");
    require(max_keys >= 1 && max_keys <= num_granules, "max_keys: expected 1 to num_granules");
    return {static_cast<std::uint32_t>(num_granules), granule_bytes, static_cast<std::uint32_t>(max_keys), seed};
  }

  std::uint64_t size_of(PyObject* object) const {
    const std::int64_t value = integer_of(object);
    if (value <= 0) {
      raise("reserve: expected num_bytes > 0, got " + std::string(nb::str(nb::handle(object)).c_str()));
    }
    return static_cast<std::uint64_t>(value);
  }

  nb::object slot(const Places& places, std::size_t begin, std::size_t end) const {
    return slot_of(extents_of(std::span(places.extents).subspan(begin, end - begin)));
  }

  // A slot or a refusal for each; `places` has one place for each slot.
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

};

}  // namespace

void bind_ledger(nb::module_& module) {
  using Self = GranuleLedger;
  nb::class_<Self> ledger(module, "GranuleLedger");
  bind_base(ledger);
  ledger
      .def(nb::init<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, nb::tuple, nb::tuple, nb::object,
                    nb::object>(),
           "num_granules"_a, "granule_bytes"_a, "max_keys"_a, "seed"_a, "answers"_a, "refusals"_a, "make_slot"_a,
           "misuse"_a)
      .def_prop_ro("capacity_bytes", &Self::capacity_bytes)
      .def_prop_ro("used_bytes", &Self::used_bytes)
      .def_prop_ro("granule_bytes", &Self::granule_bytes)
      .def_prop_ro("max_keys", &Self::max_keys)
      .def("find", &Self::find, "key"_a)
      .def("reserve", &Self::reserve, "key"_a, "num_bytes"_a, "extends"_a = nb::make_tuple())
      .def("reserve_all", &Self::reserve_all, "chunks"_a)
      .def("commit", &Self::commit, "key"_a)
      .def("commit_all", &Self::commit_all, "keys"_a)
      .def("abort", &Self::abort, "key"_a)
      .def("invalidate", &Self::invalidate, "key"_a, "reason"_a = "")
      .def("invalidate_all", &Self::invalidate_all, "keys"_a)
      .def("touch", &Self::touch, "keys"_a, "extends"_a = nb::make_tuple())
      .def("pin", &Self::pin, "key"_a)
      .def("pin_all", &Self::pin_all, "keys"_a)
      .def("unpin", &Self::unpin, "key"_a)
      .def("unpin_all", &Self::unpin_all, "keys"_a)
      .def("clear", &Self::clear)
      .def("close", &Self::close);
}

}  // namespace hybridkv::bindings
