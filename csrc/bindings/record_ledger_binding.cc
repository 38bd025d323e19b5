#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "csrc/bindings/key_batches.h"
#include "csrc/bindings/ledger_base.h"
#include "csrc/bindings/ledger_binding.h"
#include "csrc/ledger/record_ledger.h"

namespace hybridkv::bindings {
namespace {

using namespace nb::literals;

using ledger::Record;
using ledger::RecordPlace;

template <class Number>
nb::bytes packed(const std::vector<Number>& numbers) {
  return nb::bytes(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Number));
}

template <class Number>
std::span<const Number> unpacked(const nb::bytes& numbers, std::size_t count) {
  require(numbers.size() == count * sizeof(Number), "restore: expected columns of one length");
  return {reinterpret_cast<const Number*>(numbers.c_str()), count};
}

// Limit for pages: their bytes must fit 64 bits.
constexpr std::uint64_t kMostPages = std::uint64_t{1} << 51;

struct Extent {
  std::uint64_t offset;
  std::uint64_t num_bytes;
};

class RecordLedger : public LedgerBase<ledger::RecordLedger> {
 public:
  // `states`: objects for RESERVED, COMMITTED, DELETED_WHILE_WRITTEN, DELETED_WHILE_PINNED. The others as for
  // GranuleLedger.
  RecordLedger(std::uint64_t num_pages, std::uint64_t largest_pages, std::uint64_t max_keys, std::uint64_t seed,
               nb::tuple answers, nb::tuple refusals, nb::tuple states, nb::object make_slot, nb::object misuse)
      : LedgerBase(checked(num_pages, largest_pages, max_keys, seed), std::move(answers), std::move(refusals),
                   std::move(make_slot), std::move(misuse)),
        states_(std::move(states)) {
    require(states_.size() == 4, "states: expected four");
  }

  std::uint64_t used_bytes() const { return ledger_.used_units() * ledger::kPageBytes; }
  std::uint64_t max_keys() const { return ledger_.max_keys(); }
  bool has_evictable() const { return ledger_.has_evictable(); }

  nb::object find(nb::handle key) const {
    const std::optional<Record> found = ledger_.find(key_of(key.ptr()));
    return found ? row_of(*found) : nb::none();
  }
  nb::list reserved() const { return rows_of(ledger_.reserved()); }
  nb::list in_use() const { return rows_of(ledger_.in_use()); }
  nb::list movable_in(std::uint32_t number) const { return rows_of(ledger_.movable_in(number)); }
  nb::list held_in(std::uint32_t number) const { return rows_of(ledger_.held_in(number)); }

  nb::object why_not(nb::handle key, std::uint64_t num_pages, nb::handle extends) const {
    const Refusal refusal = ledger_.why_not(key_of(key.ptr()), num_pages, extended_of(extends.ptr()));
    return refusal == Refusal::kNone ? nb::none() : refused(refusal);
  }
  nb::list make_room(std::uint64_t num_pages, std::uint32_t num_keys, nb::handle extends) {
    require(num_pages <= kMostPages, "num_pages: expected at most 2^51");
    return rows_of(ledger_.make_room(num_pages, num_keys, extended_of(extends.ptr())));
  }
  nb::object take(nb::handle key, std::uint32_t payload_bytes, std::uint64_t address, nb::handle extends) {
    const Key view = key_of(key.ptr());
    const Refusal refusal = ledger_.take(view, {address, payload_bytes}, extended_of(extends.ptr()));
    if (refusal != Refusal::kNone) {
      raise(std::string("take: expected a key that is not refused, got ") + hex(view) + " (" +
            words_of(refusal) + ")");
    }
    return slot({address, payload_bytes});
  }
  nb::object evict_next() {
    const std::optional<Record> evicted = ledger_.evict_next();
    return evicted ? row_of(*evicted) : nb::none();
  }
  bool evict(nb::handle key) { return ledger_.evict(key_of(key.ptr())); }

  // (address, payload_bytes, is_offered) of each key before the first that is not reserved; true if there is none.
  nb::tuple commit_all(nb::handle keys) {
    ledger_.begin_call();
    KeyBatches batches(keys);
    std::vector<RecordPlace> places(batches.size());
    const auto are_offered = std::make_unique<bool[]>(batches.size() + 1);
    std::size_t num_done = 0;
    batches.each([&](std::size_t first, std::span<const Key> batch) {
      const std::size_t done = ledger_.commit_all(batch, places.data() + first, are_offered.get() + first);
      num_done = first + done;
      return done == batch.size();
    });
    nb::list ended;
    for (std::size_t key = 0; key < num_done; ++key) {
      ended.append(nb::make_tuple(places[key].address, places[key].payload_bytes, nb::bool_(are_offered[key])));
    }
    return nb::make_tuple(ended, num_done == batches.size());
  }
  void raise_not_reserved(nb::handle key) const { raise_misfit("commit", key_of(key.ptr())); }
  void abort(nb::handle key) {
    const Key view = key_of(key.ptr());
    if (ledger_.abort_all({&view, 1}) == 0) raise_misfit("abort", view);
  }
  bool invalidate(nb::handle key) {
    const Key view = key_of(key.ptr());
    return ledger_.invalidate_all({&view, 1}) == 1;
  }
  // Addresses of the committed and unpinned ones, in order.
  nb::bytes touch(nb::handle keys, nb::handle extends) {
    KeyBatches batches(keys);
    ledger_.begin_call();
    extend(batches, extends);
    std::vector<std::uint64_t> addresses;
    batches.each([&](std::size_t, std::span<const Key> batch) {
      ledger_.touch(batch, addresses);
      return true;
    });
    return packed(addresses);
  }
  // Slots, and the addresses of records that had no pin before. None if a key cannot be pinned.
  nb::object pin_all(nb::handle keys) {
    std::vector<std::uint32_t> found;
    if (!find_committed(keys, found)) return nb::none();
    std::vector<RecordPlace> places;
    std::vector<std::uint64_t> held;
    places.reserve(found.size());
    ledger_.pin_found(found, places, held);
    nb::list slots;
    for (const RecordPlace& place : places) slots.append(slot(place));
    return nb::make_tuple(slots, packed(held));
  }
  // Addresses of records that lost their last pin and stay, (address, payload_bytes) of freed records, and the number
  // of keys before the first that is not pinned.
  nb::tuple unpin_all(nb::handle keys) {
    ledger_.begin_call();
    std::vector<RecordPlace> used;
    std::vector<RecordPlace> freed;
    std::size_t num_done = 0;
    KeyBatches(keys).each([&](std::size_t first, std::span<const Key> batch) {
      const std::size_t done = ledger_.unpin_all(batch, used, freed);
      num_done = first + done;
      return done == batch.size();
    });
    std::vector<std::uint64_t> addresses;
    addresses.reserve(used.size());
    for (const RecordPlace& place : used) addresses.push_back(place.address);
    nb::list gone;
    for (const RecordPlace& place : freed) gone.append(nb::make_tuple(place.address, place.payload_bytes));
    return nb::make_tuple(packed(addresses), gone, num_done);
  }
  void raise_not_pinned(nb::handle key) const { LedgerBase::raise_not_pinned(key_of(key.ptr())); }
  bool relocate(nb::handle key, std::uint64_t address) { return ledger_.relocate(key_of(key.ptr()), address); }
  void drop_segment(std::uint32_t number) { ledger_.drop_segment(number); }

  // Columns of 64-bit numbers, with the length of `keys`. Returns the number of records added, from the first on.
  std::size_t restore(nb::handle keys, const nb::bytes& addresses, const nb::bytes& payload_bytes) {
    KeyBatches batches(keys);
    const auto at = unpacked<std::uint64_t>(addresses, batches.size());
    const auto sizes = unpacked<std::uint64_t>(payload_bytes, batches.size());
    for (const std::uint64_t size : sizes) {
      require(size <= std::numeric_limits<std::uint32_t>::max(), "payload_bytes: expected at most 2^32 - 1");
    }
    std::size_t num_restored = 0;
    batches.each([&](std::size_t first, std::span<const Key> batch) {
      const std::size_t count = ledger_.restore_all(batch, at.data() + first, sizes.data() + first);
      num_restored += count;
      return count == batch.size();
    });
    return num_restored;
  }

  void count_refusal(nb::handle refusal) {
    for (std::size_t place = 0; place < refusals_.size(); ++place) {
      if (refusals_[place].is(refusal)) ledger_.count_refusal(static_cast<Refusal>(place + 1));
    }
  }
  void count_evicted(std::uint64_t num_pages) { ledger_.count_evicted(num_pages); }
  std::uint64_t forget_all() { return ledger_.forget_all(); }
  void refuse_all() { ledger_.refuse_all(); }

  std::uint64_t begin_walk() { return ledger_.begin_walk(); }
  // True if the walk continues, and columns: joined keys, their lengths (16 bits), addresses, payload bytes (64 bits)
  // and turns (32 bits). None if another walk has begun.
  nb::object walk(std::uint64_t number, std::size_t num_entries) {
    require(num_entries >= 1, "num_entries: expected at least 1");
    ledger::Columns columns;
    const std::optional<bool> goes_on = ledger_.walk(number, num_entries, columns);
    if (!goes_on) return nb::none();
    return nb::make_tuple(*goes_on, bytes_of(columns.keys), packed(columns.key_bytes), packed(columns.addresses),
                          packed(columns.payload_bytes), packed(columns.turns));
  }

 private:
  static ledger::Bounds checked(std::uint64_t num_pages, std::uint64_t largest_pages, std::uint64_t max_keys,
                                std::uint64_t seed) {
    require(num_pages <= kMostPages && largest_pages <= kMostPages, "num_pages, largest_pages: expected at most 2^51");
    require(max_keys >= 1 && max_keys < ledger::kNone, "max_keys: expected 1 to 2^32 - 2");
    return {num_pages, largest_pages, static_cast<std::uint32_t>(max_keys), seed};
  }

  nb::object slot(const RecordPlace& place) const {
    const Extent extent{place.address, place.payload_bytes};
    return slot_of(extents_of(std::span<const Extent>(&extent, 1)));
  }
  // (key, address, payload_bytes, state, num_pins)
  nb::object row_of(const Record& record) const {
    const nb::object state = states_[static_cast<std::size_t>(record.state) - 1];
    return nb::make_tuple(bytes_of(record.key), record.place.address, record.place.payload_bytes, state,
                          record.num_pins);
  }
  nb::list rows_of(const std::vector<Record>& records) const {
    nb::list rows;
    for (const Record& record : records) rows.append(row_of(record));
    return rows;
  }

  nb::tuple states_;
};

}  // namespace

void bind_record_ledger(nb::module_& module) {
  using Self = RecordLedger;
  nb::class_<Self> ledger(module, "RecordLedger");
  bind_base(ledger);
  ledger
      .def(nb::init<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, nb::tuple, nb::tuple, nb::tuple,
                    nb::object, nb::object>(),
           "num_pages"_a, "largest_pages"_a, "max_keys"_a, "seed"_a, "answers"_a, "refusals"_a, "states"_a,
           "make_slot"_a, "misuse"_a)
      .def_prop_ro("used_bytes", &Self::used_bytes)
      .def_prop_ro("max_keys", &Self::max_keys)
      .def_prop_ro("has_evictable", &Self::has_evictable)
      .def("find", &Self::find, "key"_a)
      .def("reserved", &Self::reserved)
      .def("in_use", &Self::in_use)
      .def("raise_not_reserved", &Self::raise_not_reserved, "key"_a)
      .def("raise_not_pinned", &Self::raise_not_pinned, "key"_a)
      .def("movable_in", &Self::movable_in, "number"_a)
      .def("held_in", &Self::held_in, "number"_a)
      .def("why_not", &Self::why_not, "key"_a, "num_pages"_a, "extends"_a = nb::make_tuple())
      .def("make_room", &Self::make_room, "num_pages"_a, "num_keys"_a, "extends"_a = nb::make_tuple())
      .def("take", &Self::take, "key"_a, "payload_bytes"_a, "address"_a, "extends"_a = nb::make_tuple())
      .def("evict_next", &Self::evict_next)
      .def("evict", &Self::evict, "key"_a)
      .def("commit_all", &Self::commit_all, "keys"_a)
      .def("abort", &Self::abort, "key"_a)
      .def("invalidate", &Self::invalidate, "key"_a)
      .def("touch", &Self::touch, "keys"_a, "extends"_a = nb::make_tuple())
      .def("pin_all", &Self::pin_all, "keys"_a)
      .def("unpin_all", &Self::unpin_all, "keys"_a)
      .def("relocate", &Self::relocate, "key"_a, "address"_a)
      .def("drop_segment", &Self::drop_segment, "number"_a)
      .def("restore", &Self::restore, "keys"_a, "addresses"_a, "payload_bytes"_a)
      .def("count_refusal", &Self::count_refusal, "refusal"_a)
      .def("count_evicted", &Self::count_evicted, "num_pages"_a)
      .def("forget_all", &Self::forget_all)
      .def("refuse_all", &Self::refuse_all)
      .def("begin_walk", &Self::begin_walk)
      .def("walk", &Self::walk, "number"_a, "num_entries"_a);
}

}  // namespace hybridkv::bindings
