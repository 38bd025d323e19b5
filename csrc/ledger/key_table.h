// Finds the entry of a key: open addressing over 32 bits of a hash, the whole key compared in the entry.
//
// A slot is 8 bytes, and there are three for two entries, so about two are looked at for a key that is there and five
// for one that is not, most of them in one line of the cache. Where a slot belongs is in its tag, so what moves up when
// another is erased moves without a look at its entry. Nothing is ever rehashed: there is room for all entries from the
// start, in memory that is taken as it is used. What an entry means is not known here, but for a free one.
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
  // `seed` is of chance, so that nobody can choose keys that all belong into one slot.
  KeyTable(std::uint32_t max_keys, std::uint64_t seed);

  // Of all that it can ever take for so many keys of at most 48 bytes.
  static std::uint64_t most_bytes(std::uint32_t max_keys);

  std::uint32_t size() const { return size_; }
  std::uint32_t max_keys() const { return max_keys_; }
  // Entries that ever were.
  std::uint32_t num_used() const { return num_used_; }
  Entry& operator[](std::uint32_t index) { return entries_[index]; }
  const Entry& operator[](std::uint32_t index) const { return entries_[index]; }
  Key key_of(std::uint32_t index) const;

  // kNone where it is not known.
  std::uint32_t find(Key key) const { return find(key, tag_of(key)); }
  std::uint32_t find(Key key, std::uint32_t tag) const;
  // A new entry, of which only the key is set. It is not known, and there is room.
  std::uint32_t insert(Key key, std::uint32_t tag);
  // Its entry is free from now on.
  void erase(std::uint32_t index);

  std::uint32_t tag_of(Key key) const;
  void prefetch(std::uint32_t tag) const { __builtin_prefetch(&slots_[home_of(tag)]); }

  // `act(position, index)` for each key in its order, until it answers false. Memory for many is waited for at once.
  // `act` may erase, and must not insert.
  template <class Act>
  void each(std::span<const Key> keys, Act&& act) const;
  // `act(position, tag)`, which may do anything.
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
  // Of the first slot with this tag, or kNone.
  std::uint32_t candidate(std::uint32_t tag) const;

  std::uint32_t max_keys_ = 0;
  std::uint64_t seed_ = 0;
  std::uint64_t other_seed_ = 0;
  std::uint64_t num_slots_ = 0;
  std::uint32_t size_ = 0;
  std::uint32_t num_used_ = 0;         // entries that ever were
  std::uint32_t first_free_ = kNone;   // of those, unless all are in use
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
