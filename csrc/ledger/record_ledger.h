// Which records a store holds, and where: a `BasicLedger` over segments, whose files and free space are others' matter.
//
// tests/kits has the same in Python, and a test compares both, call by call.
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

// Of committed records, as columns: keys one behind the other, and for each its length, place and turn. What has the
// lowest turn was used longest ago.
struct Columns {
  std::string keys;
  std::vector<std::uint16_t> key_bytes;
  std::vector<std::uint64_t> addresses;
  std::vector<std::uint64_t> payload_bytes;
  std::vector<std::uint32_t> turns;
};

class RecordLedger : public BasicLedger<SegmentSpace> {
 public:
  // `num_units` and `largest_units` of the bounds are pages. std::bad_alloc as Ledger.
  explicit RecordLedger(const Bounds& bounds) : BasicLedger(bounds, SegmentSpace()) {}

  // As Ledger.
  std::uint64_t most_bytes() const;
  std::uint64_t unit_bytes() const { return kPageBytes; }
  bool has_evictable() const { return evictable_units_ > 0; }

  std::optional<Record> find(Key key) const;
  // What is reserved, doomed or not; and with what is pinned.
  std::vector<Record> reserved() const { return in(Chain::kReserved); }
  std::vector<Record> in_use() const;
  // What is committed or reserved, in the order in which it lies in a segment.
  std::vector<Record> held_in(std::uint32_t number) const;
  // Of that, what is committed and not pinned.
  std::vector<Record> movable_in(std::uint32_t number) const;

  // kTooLarge also of a key that has no length in `Columns`.
  Refusal why_not(Key key, std::uint64_t num_pages) const;
  void count_refusal(Refusal refusal) { ++tally_.refusals[static_cast<std::size_t>(refusal)]; }
  // What was evicted for so much more.
  std::vector<Record> make_room(std::uint64_t num_pages, std::uint32_t num_keys);
  // Why not: also kNoRoom where `make_room` has not seen to it. Then nothing has changed.
  Refusal take(Key key, RecordPlace place);
  // Of what may be evicted. None, or false, where that is nothing.
  std::optional<Record> evict_next();
  bool evict(Key key);

  std::size_t commit_all(std::span<const Key> keys, RecordPlace* places, bool* are_offered);
  // Adds addresses of what may be evicted.
  void touch(std::span<const Key> keys, std::vector<std::uint64_t>& addresses);
  // Adds places of all, and addresses of those that had no pin.
  void pin_found(std::span<const std::uint32_t> entries, std::vector<RecordPlace>& places,
                 std::vector<std::uint64_t>& held);
  // Adds places of those that have no pin any more: they are used, or freed.
  std::size_t unpin_all(std::span<const Key> keys, std::vector<RecordPlace>& used, std::vector<RecordPlace>& freed);
  // A record that is there lies elsewhere now. Whether it is there.
  bool relocate(Key key, std::uint64_t address);
  // Its files are gone, and nothing in it lives.
  void drop_segment(std::uint32_t number) { space_.drop(number); }
  // A committed record that an opening found, used last of all until now. False where its key is known or too long,
  // there is no room for a key more, or nothing more is reserved.
  bool restore(Key key, RecordPlace place) { return restore(key, table_.tag_of(key), place); }
  // How many of them, up to the first that is not. Payloads are of 32 bits.
  std::size_t restore_all(std::span<const Key> keys, const std::uint64_t* addresses,
                          const std::uint64_t* payload_bytes);

  // As BasicLedger's.
  std::uint64_t forget_all();
  // Nothing more is reserved.
  void refuse_all() { is_closed_ = true; }
  // Of what was found, and was too much to be restored.
  void count_evicted(std::uint64_t num_pages) {
    ++tally_.evictions;
    tally_.evicted_units += num_pages;
  }

  // A walk over what is committed, in steps, between which anything may happen: every record is met that is there all
  // the time, once. `forget_all` leaves it what was there. A new walk ends the one before.
  std::uint64_t begin_walk();
  // Looks at so many entries; first for their order, then for what they are. Whether it goes on; none where the walk is
  // over before its end.
  std::optional<bool> walk(std::uint64_t number, std::size_t num_entries, Columns& columns);
  void end_walk();

 private:
  static constexpr std::size_t kMostKeyBytes = 0xFFFF;

  struct Walk {
    std::uint64_t number = 0;
    bool is_on = false;
    // What was forgotten meanwhile, as it was.
    std::optional<KeyTable> retired;
    Chains retired_chains;
    std::size_t chain = 0;  // of those whose order is looked at
    bool is_begun = false;  // of that chain
    std::uint64_t steps_left = 0;
    std::uint32_t turn = 0;
    std::vector<std::uint32_t> turns;  // of each entry, and one; 0: used since, so it comes last
    std::uint32_t next = 0;            // entry to be looked at
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
