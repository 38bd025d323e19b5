// Entry of one key, in 100 bytes.
#ifndef HYBRIDKV_LEDGER_ENTRY_H_
#define HYBRIDKV_LEDGER_ENTRY_H_

#include <cstddef>
#include <cstdint>

namespace hybridkv::ledger {

inline constexpr std::size_t kInlineKeyBytes = 48;
// In place of a length: the key is stored outside the entry.
inline constexpr std::uint8_t kLongKey = 0xFF;
inline constexpr std::uint32_t kNone = ~std::uint32_t{0};

// The states of hybridkv.tiers.ledger.KeyState, and kUnknown. A "doomed" key is deleted, but still written or pinned.
enum class KeyState : std::uint8_t { kUnknown, kReserved, kCommitted, kDoomedWrite, kDoomedRead };

// Lists of entries. Each entry is in one. Committed and unpinned entries are leaves, in the order of use, or inner: a
// present entry extends them.
enum class Chain : std::uint8_t { kLeaves, kInner, kReserved, kPinned };
inline constexpr std::size_t kNumChains = 4;

// Place of bytes in granules of an arena.
struct InGranules {
  std::uint32_t num_granules;
  std::uint32_t spare_bytes;  // of the last granule
  std::uint32_t place;        // the first granule, or the first fragment
};

// Place of a record in a segment of a store.
struct InSegment {
  std::uint32_t payload_bytes;
  std::uint32_t offset;
  std::uint32_t number;  // segment number
};

struct Entry {
  unsigned char key[kInlineKeyBytes];
  std::uint8_t key_bytes;
  KeyState state;
  Chain chain;
  bool is_fragmented;  // its granules form several runs
  std::uint32_t num_pins;
  std::uint32_t previous;
  std::uint32_t next;  // in its chain, or in the list of free entries
  // A tree: the entry that it extends, how many entries extend it, the first of them, and its neighbors among those that
  // extend the same entry. kNone: there is none.
  std::uint32_t extends;
  std::uint32_t num_extensions;
  std::uint32_t first_extension;
  std::uint32_t previous_sibling;
  std::uint32_t next_sibling;
  std::uint32_t last_use;  // number of the call
  union {
    InGranules granules;
    InSegment record;
  };
};

static_assert(sizeof(Entry) == 100);

}  // namespace hybridkv::ledger

#endif  // HYBRIDKV_LEDGER_ENTRY_H_
