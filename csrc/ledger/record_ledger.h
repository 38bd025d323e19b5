// Ledger of the records of a store: a `BasicLedger` over segments. It has neither their files nor their free space.
//
// tests/kits has a model in Python; a test compares both, call by call.
#ifndef HYBRIDKV_LEDGER_RECORD_LEDGER_H_
#define HYBRIDKV_LEDGER_RECORD_LEDGER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "csrc/ledger/basic_ledger.h"
#include "csrc/ledger/segment_space.h"

namespace hybridkv::ledger {

extern template class BasicLedger<SegmentSpace>;

struct RecordPlace {
  std::uint64_t address;
  std::uint32_t payload_bytes;
};

struct Record {
  std::string key;
  RecordPlace place;
  KeyState state;
  std::uint32_t num_pins;
};

// Committed records as columns: the joined keys, and the length, place and turn of each. The record with the lowest
// turn is the least recently used.
struct Columns {
  std::string keys;
  std::vector<std::uint16_t> key_bytes;
  std::vector<std::uint64_t> addresses;
  std::vector<std::uint64_t> payload_bytes;
  std::vector<std::uint32_t> turns;
};

class RecordLedger : public BasicLedger<SegmentSpace> {
 public:
  // Units of `bounds` are pages. Throws std::bad_alloc as Ledger does.
  explicit RecordLedger(const Bounds& bounds) : BasicLedger(bounds, SegmentSpace()) {}

  // As Ledger.
  std::uint64_t most_bytes() const;
  std::uint64_t unit_bytes() const { return kPageBytes; }
  bool has_evictable() const { return chains_.size(Chain::kLeaves) > 0; }

  std::optional<Record> find(Key key) const;
  // Records being written, deleted ones too. `in_use` adds the pinned ones.
  std::vector<Record> reserved() const { return in(Chain::kReserved); }
  std::vector<Record> in_use() const;
  // Committed and reserved records of a segment, by offset.
  std::vector<Record> held_in(std::uint32_t number) const;
  // Those of them that are committed and not pinned.
  std::vector<Record> movable_in(std::uint32_t number) const;

  // Also kTooLarge for a key that is too long for `Columns`. `extends`, here and below: as in Ledger::reserve.
  Refusal why_not(Key key, std::uint64_t num_pages, const Extends& extends) const;
  void count_refusal(Refusal refusal) { ++tally_.refusals[static_cast<std::size_t>(refusal)]; }
  // Evicts until `num_pages` and `num_keys` more fit. Returns the evicted records.
  std::vector<Record> make_room(std::uint64_t num_pages, std::uint32_t num_keys, const Extends& extends);
  // Reserves a record, after `make_room`. A refusal (also kNoRoom without `make_room`) changes nothing.
  Refusal take(Key key, RecordPlace place, const Extends& extends);
  // Evict the next record, or this one, also if others extend it. Return nothing, or false, if it is not evictable.
  std::optional<Record> evict_next();
  bool evict(Key key);

  std::size_t commit_all(std::span<const Key> keys, RecordPlace* places, bool* are_offered);
  // Adds the addresses of the committed and unpinned ones.
  void touch(std::span<const Key> keys, std::vector<std::uint64_t>& addresses);
  // Adds the places of all, and the addresses of those without a pin so far.
  void pin_found(std::span<const std::uint32_t> entries, std::vector<RecordPlace>& places,
                 std::vector<std::uint64_t>& held);
  // Adds the places of records that lost their last pin: to `used` if they stay, to `freed` if they were deleted.
  std::size_t unpin_all(std::span<const Key> keys, std::vector<RecordPlace>& used, std::vector<RecordPlace>& freed);
  // Sets the new address of a present record. False if it is absent.
  bool relocate(Key key, std::uint64_t address);
  // Drops a segment without live records. Its file is deleted.
  void drop_segment(std::uint32_t number) { space_.drop(number); }
  // Adds a committed record found at start, as the most recent one. False if its key is present or too long, there is
  // no room for a key more, or the ledger refuses new keys.
  bool restore(Key key, RecordPlace place) { return restore(key, table_.tag_of(key), place); }
  // Restores records up to the first failure, and returns their number. Payload sizes must fit 32 bits.
  std::size_t restore_all(std::span<const Key> keys, const std::uint64_t* addresses,
                          const std::uint64_t* payload_bytes);

  // As in BasicLedger; also empties the old tables of a walk.
  std::uint64_t forget_all();
  // Refuses new keys from now on.
  void refuse_all() { is_closed_ = true; }
  // Counts a record found at start that did not fit.
  void count_evicted(std::uint64_t num_pages) {
    ++tally_.evictions;
    tally_.evicted_units += num_pages;
  }

  // A walk over committed records, in steps. The ledger may change between steps: a record that stays during the whole
  // walk is returned exactly once. A walk continues over the old records after `forget_all`. A new walk ends the last
  // one.
  std::uint64_t begin_walk();
  // Reads `num_entries` entries: first their order, then the records. Returns true if the walk continues, false at its
  // end, and nothing if another walk replaced it.
  std::optional<bool> walk(std::uint64_t number, std::size_t num_entries, Columns& columns);
  void end_walk();

 private:
  static constexpr std::size_t kMostKeyBytes = 0xFFFF;

  struct Walk {
    std::uint64_t number = 0;
    bool is_on = false;
    // The tables before `forget_all`, if it was called during the walk.
    std::optional<KeyTable> retired;
    Chains retired_chains;
    std::size_t chain = 0;  // index of the chain that is read
    bool is_begun = false;  // that chain was begun
    std::uint32_t turn = kNone;        // lowest turn so far
    std::vector<std::uint32_t> turns;  // turn of each entry; 0: used during the walk, so the most recent
    std::uint32_t next = 0;            // next entry to be read
  };

  bool restore(Key key, std::uint32_t tag, RecordPlace place);
  void retire(KeyTable&& table, const Chains& chains, SegmentSpace&& space) override;
  Record record_of(std::uint32_t index) const;
  std::vector<Record> in(Chain chain) const;
  void look_at_order(std::size_t num_entries);

  Walk walk_;
  std::uint64_t num_walks_ = 0;
};

}  // namespace hybridkv::ledger

#endif  // HYBRIDKV_LEDGER_RECORD_LEDGER_H_
