#include "csrc/ledger/record_ledger.h"

#include <algorithm>
#include <utility>

namespace hybridkv::ledger {

template class BasicLedger<SegmentSpace>;

namespace {

// Chains with committed records, the most recently used first. A walk reads the ancestors of a record with it.
constexpr Chain kInOrder[] = {Chain::kPinned, Chain::kReserved, Chain::kLeaves};
constexpr std::size_t kNumInOrder = std::size(kInOrder);

RecordPlace place_of(const Entry& entry) { return {address_of(entry), entry.record.payload_bytes}; }

}  // namespace

std::uint64_t RecordLedger::most_bytes() const {
  return KeyTable::most_bytes(bounds_.max_keys) + std::uint64_t{bounds_.max_keys} * 2 * sizeof(std::uint32_t);
}

Record RecordLedger::record_of(std::uint32_t index) const {
  const Entry& entry = table_[index];
  return {std::string(table_.key_of(index)), place_of(entry), entry.state, entry.num_pins};
}

std::optional<Record> RecordLedger::find(Key key) const {
  const std::uint32_t index = table_.find(key);
  if (index == kNone) return std::nullopt;
  return record_of(index);
}

std::vector<Record> RecordLedger::in(Chain chain) const {
  std::vector<Record> records;
  for (std::uint32_t index = chains_.first(chain); index != kNone; index = table_[index].next) {
    records.push_back(record_of(index));
  }
  return records;
}

std::vector<Record> RecordLedger::in_use() const {
  std::vector<Record> records = reserved();
  for (Record& record : in(Chain::kPinned)) records.push_back(std::move(record));
  return records;
}

std::vector<Record> RecordLedger::movable_in(std::uint32_t number) const {
  std::vector<Record> records = held_in(number);
  std::erase_if(records, [](const Record& record) {
    return record.state != KeyState::kCommitted || record.num_pins > 0;
  });
  return records;
}

std::vector<Record> RecordLedger::held_in(std::uint32_t number) const {
  std::vector<std::uint32_t> found = space_.in_segment(number);
  std::erase_if(found, [&](std::uint32_t index) {
    return !is_held(table_[index].state) || table_[index].record.number != number;
  });
  std::sort(found.begin(), found.end(), [&](std::uint32_t one, std::uint32_t other) {
    return table_[one].record.offset < table_[other].record.offset;
  });
  found.erase(std::unique(found.begin(), found.end()), found.end());
  std::vector<Record> records;
  records.reserve(found.size());
  for (const std::uint32_t index : found) records.push_back(record_of(index));
  return records;
}

Refusal RecordLedger::why_not(Key key, std::uint64_t num_pages, const Extends& extends) const {
  if (key.size() > kMostKeyBytes) return Refusal::kTooLarge;
  return BasicLedger::why_not(key, table_.tag_of(key), num_pages, present(extends));
}

std::vector<Record> RecordLedger::make_room(std::uint64_t num_pages, std::uint32_t num_keys, const Extends& extends) {
  std::vector<Record> evicted;
  BasicLedger::make_room(num_pages, num_keys, present(extends),
                         [&](std::uint32_t index) { evicted.push_back(record_of(index)); });
  return evicted;
}

Refusal RecordLedger::take(Key key, RecordPlace place, const Extends& extends) {
  const std::uint64_t num_pages = record_pages(place.payload_bytes);
  const Refusal refusal = why_not(key, num_pages, extends);
  if (refusal != Refusal::kNone) return refusal;
  if (lacks_room(num_pages, 1)) return Refusal::kNoRoom;
  const std::uint32_t index = BasicLedger::take(key, table_.tag_of(key), present(extends), [&](Entry& entry) {
    entry.record.payload_bytes = place.payload_bytes;
    put_at(entry, place.address);
  });
  space_.add(index, table_[index]);
  return Refusal::kNone;
}

std::optional<Record> RecordLedger::evict_next() {
  const std::uint32_t index = chains_.first(Chain::kLeaves);
  if (index == kNone) return std::nullopt;
  Record evicted = record_of(index);
  BasicLedger::evict(index);
  return evicted;
}

bool RecordLedger::evict(Key key) {
  const std::uint32_t index = table_.find(key);
  if (index == kNone || table_[index].state != KeyState::kCommitted || table_[index].num_pins > 0) return false;
  BasicLedger::evict(index);
  return true;
}

std::size_t RecordLedger::commit_all(std::span<const Key> keys, RecordPlace* places, bool* are_offered) {
  return BasicLedger::commit_all(keys, [&](std::size_t position, const Entry& entry, bool is_offered) {
    places[position] = place_of(entry);
    are_offered[position] = is_offered;
  });
}

void RecordLedger::touch(std::span<const Key> keys, std::vector<std::uint64_t>& addresses) {
  BasicLedger::touch(keys, [&](const Entry& entry) { addresses.push_back(address_of(entry)); });
}

void RecordLedger::pin_found(std::span<const std::uint32_t> entries, std::vector<RecordPlace>& places,
                             std::vector<std::uint64_t>& held) {
  BasicLedger::pin_found(entries, [&](const Entry& entry, bool is_first) {
    places.push_back(place_of(entry));
    if (is_first) held.push_back(address_of(entry));
  });
}

std::size_t RecordLedger::unpin_all(std::span<const Key> keys, std::vector<RecordPlace>& used,
                                    std::vector<RecordPlace>& freed) {
  return BasicLedger::unpin_all(keys, [&](const Entry& entry) {
    (entry.state == KeyState::kCommitted ? used : freed).push_back(place_of(entry));
  });
}

bool RecordLedger::relocate(Key key, std::uint64_t address) {
  const std::uint32_t index = table_.find(key);
  if (index == kNone) return false;
  put_at(table_[index], address);
  space_.add(index, table_[index]);
  return true;
}

std::size_t RecordLedger::restore_all(std::span<const Key> keys, const std::uint64_t* addresses,
                                      const std::uint64_t* payload_bytes) {
  std::size_t num_restored = keys.size();
  table_.each_tag(keys, [&](std::size_t position, std::uint32_t tag) {
    const RecordPlace place{addresses[position], static_cast<std::uint32_t>(payload_bytes[position])};
    if (restore(keys[position], tag, place)) return true;
    num_restored = position;
    return false;
  });
  return num_restored;
}

bool RecordLedger::restore(Key key, std::uint32_t tag, RecordPlace place) {
  if (is_closed_ || key.size() > kMostKeyBytes) return false;
  if (table_.size() >= bounds_.max_keys || table_.find(key, tag) != kNone) return false;
  const std::uint32_t index = table_.insert(key, tag);
  Entry& entry = table_[index];
  entry.state = KeyState::kCommitted;
  entry.num_pins = 0;
  entry.last_use = 0;
  entry.record.payload_bytes = place.payload_bytes;
  put_at(entry, place.address);
  chains_.append(table_, index, Chain::kLeaves);
  space_.add(index, entry);
  used_units_ += units_of(index);
  ++num_held_;
  return true;
}

std::uint64_t RecordLedger::forget_all() {
  const std::uint64_t num_withdrawn = BasicLedger::forget_all();
  // Without memory for new tables the old tables were emptied, so the walk cannot continue.
  if (num_withdrawn > 0 && !walk_.retired) end_walk();
  return num_withdrawn;
}

// Walk.

std::uint64_t RecordLedger::begin_walk() {
  end_walk();
  walk_.number = ++num_walks_;
  walk_.is_on = true;
  return walk_.number;
}

void RecordLedger::end_walk() {
  Walk ended = std::exchange(walk_, {});
  chains_.watch(kNone);
  if (ended.retired) BasicLedger::retire(std::move(*ended.retired), ended.retired_chains, SegmentSpace());
}

std::optional<bool> RecordLedger::walk(std::uint64_t number, std::size_t num_entries, Columns& columns) {
  if (!walk_.is_on || walk_.number != number) return std::nullopt;
  if (walk_.chain < kNumInOrder) {
    look_at_order(num_entries);
    return true;
  }
  const KeyTable& table = walk_.retired ? *walk_.retired : table_;
  const std::uint32_t end = table.num_used();
  for (; num_entries > 0 && walk_.next < end; --num_entries, ++walk_.next) {
    const Entry& entry = table[walk_.next];
    if (entry.state != KeyState::kCommitted) continue;
    const Key key = table.key_of(walk_.next);
    columns.keys += key;
    columns.key_bytes.push_back(static_cast<std::uint16_t>(key.size()));
    columns.addresses.push_back(address_of(entry));
    columns.payload_bytes.push_back(entry.record.payload_bytes);
    const std::uint32_t turn = walk_.next < walk_.turns.size() ? walk_.turns[walk_.next] : 0;
    columns.turns.push_back(turn - 1);  // 0: the highest
  }
  if (walk_.next < end) return true;
  end_walk();
  return false;
}

// Reads from the most recent end. An entry that is used or extended meanwhile is not read again.
void RecordLedger::look_at_order(std::size_t num_entries) {
  const KeyTable& table = walk_.retired ? *walk_.retired : table_;
  Chains& chains = walk_.retired ? walk_.retired_chains : chains_;
  if (walk_.turns.size() < table.num_used()) walk_.turns.resize(table.num_used());
  std::vector<std::uint32_t> path;
  while (num_entries > 0 && walk_.chain < kNumInOrder) {
    if (!walk_.is_begun) {
      chains.watch(chains.last(kInOrder[walk_.chain]));
      walk_.is_begun = true;
    }
    const std::uint32_t index = chains.watched();
    if (index == kNone) {
      ++walk_.chain;
      walk_.is_begun = false;
      continue;
    }
    // The ancestors of a record get higher turns.
    std::uint32_t above = kInOrder[walk_.chain] == Chain::kReserved ? table[index].extends : index;
    for (; above != kNone && walk_.turns[above] == 0; above = table[above].extends) path.push_back(above);
    for (; !path.empty(); path.pop_back()) walk_.turns[path.back()] = --walk_.turn;
    chains.watch(table[index].previous);
    --num_entries;
  }
}

void RecordLedger::retire(KeyTable&& table, const Chains& chains, SegmentSpace&& space) {
  if (walk_.is_on && !walk_.retired) {
    walk_.retired = std::move(table);
    walk_.retired_chains = chains;
    return;
  }
  BasicLedger::retire(std::move(table), chains, std::move(space));
}

}  // namespace hybridkv::ledger
