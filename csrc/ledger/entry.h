// Entry of one key, in 76 bytes.
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

// Lists of entries: evictable, reserved and pinned. Each entry is in one.
enum class Chain : std::uint8_t { kRecent, kReserved, kPinned };
inline constexpr std::size_t kNumChains = 3;

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
  union {
    InGranules granules;
    InSegment record;
  };
};

static_assert(sizeof(Entry) == 76);

}  // namespace hybridkv::ledger

#endif  // HYBRIDKV_LEDGER_ENTRY_H_
