#include "csrc/ledger/ledger.h"

#include <new>
#include <utility>

namespace hybridkv::ledger {
namespace {

// Of what was forgotten, by one reservation. One uses less of new tables than this, so leftovers never grow for long.
constexpr std::size_t kGivenBackBytes = 64 * 1024;
// Pieces of memory that wait. What is older is given back at once; by then nearly all of it was.
constexpr std::size_t kMostLeftovers = 256;
// Of the tables of one ledger, at most.
constexpr std::size_t kMostPieces = 16;

bool is_held(KeyState state) { return state == KeyState::kReserved || state == KeyState::kCommitted; }

}  // namespace

Ledger::Ledger(const LedgerOptions& options)
    : options_(options),
      table_(options.max_keys, options.seed),
      space_(options.num_granules, options.granule_bytes) {}

std::uint64_t Ledger::most_bytes() const {
  return KeyTable::most_bytes(options_.max_keys) + GranuleSpace::most_bytes(options_.num_granules);
}

// What is asked.

KeyState Ledger::state(Key key) const {
  const std::uint32_t index = table_.find(key);
  return index == kNone ? KeyState::kUnknown : table_[index].state;
}

Answer Ledger::answer(Key key) const {
  switch (state(key)) {
    case KeyState::kReserved:
      return Answer::kPending;
    case KeyState::kCommitted:
      return Answer::kHit;
    default:
      return Answer::kMiss;
  }
}

bool Ledger::find(Key key, Places& places) const {
  const std::uint32_t index = table_.find(key);
  if (index == kNone || table_[index].state != KeyState::kCommitted) return false;
  space_.append(table_[index], places);
  return true;
}

std::size_t Ledger::leading(std::span<const Key> keys) const {
  std::size_t num_leading = keys.size();
  table_.each(keys, [&](std::size_t position, std::uint32_t index) {
    if (index != kNone && is_held(table_[index].state)) return true;
    num_leading = position;
    return false;
  });
  return num_leading;
}

std::optional<std::size_t> Ledger::last_held(std::span<const Key> keys) const {
  // From the end, a few at a time: where much is held, the last one is mostly near.
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

bool Ledger::any_pending(std::span<const Key> keys) const {
  bool is_any = false;
  if (num_pending_ == 0) return false;
  table_.each(keys, [&](std::size_t, std::uint32_t index) {
    is_any = index != kNone && table_[index].state == KeyState::kReserved;
    return !is_any;
  });
  return is_any;
}

std::vector<std::string> Ledger::eviction_order() const {
  std::vector<std::string> keys;
  for (const Chain chain : {Chain::kDemoted, Chain::kRecent}) {
    for (std::uint32_t index = chains_.first(chain); index != kNone; index = table_[index].next) {
      keys.emplace_back(table_.key_of(index));
    }
  }
  return keys;
}

// Reserving.

void Ledger::reserve_all(std::span<const Key> keys, const std::uint64_t* num_bytes, Refusal* refusals,
                         Places& places) {
  table_.each_tag(keys, [&](std::size_t position, std::uint32_t tag) {
    refusals[position] = reserve(keys[position], tag, num_bytes[position], places);
    return true;
  });
}

Refusal Ledger::reserve(Key key, std::uint32_t tag, std::uint64_t num_bytes, Places& places) {
  const std::uint64_t granule_bytes = options_.granule_bytes;
  const std::uint64_t num_granules = num_bytes / granule_bytes + (num_bytes % granule_bytes != 0);
  const Refusal refusal = why_not(key, tag, num_granules);
  if (refusal != Refusal::kNone) {
    ++tally_.refusals[static_cast<std::size_t>(refusal)];
    return refusal;
  }
  make_room(num_granules);
  give_back_some();
  const std::uint32_t index = table_.insert(key, tag);
  Entry& entry = table_[index];
  entry.state = KeyState::kReserved;
  entry.goes_first = false;
  entry.num_pins = 0;
  entry.num_granules = static_cast<std::uint32_t>(num_granules);
  entry.spare_bytes = static_cast<std::uint32_t>(num_granules * granule_bytes - num_bytes);
  space_.take(entry);
  chains_.append(table_, index, Chain::kReserved);
  used_granules_ += num_granules;
  ++num_held_;
  ++num_pending_;
  answers_anew(index);
  ++tally_.reservations;
  space_.append(entry, places);
  return Refusal::kNone;
}

Refusal Ledger::why_not(Key key, std::uint32_t tag, std::uint64_t num_granules) const {
  if (is_closed_) return Refusal::kClosed;
  if (table_.find(key, tag) != kNone) return Refusal::kPresent;
  if (num_granules > options_.num_granules) return Refusal::kTooLarge;
  if (used_granules_ + num_granules - evictable_granules_ > options_.num_granules) return Refusal::kNoRoom;
  if (num_reserved() + num_pinned() >= options_.max_keys) return Refusal::kNoRoom;
  return Refusal::kNone;
}

void Ledger::make_room(std::uint64_t num_granules) {
  while (used_granules_ + num_granules > options_.num_granules || table_.size() >= options_.max_keys) {
    const std::uint32_t demoted = chains_.first(Chain::kDemoted);
    const std::uint32_t index = demoted != kNone ? demoted : chains_.first(Chain::kRecent);
    if (table_[index].next != kNone) __builtin_prefetch(&table_[table_[index].next], 1);  // goes after it, mostly soon
    evictable_granules_ -= table_[index].num_granules;
    --num_held_;
    answers_anew(index);
    ++tally_.evictions;
    tally_.evicted_bytes += table_[index].num_granules * options_.granule_bytes;
    forget(index);
  }
}

// The life of a key.

std::size_t Ledger::commit_all(std::span<const Key> keys, bool* are_offered) {
  std::size_t num_done = keys.size();
  table_.each(keys, [&](std::size_t position, std::uint32_t index) {
    if (index == kNone || table_[index].chain != Chain::kReserved) {
      num_done = position;
      return false;
    }
    are_offered[position] = table_[index].state == KeyState::kReserved;
    if (!are_offered[position]) {
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

std::size_t Ledger::abort_all(std::span<const Key> keys) {
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

std::size_t Ledger::invalidate_all(std::span<const Key> keys) {
  std::size_t num_withdrawn = 0;
  table_.each(keys, [&](std::size_t, std::uint32_t index) {
    if (index == kNone || !is_held(table_[index].state)) return true;
    ++num_withdrawn;
    withdraw(index);
    return true;
  });
  return num_withdrawn;
}

void Ledger::withdraw(std::uint32_t index) {
  Entry& entry = table_[index];
  --num_held_;
  entry.goes_first = false;
  answers_anew(index);
  ++tally_.invalidations;
  if (entry.state == KeyState::kReserved) {
    --num_pending_;
    entry.state = KeyState::kDoomedWrite;
  } else if (entry.num_pins > 0) {
    entry.state = KeyState::kDoomedRead;
  } else {
    evictable_granules_ -= entry.num_granules;
    forget(index);
  }
}

void Ledger::touch(std::span<const Key> keys) {
  table_.each(keys, [&](std::size_t, std::uint32_t index) {
    if (index == kNone) return true;
    Entry& entry = table_[index];
    entry.goes_first = false;
    if (entry.chain == Chain::kRecent || entry.chain == Chain::kDemoted) chains_.move(table_, index, Chain::kRecent);
    return true;
  });
}

void Ledger::demote(std::span<const Key> keys) {
  table_.each(keys, [&](std::size_t, std::uint32_t index) {
    if (index == kNone) return true;
    Entry& entry = table_[index];
    if (entry.chain == Chain::kRecent || entry.chain == Chain::kDemoted) {
      chains_.move(table_, index, Chain::kDemoted);
    } else {
      entry.goes_first = is_held(entry.state);
    }
    return true;
  });
}

bool Ledger::find_committed(std::span<const Key> keys, std::uint32_t* entries) const {
  bool are_all = true;
  table_.each(keys, [&](std::size_t position, std::uint32_t index) {
    are_all = index != kNone && table_[index].state == KeyState::kCommitted;
    entries[position] = index;
    return are_all;
  });
  return are_all;
}

void Ledger::pin_found(std::span<const std::uint32_t> entries, Places& places) {
  for (const std::uint32_t index : entries) {
    Entry& entry = table_[index];
    if (entry.num_pins++ == 0) {
      evictable_granules_ -= entry.num_granules;
      chains_.move(table_, index, Chain::kPinned);
    }
    space_.append(entry, places);
  }
}

std::size_t Ledger::unpin_all(std::span<const Key> keys) {
  std::size_t num_done = keys.size();
  table_.each(keys, [&](std::size_t position, std::uint32_t index) {
    if (index == kNone || table_[index].chain != Chain::kPinned) {
      num_done = position;
      return false;
    }
    if (--table_[index].num_pins > 0) return true;
    if (table_[index].state == KeyState::kCommitted) {
      track(index);
    } else {
      forget(index);
    }
    return true;
  });
  return num_done;
}

// It may be evicted from now on.
void Ledger::track(std::uint32_t index) {
  Entry& entry = table_[index];
  evictable_granules_ += entry.num_granules;
  chains_.move(table_, index, entry.goes_first ? Chain::kDemoted : Chain::kRecent);
  entry.goes_first = false;
}

void Ledger::answers_anew(std::uint32_t index) {
  ++generation_;
  feed_.add(table_.key_of(index));
}

void Ledger::forget(std::uint32_t index) {
  chains_.remove(table_, index);
  used_granules_ -= table_[index].num_granules;
  space_.free(table_[index]);
  table_.erase(index);
}

std::uint64_t Ledger::forget_all() {
  const std::uint64_t num_withdrawn = num_held_;
  if (num_withdrawn > 0) {
    try {
      begin_anew();
    } catch (const std::bad_alloc&) {
      forget_each();
    }
  }
  evictable_granules_ = 0;
  num_held_ = num_pending_ = 0;
  generation_ += num_withdrawn;
  feed_.add_all();
  tally_.invalidations += num_withdrawn;
  return num_withdrawn;
}

// New tables, with copies of what is in use. Nothing has changed where the system has no room for them.
void Ledger::begin_anew() {
  leftovers_.reserve(leftovers_.size() + kMostPieces);
  KeyTable table(options_.max_keys, options_.seed);
  GranuleSpace space(options_.num_granules, options_.granule_bytes);
  Chains chains;
  std::uint64_t used_granules = 0;
  for (const Chain chain : {Chain::kReserved, Chain::kPinned}) {
    for (std::uint32_t old = chains_.first(chain); old != kNone; old = table_[old].next) {
      const Key key = table_.key_of(old);
      const std::uint32_t index = table.insert(key, table.tag_of(key));
      Entry& entry = table[index];
      entry.state = chain == Chain::kReserved ? KeyState::kDoomedWrite : KeyState::kDoomedRead;
      entry.goes_first = false;
      entry.num_pins = table_[old].num_pins;
      entry.num_granules = table_[old].num_granules;
      entry.spare_bytes = table_[old].spare_bytes;
      space.copy(space_, table_[old], entry);
      chains.append(table, index, chain);
      used_granules += entry.num_granules;
    }
  }
  if (table_.num_used() > options_.few_keys) {
    table_.take_memory(leftovers_);
    space_.take_memory(leftovers_);
    std::erase_if(leftovers_, [](const LazyMemory& memory) { return memory.num_bytes() == 0; });
    if (leftovers_.size() > kMostLeftovers) leftovers_.erase(leftovers_.begin(), leftovers_.end() - kMostLeftovers);
  }
  table_ = std::move(table);
  space_ = std::move(space);
  chains_ = chains;
  used_granules_ = used_granules;
}

// The same, where it has to do without. Takes a step for each key.
void Ledger::forget_each() {
  for (const Chain chain : {Chain::kDemoted, Chain::kRecent}) {
    while (chains_.first(chain) != kNone) forget(chains_.first(chain));
  }
  for (const Chain chain : {Chain::kReserved, Chain::kPinned}) {
    for (std::uint32_t index = chains_.first(chain); index != kNone; index = table_[index].next) {
      table_[index].state = chain == Chain::kReserved ? KeyState::kDoomedWrite : KeyState::kDoomedRead;
      table_[index].goes_first = false;
    }
  }
}

// Of the oldest first, since one that was forgotten later is mostly one of which less was used.
void Ledger::give_back_some() {
  if (leftovers_.empty()) return;
  leftovers_.front().give_back(kGivenBackBytes);
  if (leftovers_.front().num_bytes() == 0) leftovers_.erase(leftovers_.begin());
}

std::uint64_t Ledger::leftover_bytes() const {
  std::uint64_t num_bytes = 0;
  for (const LazyMemory& memory : leftovers_) num_bytes += memory.num_bytes();
  return num_bytes;
}

void Ledger::close() {
  is_closed_ = true;
  forget_all();
}

Tally Ledger::take_tally() { return std::exchange(tally_, {}); }

}  // namespace hybridkv::ledger
