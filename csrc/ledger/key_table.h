// Hash table from keys to entries: open addressing by 32 bits of a hash, with the whole key compared in the entry.
//
// A slot has 8 bytes, and there are three slots for two entries. So a search reads about two slots for a present key
// and five for an absent one, mostly in one cache line. A slot's tag determines its home, so an erasure moves slots up
// without reading their entries. The table never rehashes: it has room for all entries from the start, in memory that
// the system provides as it is used. The table interprets no entry but a free one.
#ifndef HYBRIDKV_LEDGER_KEY_TABLE_H_
#define HYBRIDKV_LEDGER_KEY_TABLE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "csrc/ledger/entry.h"
#include "csrc/ledger/lazy_memory.h"

namespace hybridkv::ledger {

using Key = std::string_view;

class KeyTable {
 public:
  KeyTable() = default;
  // `seed` is random, so that a client cannot choose keys that share a slot.
  KeyTable(std::uint32_t max_keys, std::uint64_t seed);

  // Memory of a full table, if no key is longer than 48 bytes.
  static std::uint64_t most_bytes(std::uint32_t max_keys);

  std::uint32_t size() const { return size_; }
  std::uint32_t max_keys() const { return max_keys_; }
  // Number of entries in use, and of free ones that were used before.
  std::uint32_t num_used() const { return num_used_; }
  Entry& operator[](std::uint32_t index) { return entries_[index]; }
  const Entry& operator[](std::uint32_t index) const { return entries_[index]; }
  Key key_of(std::uint32_t index) const;

  // kNone if the key is absent.
  std::uint32_t find(Key key) const { return find(key, tag_of(key)); }
  std::uint32_t find(Key key, std::uint32_t tag) const;
  // Adds an entry that extends nothing, and sets its key. The key must be absent, and there must be room.
  std::uint32_t insert(Key key, std::uint32_t tag);
  // Frees the entry.
  void erase(std::uint32_t index);

  std::uint32_t tag_of(Key key) const;
  void prefetch(std::uint32_t tag) const { __builtin_prefetch(&slots_[home_of(tag)]); }

  // Calls `act(position, index)` for each key in order, until it returns false. Prefetches entries in batches. `act`
  // may erase, but must not insert.
  template <class Act>
  void each(std::span<const Key> keys, Act&& act) const;
  // Calls `act(position, tag)` for each key in order. `act` may insert and erase.
  template <class Act>
  void each_tag(std::span<const Key> keys, Act&& act) const;

  void take_memory(std::vector<LazyMemory>& memories);

 private:
  struct Slot {
    std::uint32_t tag;
    std::uint32_t index_and_one;  // 0: empty
  };

  static constexpr std::size_t kAtOnce = 32;

  static std::uint64_t num_slots_for(std::uint32_t max_keys) { return std::uint64_t{max_keys} * 3 / 2 + 2; }
  std::uint64_t home_of(std::uint32_t tag) const {
    return static_cast<std::uint64_t>(static_cast<unsigned __int128>(num_slots_) * tag >> 32);
  }
  std::uint64_t after(std::uint64_t place) const { return place + 1 == num_slots_ ? 0 : place + 1; }
  std::uint64_t distance(std::uint64_t from, std::uint64_t to) const {
    return to >= from ? to - from : to + num_slots_ - from;
  }
  bool is_of(std::uint32_t index, Key key) const;
  // Entry of the first slot with this tag, or kNone.
  std::uint32_t candidate(std::uint32_t tag) const;

  std::uint32_t max_keys_ = 0;
  std::uint64_t seed_ = 0;
  std::uint64_t other_seed_ = 0;
  std::uint64_t num_slots_ = 0;
  std::uint32_t size_ = 0;
  std::uint32_t num_used_ = 0;         // entries in use, and free ones in the list below
  std::uint32_t first_free_ = kNone;   // first free entry, or kNone
  LazyArray<Slot> slots_;
  LazyArray<Entry> entries_;
  std::unordered_map<std::uint32_t, std::string> long_keys_;
};

template <class Act>
void KeyTable::each(std::span<const Key> keys, Act&& act) const {
  std::uint32_t tags[kAtOnce];
  std::uint32_t found[kAtOnce];
  for (std::size_t first = 0; first < keys.size(); first += kAtOnce) {
    const std::size_t count = std::min(kAtOnce, keys.size() - first);
    for (std::size_t i = 0; i < count; ++i) prefetch(tags[i] = tag_of(keys[first + i]));
    for (std::size_t i = 0; i < count; ++i) {
      found[i] = candidate(tags[i]);
      if (found[i] == kNone) continue;
      const auto* entry = reinterpret_cast<const unsigned char*>(&entries_[found[i]]);
      __builtin_prefetch(entry, 1);
      __builtin_prefetch(entry + sizeof(Entry) - 1, 1);
    }
    for (std::size_t i = 0; i < count; ++i) {
      std::uint32_t index = found[i];
      if (index != kNone && !is_of(index, keys[first + i])) index = find(keys[first + i], tags[i]);
      if (!act(first + i, index)) return;
    }
  }
}

template <class Act>
void KeyTable::each_tag(std::span<const Key> keys, Act&& act) const {
  std::uint32_t tags[kAtOnce];
  for (std::size_t first = 0; first < keys.size(); first += kAtOnce) {
    const std::size_t count = std::min(kAtOnce, keys.size() - first);
    for (std::size_t i = 0; i < count; ++i) prefetch(tags[i] = tag_of(keys[first + i]));
    for (std::size_t i = 0; i < count; ++i) {
      if (!act(first + i, tags[i])) return;
    }
  }
}

}  // namespace hybridkv::ledger

#endif  // HYBRIDKV_LEDGER_KEY_TABLE_H_
