// Lists of entries, linked through the entries. Each entry is in one list.
#ifndef HYBRIDKV_LEDGER_CHAINS_H_
#define HYBRIDKV_LEDGER_CHAINS_H_

#include <cstddef>
#include <cstdint>

#include "csrc/ledger/entry.h"
#include "csrc/ledger/key_table.h"

namespace hybridkv::ledger {

class Chains {
 public:
  std::uint32_t first(Chain chain) const { return of(chain).first; }
  std::uint32_t last(Chain chain) const { return of(chain).last; }
  std::uint32_t size(Chain chain) const { return of(chain).size; }

  void append(KeyTable& entries, std::uint32_t index, Chain chain) {
    Ends& ends = of(chain);
    Entry& entry = entries[index];
    entry.chain = chain;
    entry.previous = ends.last;
    entry.next = kNone;
    (ends.last == kNone ? ends.first : entries[ends.last].next) = index;
    ends.last = index;
    ++ends.size;
  }
  void prepend(KeyTable& entries, std::uint32_t index, Chain chain) {
    Ends& ends = of(chain);
    Entry& entry = entries[index];
    entry.chain = chain;
    entry.previous = kNone;
    entry.next = ends.first;
    (ends.first == kNone ? ends.last : entries[ends.first].previous) = index;
    ends.first = index;
    ++ends.size;
  }
  void remove(KeyTable& entries, std::uint32_t index) {
    const Entry& entry = entries[index];
    if (index == watched_) watched_ = entry.previous;
    Ends& ends = of(entry.chain);
    (entry.previous == kNone ? ends.first : entries[entry.previous].next) = entry.next;
    (entry.next == kNone ? ends.last : entries[entry.next].previous) = entry.previous;
    --ends.size;
  }
  // Position of a walk along a chain, from its end. When its entry leaves the chain, the position moves on.
  std::uint32_t watched() const { return watched_; }
  void watch(std::uint32_t index) { watched_ = index; }
  void move(KeyTable& entries, std::uint32_t index, Chain chain) {
    remove(entries, index);
    append(entries, index, chain);
  }

 private:
  struct Ends {
    std::uint32_t first = kNone;
    std::uint32_t last = kNone;
    std::uint32_t size = 0;
  };

  Ends& of(Chain chain) { return ends_[static_cast<std::size_t>(chain)]; }
  const Ends& of(Chain chain) const { return ends_[static_cast<std::size_t>(chain)]; }

  Ends ends_[kNumChains];
  std::uint32_t watched_ = kNone;
};

}  // namespace hybridkv::ledger

#endif  // HYBRIDKV_LEDGER_CHAINS_H_
