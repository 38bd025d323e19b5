// Keys of a tier and their states, by the rules of tests/kits/plain_ledger.py. It evicts only leaves, keys that no
// present key extends, the least recently used first. The entry that an evicted one extended is evicted next, or
// becomes the most recent one if it was used in a later call. If a key with extensions is removed, these extend its
// parent: the key that it extended.
// It takes many keys in one call. A `Space` places the bytes and counts their size, in units.
//
// The cost of a call does not depend on the number of keys in the ledger; that of `forget_all` depends on the number of
// reserved and pinned keys. For one thread.
#ifndef HYBRIDKV_LEDGER_BASIC_LEDGER_H_
#define HYBRIDKV_LEDGER_BASIC_LEDGER_H_

#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "csrc/ledger/chains.h"
#include "csrc/ledger/change_feed.h"
#include "csrc/ledger/entry.h"
#include "csrc/ledger/key_table.h"
#include "csrc/ledger/lazy_memory.h"

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
  std::uint64_t evicted_units = 0;
  std::uint64_t refusals[kNumRefusals] = {};
};

struct Bounds {
  std::uint64_t num_units;      // capacity for all keys together
  std::uint64_t largest_units;  // limit for one key
  std::uint32_t max_keys;       // at least 1, below kNone; deleted keys in use count
  std::uint64_t seed;           // random
  // `forget_all` frees tables with at most this many entries at once, larger ones during later reservations. So two
  // large tables are always at least this many reservations apart.
  std::uint32_t few_keys = 256;
};

// Two candidates. A key extends the first candidate that is present. An empty key is no candidate.
struct Extends {
  Key first;
  Key second;
};

inline bool is_held(KeyState state) { return state == KeyState::kReserved || state == KeyState::kCommitted; }

// `Space` has `units_of(entry)`; `free(entry)`; `begun_anew()`, an empty space of the same size; `copy(other, index,
// from, to)`, which takes the place of an entry of another space; and `take_memory(memories)`, as KeyTable.
template <class Space>
class BasicLedger {
 public:
  std::uint64_t used_units() const { return used_units_; }
  std::uint32_t max_keys() const { return bounds_.max_keys; }
  std::uint32_t num_keys() const { return num_held_; }
  std::uint32_t num_reserved() const { return chains_.size(Chain::kReserved); }
  std::uint32_t num_pinned() const { return chains_.size(Chain::kPinned); }
  std::uint64_t generation() const { return generation_; }
  bool is_closed() const { return is_closed_; }

  // Queries.
  KeyState state(Key key) const;
  Answer answer(Key key) const;
  std::size_t leading(std::span<const Key> keys) const;
  std::optional<std::size_t> last_held(std::span<const Key> keys) const;
  bool any_pending(std::span<const Key> keys) const;
  // Evictable keys, the next to be evicted first: not those that a reserved or pinned key extends.
  std::vector<std::string> eviction_order() const;

  // Changes of many keys. A function that returns a position stops before the first key in a wrong state; the keys
  // before it are changed. It returns the number of keys if all are changed. `act` is called for each changed entry.
  // Begins a call: all that is used until the next one is used at the same time.
  void begin_call() { ++num_calls_; }
  template <class Act>
  std::size_t commit_all(std::span<const Key> keys, Act&& act);  // act(position, entry, is_offered), before it is freed
  std::size_t abort_all(std::span<const Key> keys);
  // Returns the number of invalidated keys.
  std::size_t invalidate_all(std::span<const Key> keys);
  template <class Act>
  void touch(std::span<const Key> keys, Act&& act);  // act(entry), for committed and unpinned entries only
  // Sets the keys that present keys extend, if they extend none yet. The walk that excludes cycles is short if each key
  // precedes the one that it extends.
  void extend(std::span<const Key> keys, std::span<const Extends> extends);
  // The entries of the keys. False if a key is not committed, or has so many pins that one more could overflow.
  bool find_committed(std::span<const Key> keys, std::uint32_t* entries) const;
  template <class Act>
  void pin_found(std::span<const std::uint32_t> entries, Act&& act);  // act(entry, is_first)
  template <class Act>
  std::size_t unpin_all(std::span<const Key> keys, Act&& act);  // act(entry) for a last pin, before it is freed

  // Invalidates all keys, and returns their number. Later reservations free the old tables. If the system has no memory
  // for new tables, it invalidates key by key.
  std::uint64_t forget_all();
  void close();

  Tally take_tally() { return std::exchange(tally_, {}); }
  void watch(std::size_t max_keys) { feed_.watch(max_keys); }
  Changes take_changes() { return feed_.take(); }
  // Old tables that are not freed yet, in bytes of address space.
  std::uint64_t leftover_bytes() const;

 protected:
  BasicLedger(const Bounds& bounds, Space space)
      : bounds_(bounds), table_(bounds.max_keys, bounds.seed), space_(std::move(space)) {}

  // The reason to refuse a reservation of a key that extends the entry `kept`, or kNone. Changes nothing and counts
  // nothing.
  Refusal why_not(Key key, std::uint32_t tag, std::uint64_t num_units, std::uint32_t kept) const;
  // Evicts until `num_units` and `num_keys` more fit, or until there is nothing to evict. Keeps the entry `kept`. Calls
  // `act(index)` before each eviction.
  template <class Act>
  void make_room(std::uint64_t num_units, std::uint32_t num_keys, std::uint32_t kept, Act&& act);
  void evict(std::uint32_t index);
  // Adds a reserved entry that extends the entry `extends`, or kNone; there must be room. `place(entry)` sets its size
  // and place.
  template <class Place>
  std::uint32_t take(Key key, std::uint32_t tag, std::uint32_t extends, Place&& place);
  // The entry that a key extends, or kNone.
  std::uint32_t present(const Extends& extends) const;
  // Takes the old tables after `forget_all`, to free them later.
  virtual void retire(KeyTable&& table, const Chains& chains, Space&& space);
  virtual ~BasicLedger() = default;

  Bounds bounds_;
  KeyTable table_;
  Space space_;
  Chains chains_;
  ChangeFeed feed_;
  Tally tally_;
  std::uint64_t used_units_ = 0;
  std::uint32_t num_calls_ = 0;
  std::uint32_t num_held_ = 0;
  std::uint32_t num_pending_ = 0;
  std::uint64_t generation_ = 0;
  bool is_closed_ = false;
  std::vector<LazyMemory> leftovers_;

  bool lacks_room(std::uint64_t num_units, std::uint64_t num_keys) const {
    return used_units_ + num_units > bounds_.num_units || table_.size() + num_keys > bounds_.max_keys;
  }
  // Calls `visit(index)` for each entry in the order of eviction, until it returns false. Leaves out `kept` and the
  // entries that it extends.
  template <class Visit>
  void each_evictable(std::uint32_t kept, Visit&& visit) const;
  void link(std::uint32_t index, std::uint32_t extends);
  void unlink(std::uint32_t index);
  void track(std::uint32_t index);
  void withdraw(std::uint32_t index);
  void forget(std::uint32_t index);
  void answers_anew(std::uint32_t index);
  void begin_anew();
  void forget_each();
  void give_back_some();
  std::uint64_t units_of(std::uint32_t index) const { return space_.units_of(table_[index]); }

 private:
  // Old tables freed by one reservation. A reservation uses less of the new tables, so old tables do not pile up.
  static constexpr std::size_t kGivenBackBytes = 64 * 1024;
  // Limit for pieces of old tables. Beyond it the oldest pieces are freed at once; most of their memory is free
  // by then.
  static constexpr std::size_t kMostLeftovers = 256;
  // Half the range of 32 bits: one call can add as many again without an overflow.
  static constexpr std::uint32_t kMostPins = std::uint32_t{1} << 31;
  // Limit for the pieces of memory in the tables of one ledger.
  static constexpr std::size_t kMostPieces = 16;
};

// Queries.

template <class Space>
KeyState BasicLedger<Space>::state(Key key) const {
  const std::uint32_t index = table_.find(key);
  return index == kNone ? KeyState::kUnknown : table_[index].state;
}

template <class Space>
Answer BasicLedger<Space>::answer(Key key) const {
  switch (state(key)) {
    case KeyState::kReserved:
      return Answer::kPending;
    case KeyState::kCommitted:
      return Answer::kHit;
    default:
      return Answer::kMiss;
  }
}

template <class Space>
std::size_t BasicLedger<Space>::leading(std::span<const Key> keys) const {
  std::size_t num_leading = keys.size();
  table_.each(keys, [&](std::size_t position, std::uint32_t index) {
    if (index != kNone && is_held(table_[index].state)) return true;
    num_leading = position;
    return false;
  });
  return num_leading;
}

template <class Space>
std::optional<std::size_t> BasicLedger<Space>::last_held(std::span<const Key> keys) const {
  // From the end, in batches: the last present key is mostly near the end.
  constexpr std::size_t kAtATime = 32;
  for (std::size_t end = keys.size(); end > 0;) {
    const std::size_t first = end > kAtATime ? end - kAtATime : 0;
    std::optional<std::size_t> last;
    table_.each(keys.subspan(first, end - first), [&](std::size_t position, std::uint32_t index) {
      if (index != kNone && is_held(table_[index].state)) last = first + position;
      return true;
    });
    if (last) return last;
    end = first;
  }
  return std::nullopt;
}

template <class Space>
bool BasicLedger<Space>::any_pending(std::span<const Key> keys) const {
  bool is_any = false;
  if (num_pending_ == 0) return false;
  table_.each(keys, [&](std::size_t, std::uint32_t index) {
    is_any = index != kNone && table_[index].state == KeyState::kReserved;
    return !is_any;
  });
  return is_any;
}

template <class Space>
std::vector<std::string> BasicLedger<Space>::eviction_order() const {
  std::vector<std::string> keys;
  each_evictable(kNone, [&](std::uint32_t index) {
    keys.emplace_back(table_.key_of(index));
    return true;
  });
  return keys;
}

template <class Space>
template <class Visit>
void BasicLedger<Space>::each_evictable(std::uint32_t kept, Visit&& visit) const {
  std::unordered_map<std::uint32_t, std::uint32_t> num_left;  // extensions that are not visited, of visited branches
  std::vector<std::uint32_t> later;                           // entries that become the most recent ones
  std::size_t num_visited = 0;
  std::uint32_t leaf = chains_.first(Chain::kLeaves);
  while (leaf != kNone || num_visited < later.size()) {
    for (std::uint32_t index = leaf != kNone ? leaf : later[num_visited++]; index != kept;) {
      if (!visit(index)) return;
      const std::uint32_t extends = table_[index].extends;
      if (extends == kNone || table_[extends].chain != Chain::kInner) break;
      const std::uint32_t num_extensions = table_[extends].num_extensions;
      if (num_extensions > 1 && --num_left.try_emplace(extends, num_extensions).first->second > 0) break;
      if (table_[extends].last_use > table_[index].last_use) {
        later.push_back(extends);
        break;
      }
      index = extends;
    }
    if (leaf != kNone) leaf = table_[leaf].next;
  }
}

template <class Space>
std::uint32_t BasicLedger<Space>::present(const Extends& extends) const {
  for (const Key key : {extends.first, extends.second}) {
    if (key.empty()) continue;
    const std::uint32_t index = table_.find(key);
    if (index != kNone && is_held(table_[index].state)) return index;
  }
  return kNone;
}

// Reserving.

template <class Space>
Refusal BasicLedger<Space>::why_not(Key key, std::uint32_t tag, std::uint64_t num_units, std::uint32_t kept) const {
  if (is_closed_) return Refusal::kClosed;
  if (table_.find(key, tag) != kNone) return Refusal::kPresent;
  if (num_units > bounds_.largest_units) return Refusal::kTooLarge;
  if (!lacks_room(num_units, 1)) return Refusal::kNone;
  // Visits about as many entries as the reservation evicts. If it visits all of them, there is no room for the key.
  std::uint64_t num_freed = 0;
  std::uint32_t num_gone = 0;
  bool has_room = false;
  each_evictable(kept, [&](std::uint32_t index) {
    num_freed += units_of(index);
    ++num_gone;
    has_room = used_units_ + num_units - num_freed <= bounds_.num_units && table_.size() - num_gone < bounds_.max_keys;
    return !has_room;
  });
  return has_room ? Refusal::kNone : Refusal::kNoRoom;
}

template <class Space>
template <class Act>
void BasicLedger<Space>::make_room(std::uint64_t num_units, std::uint32_t num_keys, std::uint32_t kept, Act&& act) {
  while (lacks_room(num_units, num_keys)) {
    std::uint32_t index = chains_.first(Chain::kLeaves);
    if (index != kNone && index == kept) index = table_[index].next;
    if (index == kNone) return;
    if (table_[index].next != kNone) __builtin_prefetch(&table_[table_[index].next], 1);  // the next to be evicted
    act(index);
    evict(index);
  }
}

template <class Space>
void BasicLedger<Space>::evict(std::uint32_t index) {
  --num_held_;
  answers_anew(index);
  ++tally_.evictions;
  tally_.evicted_units += units_of(index);
  forget(index);
}

template <class Space>
template <class Place>
std::uint32_t BasicLedger<Space>::take(Key key, std::uint32_t tag, std::uint32_t extends, Place&& place) {
  give_back_some();
  const std::uint32_t index = table_.insert(key, tag);
  Entry& entry = table_[index];
  entry.state = KeyState::kReserved;
  entry.num_pins = 0;
  entry.last_use = num_calls_;
  place(entry);
  chains_.append(table_, index, Chain::kReserved);
  if (extends != kNone) link(index, extends);
  used_units_ += units_of(index);
  ++num_held_;
  ++num_pending_;
  answers_anew(index);
  ++tally_.reservations;
  return index;
}

// Changes of state.

template <class Space>
template <class Act>
std::size_t BasicLedger<Space>::commit_all(std::span<const Key> keys, Act&& act) {
  std::size_t num_done = keys.size();
  table_.each(keys, [&](std::size_t position, std::uint32_t index) {
    if (index == kNone || table_[index].chain != Chain::kReserved) {
      num_done = position;
      return false;
    }
    const bool is_offered = table_[index].state == KeyState::kReserved;
    act(position, std::as_const(table_[index]), is_offered);
    if (!is_offered) {
      forget(index);
      return true;
    }
    table_[index].state = KeyState::kCommitted;
    --num_pending_;
    track(index);
    answers_anew(index);
    ++tally_.commits;
    return true;
  });
  return num_done;
}

template <class Space>
std::size_t BasicLedger<Space>::abort_all(std::span<const Key> keys) {
  std::size_t num_done = keys.size();
  table_.each(keys, [&](std::size_t position, std::uint32_t index) {
    if (index == kNone || table_[index].chain != Chain::kReserved) {
      num_done = position;
      return false;
    }
    if (table_[index].state == KeyState::kReserved) {
      --num_held_;
      --num_pending_;
      answers_anew(index);
    }
    forget(index);
    ++tally_.aborts;
    return true;
  });
  return num_done;
}

template <class Space>
std::size_t BasicLedger<Space>::invalidate_all(std::span<const Key> keys) {
  std::size_t num_withdrawn = 0;
  table_.each(keys, [&](std::size_t, std::uint32_t index) {
    if (index == kNone || !is_held(table_[index].state)) return true;
    ++num_withdrawn;
    withdraw(index);
    return true;
  });
  return num_withdrawn;
}

template <class Space>
void BasicLedger<Space>::withdraw(std::uint32_t index) {
  Entry& entry = table_[index];
  --num_held_;
  answers_anew(index);
  ++tally_.invalidations;
  if (entry.state == KeyState::kReserved) {
    --num_pending_;
    entry.state = KeyState::kDoomedWrite;
  } else if (entry.num_pins > 0) {
    entry.state = KeyState::kDoomedRead;
  } else {
    forget(index);
  }
}

template <class Space>
template <class Act>
void BasicLedger<Space>::touch(std::span<const Key> keys, Act&& act) {
  table_.each(keys, [&](std::size_t, std::uint32_t index) {
    if (index == kNone) return true;
    const Entry& entry = table_[index];
    if (entry.chain != Chain::kLeaves && entry.chain != Chain::kInner) return true;
    if (entry.chain == Chain::kLeaves) chains_.move(table_, index, Chain::kLeaves);
    table_[index].last_use = num_calls_;
    act(entry);
    return true;
  });
}

template <class Space>
void BasicLedger<Space>::extend(std::span<const Key> keys, std::span<const Extends> extends) {
  table_.each(keys, [&](std::size_t position, std::uint32_t index) {
    if (index == kNone || !is_held(table_[index].state) || table_[index].extends != kNone) return true;
    const std::uint32_t found = present(extends[position]);
    if (found == kNone || found == index) return true;
    if (table_[index].num_extensions > 0) {
      for (std::uint32_t above = found; (above = table_[above].extends) != kNone;) {
        if (above == index) return true;
      }
    }
    link(index, found);
    return true;
  });
}

template <class Space>
bool BasicLedger<Space>::find_committed(std::span<const Key> keys, std::uint32_t* entries) const {
  bool are_all = true;
  table_.each(keys, [&](std::size_t position, std::uint32_t index) {
    are_all = index != kNone && table_[index].state == KeyState::kCommitted && table_[index].num_pins <= kMostPins;
    entries[position] = index;
    return are_all;
  });
  return are_all;
}

template <class Space>
template <class Act>
void BasicLedger<Space>::pin_found(std::span<const std::uint32_t> entries, Act&& act) {
  for (const std::uint32_t index : entries) {
    Entry& entry = table_[index];
    const bool is_first = entry.num_pins++ == 0;
    if (is_first) chains_.move(table_, index, Chain::kPinned);
    act(std::as_const(entry), is_first);
  }
}

template <class Space>
template <class Act>
std::size_t BasicLedger<Space>::unpin_all(std::span<const Key> keys, Act&& act) {
  std::size_t num_done = keys.size();
  table_.each(keys, [&](std::size_t position, std::uint32_t index) {
    if (index == kNone || table_[index].chain != Chain::kPinned) {
      num_done = position;
      return false;
    }
    if (--table_[index].num_pins > 0) return true;
    act(std::as_const(table_[index]));
    if (table_[index].state == KeyState::kCommitted) {
      track(index);
    } else {
      forget(index);
    }
    return true;
  });
  return num_done;
}

// Makes a committed entry evictable, as soon as no entry extends it.
template <class Space>
void BasicLedger<Space>::track(std::uint32_t index) {
  table_[index].last_use = num_calls_;
  chains_.move(table_, index, table_[index].num_extensions > 0 ? Chain::kInner : Chain::kLeaves);
}

template <class Space>
void BasicLedger<Space>::link(std::uint32_t index, std::uint32_t extends) {
  Entry& entry = table_[index];
  Entry& above = table_[extends];
  entry.extends = extends;
  entry.previous_sibling = kNone;
  entry.next_sibling = above.first_extension;
  if (above.first_extension != kNone) table_[above.first_extension].previous_sibling = index;
  above.first_extension = index;
  ++above.num_extensions;
  if (above.chain == Chain::kLeaves) chains_.move(table_, extends, Chain::kInner);
}

// Takes an entry out of the tree. If no other entry extends its parent, the parent is evicted next, or becomes the most
// recent one if it was used after this entry.
template <class Space>
void BasicLedger<Space>::unlink(std::uint32_t index) {
  Entry& entry = table_[index];
  const std::uint32_t extends = entry.extends;
  while (entry.first_extension != kNone) {
    const std::uint32_t extension = entry.first_extension;
    entry.first_extension = table_[extension].next_sibling;
    table_[extension].extends = kNone;
    if (extends != kNone) link(extension, extends);
  }
  entry.num_extensions = 0;
  if (extends == kNone) return;
  Entry& above = table_[extends];
  entry.extends = kNone;
  (entry.previous_sibling == kNone ? above.first_extension : table_[entry.previous_sibling].next_sibling) =
      entry.next_sibling;
  if (entry.next_sibling != kNone) table_[entry.next_sibling].previous_sibling = entry.previous_sibling;
  if (--above.num_extensions > 0 || above.chain != Chain::kInner) return;
  if (above.last_use > entry.last_use) return chains_.move(table_, extends, Chain::kLeaves);
  chains_.remove(table_, extends);
  chains_.prepend(table_, extends, Chain::kLeaves);
}

template <class Space>
void BasicLedger<Space>::answers_anew(std::uint32_t index) {
  ++generation_;
  feed_.add(table_.key_of(index));
}

template <class Space>
void BasicLedger<Space>::forget(std::uint32_t index) {
  unlink(index);
  chains_.remove(table_, index);
  used_units_ -= units_of(index);
  space_.free(table_[index]);
  table_.erase(index);
}

template <class Space>
std::uint64_t BasicLedger<Space>::forget_all() {
  const std::uint64_t num_withdrawn = num_held_;
  if (num_withdrawn > 0) {
    try {
      begin_anew();
    } catch (const std::bad_alloc&) {
      forget_each();
    }
  }
  num_held_ = num_pending_ = 0;
  generation_ += num_withdrawn;
  feed_.add_all();
  tally_.invalidations += num_withdrawn;
  return num_withdrawn;
}

// Replaces the tables by new ones that hold the entries in use. Changes nothing if the system has no memory for them.
template <class Space>
void BasicLedger<Space>::begin_anew() {
  leftovers_.reserve(leftovers_.size() + kMostPieces);
  KeyTable table(bounds_.max_keys, bounds_.seed);
  Space space = space_.begun_anew();
  Chains chains;
  std::uint64_t used_units = 0;
  for (const Chain chain : {Chain::kReserved, Chain::kPinned}) {
    for (std::uint32_t old = chains_.first(chain); old != kNone; old = table_[old].next) {
      const Key key = table_.key_of(old);
      const std::uint32_t index = table.insert(key, table.tag_of(key));
      Entry& entry = table[index];
      entry.state = chain == Chain::kReserved ? KeyState::kDoomedWrite : KeyState::kDoomedRead;
      entry.num_pins = table_[old].num_pins;
      space.copy(space_, index, table_[old], entry);
      chains.append(table, index, chain);
      used_units += space.units_of(entry);
    }
  }
  std::swap(table_, table);
  std::swap(space_, space);
  std::swap(chains_, chains);
  used_units_ = used_units;
  retire(std::move(table), chains, std::move(space));
}

template <class Space>
void BasicLedger<Space>::retire(KeyTable&& table, const Chains&, Space&& space) {
  if (table.num_used() <= bounds_.few_keys) return;
  table.take_memory(leftovers_);
  space.take_memory(leftovers_);
  std::erase_if(leftovers_, [](const LazyMemory& memory) { return memory.num_bytes() == 0; });
  if (leftovers_.size() > kMostLeftovers) leftovers_.erase(leftovers_.begin(), leftovers_.end() - kMostLeftovers);
}

// `forget_all` without new tables, in one step for each key.
template <class Space>
void BasicLedger<Space>::forget_each() {
  for (const Chain chain : {Chain::kLeaves, Chain::kInner}) {
    while (chains_.first(chain) != kNone) forget(chains_.first(chain));
  }
  for (const Chain chain : {Chain::kReserved, Chain::kPinned}) {
    for (std::uint32_t index = chains_.first(chain); index != kNone; index = table_[index].next) {
      table_[index].state = chain == Chain::kReserved ? KeyState::kDoomedWrite : KeyState::kDoomedRead;
    }
  }
}

// Oldest first: newer old tables are mostly less used.
template <class Space>
void BasicLedger<Space>::give_back_some() {
  if (leftovers_.empty()) return;
  leftovers_.front().give_back(kGivenBackBytes);
  if (leftovers_.front().num_bytes() == 0) leftovers_.erase(leftovers_.begin());
}

template <class Space>
std::uint64_t BasicLedger<Space>::leftover_bytes() const {
  std::uint64_t num_bytes = 0;
  for (const LazyMemory& memory : leftovers_) num_bytes += memory.num_bytes();
  return num_bytes;
}

template <class Space>
void BasicLedger<Space>::close() {
  is_closed_ = true;
  forget_all();
}

}  // namespace hybridkv::ledger

#endif  // HYBRIDKV_LEDGER_BASIC_LEDGER_H_
