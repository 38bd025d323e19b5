#include "csrc/ledger/key_table.h"

#include <cstring>

namespace hybridkv::ledger {
namespace {

constexpr std::uint64_t kFactors[] = {0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9};

// Upper half of the product xor its lower half.
std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

std::uint64_t word_at(const unsigned char* bytes) {
  std::uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

}  // namespace

KeyTable::KeyTable(std::uint32_t max_keys, std::uint64_t seed)
    : max_keys_(max_keys),
      seed_(seed),
      // Both factors contain a random seed: a factor that a client can make zero would cancel the other.
      other_seed_(mixed(seed ^ kFactors[0], kFactors[2])),
      num_slots_(num_slots_for(max_keys)),
      slots_(num_slots_),
      entries_(max_keys) {}

std::uint64_t KeyTable::most_bytes(std::uint32_t max_keys) {
  return num_slots_for(max_keys) * sizeof(Slot) + std::uint64_t{max_keys} * sizeof(Entry);
}

std::uint32_t KeyTable::tag_of(Key key) const {
  const auto* bytes = reinterpret_cast<const unsigned char*>(key.data());
  std::size_t left = key.size();
  std::uint64_t hash = seed_;
  for (; left >= 16; left -= 16, bytes += 16) {
    hash = mixed(word_at(bytes) ^ kFactors[0] ^ hash, word_at(bytes + 8) ^ kFactors[1] ^ other_seed_);
  }
  if (left > 0) {
    unsigned char rest[16] = {};
    std::memcpy(rest, bytes, left);
    hash = mixed(word_at(rest) ^ kFactors[0] ^ hash, word_at(rest + 8) ^ kFactors[1] ^ other_seed_);
  }
  return static_cast<std::uint32_t>(mixed(hash ^ key.size(), kFactors[2] ^ seed_) >> 32);
}

Key KeyTable::key_of(std::uint32_t index) const {
  const Entry& entry = entries_[index];
  if (entry.key_bytes == kLongKey) return long_keys_.at(index);
  return {reinterpret_cast<const char*>(entry.key), entry.key_bytes};
}

bool KeyTable::is_of(std::uint32_t index, Key key) const {
  const Entry& entry = entries_[index];
  if (entry.state == KeyState::kUnknown) return false;
  if (key.size() > kInlineKeyBytes) return entry.key_bytes == kLongKey && long_keys_.at(index) == key;
  return entry.key_bytes == key.size() && std::memcmp(entry.key, key.data(), key.size()) == 0;
}

std::uint32_t KeyTable::candidate(std::uint32_t tag) const {
  for (std::uint64_t place = home_of(tag);; place = after(place)) {
    const Slot slot = slots_[place];
    if (slot.index_and_one == 0) return kNone;
    if (slot.tag == tag) return slot.index_and_one - 1;
  }
}

std::uint32_t KeyTable::find(Key key, std::uint32_t tag) const {
  for (std::uint64_t place = home_of(tag);; place = after(place)) {
    const Slot slot = slots_[place];
    if (slot.index_and_one == 0) return kNone;
    if (slot.tag == tag && is_of(slot.index_and_one - 1, key)) return slot.index_and_one - 1;
  }
}

std::uint32_t KeyTable::insert(Key key, std::uint32_t tag) {
  std::uint32_t index = first_free_;
  if (index == kNone) {
    index = num_used_++;
  } else {
    first_free_ = entries_[index].next;
  }
  ++size_;
  Entry& entry = entries_[index];
  entry.extends = kNone;
  entry.num_extensions = 0;
  entry.first_extension = kNone;
  if (key.size() > kInlineKeyBytes) {
    entry.key_bytes = kLongKey;
    long_keys_.emplace(index, key);
  } else {
    entry.key_bytes = static_cast<std::uint8_t>(key.size());
    if (!key.empty()) std::memcpy(entry.key, key.data(), key.size());
  }
  std::uint64_t place = home_of(tag);
  while (slots_[place].index_and_one != 0) place = after(place);
  slots_[place] = {tag, index + 1};
  return index;
}

void KeyTable::erase(std::uint32_t index) {
  std::uint64_t hole = home_of(tag_of(key_of(index)));
  while (slots_[hole].index_and_one != index + 1) hole = after(hole);
  // Moves slots into the hole that a search could not reach otherwise.
  for (std::uint64_t place = after(hole); slots_[place].index_and_one != 0; place = after(place)) {
    const std::uint64_t home = home_of(slots_[place].tag);
    if (distance(home, place) < distance(hole, place)) continue;
    slots_[hole] = slots_[place];
    hole = place;
  }
  slots_[hole] = {};
  Entry& entry = entries_[index];
  if (entry.key_bytes == kLongKey) long_keys_.erase(index);
  entry.state = KeyState::kUnknown;
  entry.next = first_free_;
  first_free_ = index;
  --size_;
}

void KeyTable::take_memory(std::vector<LazyMemory>& memories) {
  memories.push_back(slots_.take_memory(num_slots_));
  memories.push_back(entries_.take_memory(num_used_));
}

}  // namespace hybridkv::ledger
