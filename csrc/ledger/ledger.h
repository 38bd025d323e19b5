// Which keys a tier in memory holds, and where: a `BasicLedger` over granules.
//
// tests/kits has the same in Python, and a test compares both, call by call.
#ifndef HYBRIDKV_LEDGER_LEDGER_H_
#define HYBRIDKV_LEDGER_LEDGER_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "csrc/ledger/basic_ledger.h"
#include "csrc/ledger/granule_space.h"

namespace hybridkv::ledger {

struct LedgerOptions {
  std::uint32_t num_granules;   // at least 1, below kNone
  std::uint64_t granule_bytes;  // 1 to 2^32
  std::uint32_t max_keys;       // as of Bounds, these three
  std::uint64_t seed;
  std::uint32_t few_keys = 256;
};

extern template class BasicLedger<GranuleSpace>;

class Ledger : public BasicLedger<GranuleSpace> {
 public:
  // std::bad_alloc where the system has no room for the tables' addresses.
  explicit Ledger(const LedgerOptions& options);

  const LedgerOptions& options() const { return options_; }
  // Of all tables, when they are full of keys of at most 48 bytes whose chunks lie in one run each.
  std::uint64_t most_bytes() const;
  std::uint64_t unit_bytes() const { return options_.granule_bytes; }
  std::uint64_t capacity_bytes() const { return options_.num_granules * options_.granule_bytes; }
  std::uint64_t used_bytes() const { return used_units() * options_.granule_bytes; }

  // Of a key that is committed. Whether it is.
  bool find(Key key, Places& places) const;

  Refusal reserve(Key key, std::uint64_t num_bytes, Places& places) {
    return reserve(key, table_.tag_of(key), num_bytes, places);
  }
  // `num_bytes` and `refusals` are as long as `keys`.
  void reserve_all(std::span<const Key> keys, const std::uint64_t* num_bytes, Refusal* refusals, Places& places);
  std::size_t commit_all(std::span<const Key> keys, bool* are_offered);
  void touch(std::span<const Key> keys);
  void pin_found(std::span<const std::uint32_t> entries, Places& places);
  std::size_t unpin_all(std::span<const Key> keys);

 private:
  Refusal reserve(Key key, std::uint32_t tag, std::uint64_t num_bytes, Places& places);

  LedgerOptions options_;
};

}  // namespace hybridkv::ledger

#endif  // HYBRIDKV_LEDGER_LEDGER_H_
