// Which keys a tier in memory holds, where, and what may be done to them now: the rules of hybridkv.tiers.ledger over
// granules, least recently used goes first, for many keys in one call.
//
// hybridkv.tiers.ram has the same in Python, and a test that compares both, call by call. What a call costs does not
// depend on the number of keys that are held; `forget_all`: on how many are reserved or pinned. For one thread.
#ifndef HYBRIDKV_LEDGER_LEDGER_H_
#define HYBRIDKV_LEDGER_LEDGER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "csrc/ledger/chains.h"
#include "csrc/ledger/change_feed.h"
#include "csrc/ledger/entry.h"
#include "csrc/ledger/granule_space.h"
#include "csrc/ledger/key_table.h"

namespace hybridkv::ledger {

enum class Answer : std::uint8_t { kMiss, kPending, kHit };

enum class Refusal : std::uint8_t { kNone, kNoRoom, kTooLarge, kPresent, kClosed };
inline constexpr std::size_t kNumRefusals = 5;

struct Tally {
  std::uint64_t reservations = 0;
  std::uint64_t commits = 0;
  std::uint64_t aborts = 0;
  std::uint64_t invalidations = 0;
  std::uint64_t evictions = 0;
  std::uint64_t evicted_bytes = 0;
  std::uint64_t refusals[kNumRefusals] = {};
};

struct LedgerOptions {
  std::uint32_t num_granules;   // at least 1, below kNone
  std::uint64_t granule_bytes;  // 1 to 2^32
  std::uint32_t max_keys;       // at least 1, below kNone; doomed ones count
  std::uint64_t seed;           // of chance
  // Tables that had so many at most are given back at once: little of them was ever used. So there are as many
  // reservations at least between two that wait for them.
  std::uint32_t few_keys = 256;
};

class Ledger {
 public:
  // std::bad_alloc where the system has no room for the tables' addresses.
  explicit Ledger(const LedgerOptions& options);

  const LedgerOptions& options() const { return options_; }
  // Of all tables, when they are full of keys of at most 48 bytes whose chunks lie in one run each.
  std::uint64_t most_bytes() const;
  std::uint64_t capacity_bytes() const { return options_.num_granules * options_.granule_bytes; }
  std::uint64_t used_bytes() const { return used_granules_ * options_.granule_bytes; }
  std::uint32_t num_keys() const { return num_held_; }
  std::uint32_t num_reserved() const { return chains_.size(Chain::kReserved); }
  std::uint32_t num_pinned() const { return chains_.size(Chain::kPinned); }
  std::uint64_t generation() const { return generation_; }
  bool is_closed() const { return is_closed_; }

  // What is asked.
  KeyState state(Key key) const;
  Answer answer(Key key) const;
  // Of a key that is committed. Whether it is.
  bool find(Key key, Places& places) const;
  std::size_t leading(std::span<const Key> keys) const;
  std::optional<std::size_t> last_held(std::span<const Key> keys) const;
  bool any_pending(std::span<const Key> keys) const;
  // What may be evicted, what goes first first.
  std::vector<std::string> eviction_order() const;

  // What is done to many. Those that return a position stop there, before a key that does not fit, and those before it
  // are done; else it is the number of keys.
  Refusal reserve(Key key, std::uint64_t num_bytes, Places& places) {
    return reserve(key, table_.tag_of(key), num_bytes, places);
  }
  // `num_bytes` and `refusals` are as long as `keys`.
  void reserve_all(std::span<const Key> keys, const std::uint64_t* num_bytes, Refusal* refusals, Places& places);
  std::size_t commit_all(std::span<const Key> keys, bool* are_offered);
  std::size_t abort_all(std::span<const Key> keys);
  // How many there were to withdraw.
  std::size_t invalidate_all(std::span<const Key> keys);
  void touch(std::span<const Key> keys);
  void demote(std::span<const Key> keys);
  // The entries of keys that are committed, all of them or false.
  bool find_committed(std::span<const Key> keys, std::uint32_t* entries) const;
  void pin_found(std::span<const std::uint32_t> entries, Places& places);
  std::size_t unpin_all(std::span<const Key> keys);

  // `invalidate_all` of everything. How many were withdrawn. What that leaves is given back by later reservations.
  // Where the system has no room for new tables it takes a step for each key.
  std::uint64_t forget_all();
  void close();

  Tally take_tally();
  void watch(std::size_t max_keys) { feed_.watch(max_keys); }
  Changes take_changes() { return feed_.take(); }
  // Of what was forgotten and is not given back yet, addresses that were never used among them.
  std::uint64_t leftover_bytes() const;

 private:
  Refusal reserve(Key key, std::uint32_t tag, std::uint64_t num_bytes, Places& places);
  Refusal why_not(Key key, std::uint32_t tag, std::uint64_t num_granules) const;
  void make_room(std::uint64_t num_granules);
  void track(std::uint32_t index);
  void withdraw(std::uint32_t index);
  void forget(std::uint32_t index);
  void answers_anew(std::uint32_t index);
  void begin_anew();
  void forget_each();
  void give_back_some();

  LedgerOptions options_;
  KeyTable table_;
  GranuleSpace space_;
  Chains chains_;
  ChangeFeed feed_;
  Tally tally_;
  std::uint64_t used_granules_ = 0;
  std::uint64_t evictable_granules_ = 0;
  std::uint32_t num_held_ = 0;
  std::uint32_t num_pending_ = 0;
  std::uint64_t generation_ = 0;
  bool is_closed_ = false;
  std::vector<LazyMemory> leftovers_;
};

}  // namespace hybridkv::ledger

#endif  // HYBRIDKV_LEDGER_LEDGER_H_
