#include "csrc/ledger/ledger.h"

namespace hybridkv::ledger {

template class BasicLedger<GranuleSpace>;

Ledger::Ledger(const LedgerOptions& options)
    : BasicLedger({options.num_granules, options.num_granules, options.max_keys, options.seed, options.few_keys},
                  GranuleSpace(options.num_granules, options.granule_bytes)),
      options_(options) {}

std::uint64_t Ledger::most_bytes() const {
  return KeyTable::most_bytes(options_.max_keys) + GranuleSpace::most_bytes(options_.num_granules);
}

bool Ledger::find(Key key, Places& places) const {
  const std::uint32_t index = table_.find(key);
  if (index == kNone || table_[index].state != KeyState::kCommitted) return false;
  space_.append(table_[index], places);
  return true;
}

void Ledger::reserve_all(std::span<const Key> keys, const std::uint64_t* num_bytes, const Extends* extends,
                         Refusal* refusals, Places& places) {
  table_.each_tag(keys, [&](std::size_t position, std::uint32_t tag) {
    refusals[position] = reserve(keys[position], tag, num_bytes[position], extends[position], places);
    return true;
  });
}

Refusal Ledger::reserve(Key key, std::uint32_t tag, std::uint64_t num_bytes, const Extends& extends,
                        Places& places) {
  const std::uint64_t granule_bytes = options_.granule_bytes;
  const std::uint64_t num_granules = num_bytes / granule_bytes + (num_bytes % granule_bytes != 0);
  const std::uint32_t kept = present(extends);
  const Refusal refusal = why_not(key, tag, num_granules, kept);
  if (refusal != Refusal::kNone) {
    ++tally_.refusals[static_cast<std::size_t>(refusal)];
    return refusal;
  }
  make_room(num_granules, 1, kept, [](std::uint32_t) {});
  const std::uint32_t index = take(key, tag, kept, [&](Entry& entry) {
    entry.granules.num_granules = static_cast<std::uint32_t>(num_granules);
    entry.granules.spare_bytes = static_cast<std::uint32_t>(num_granules * granule_bytes - num_bytes);
    space_.take(entry);
  });
  space_.append(table_[index], places);
  return Refusal::kNone;
}

std::size_t Ledger::commit_all(std::span<const Key> keys, bool* are_offered) {
  return BasicLedger::commit_all(
      keys, [&](std::size_t position, const Entry&, bool is_offered) { are_offered[position] = is_offered; });
}

void Ledger::touch(std::span<const Key> keys) {
  BasicLedger::touch(keys, [](const Entry&) {});
}

void Ledger::pin_found(std::span<const std::uint32_t> entries, Places& places) {
  BasicLedger::pin_found(entries, [&](const Entry& entry, bool) { space_.append(entry, places); });
}

std::size_t Ledger::unpin_all(std::span<const Key> keys) {
  return BasicLedger::unpin_all(keys, [](const Entry&) {});
}

}  // namespace hybridkv::ledger
