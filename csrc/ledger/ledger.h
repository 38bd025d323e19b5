// Ledger of a tier in memory: a `BasicLedger` over granules.
//
// tests/kits has a model in Python; a test compares both, call by call.
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
  std::uint32_t max_keys;       // this, `seed` and `few_keys` as in Bounds
  std::uint64_t seed;
  std::uint32_t few_keys = 256;
};

extern template class BasicLedger<GranuleSpace>;

class Ledger : public BasicLedger<GranuleSpace> {
 public:
  // Throws std::bad_alloc if the system lacks the address space for the tables.
  explicit Ledger(const LedgerOptions& options);

  const LedgerOptions& options() const { return options_; }
  // Memory of full tables, if no key is longer than 48 bytes and each chunk is one run.
  std::uint64_t most_bytes() const;
  std::uint64_t unit_bytes() const { return options_.granule_bytes; }
  std::uint64_t capacity_bytes() const { return options_.num_granules * options_.granule_bytes; }
  std::uint64_t used_bytes() const { return used_units() * options_.granule_bytes; }

  // Adds the place of a committed key. False if the key is not committed.
  bool find(Key key, Places& places) const;

  // The entry that the key extends is kept, and evicted after it.
  Refusal reserve(Key key, std::uint64_t num_bytes, const Extends& extends, Places& places) {
    return reserve(key, table_.tag_of(key), num_bytes, extends, places);
  }
  // `num_bytes`, `extends` and `refusals` have the length of `keys`.
  void reserve_all(std::span<const Key> keys, const std::uint64_t* num_bytes, const Extends* extends,
                   Refusal* refusals, Places& places);
  std::size_t commit_all(std::span<const Key> keys, bool* are_offered);
  void touch(std::span<const Key> keys);
  void pin_found(std::span<const std::uint32_t> entries, Places& places);
  std::size_t unpin_all(std::span<const Key> keys);

 private:
  Refusal reserve(Key key, std::uint32_t tag, std::uint64_t num_bytes, const Extends& extends, Places& places);

  LedgerOptions options_;
};

}  // namespace hybridkv::ledger

#endif  // HYBRIDKV_LEDGER_LEDGER_H_
