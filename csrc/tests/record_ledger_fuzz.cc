// Random sequences of calls give the results of a plain model with linear search. A walk during them returns each
// record once that was present all the time, and none that never was.
#include "csrc/ledger/record_ledger.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "csrc/tests/expect.h"
#include "csrc/tests/fuzz.h"
#include "csrc/tests/leaf_order.h"

namespace {

using hybridkv::ledger::Bounds;
using hybridkv::ledger::Columns;
using hybridkv::ledger::Extends;
using hybridkv::ledger::Key;
using hybridkv::ledger::KeyState;
using hybridkv::ledger::Record;
using hybridkv::ledger::record_pages;
using hybridkv::ledger::RecordLedger;
using hybridkv::ledger::RecordPlace;
using hybridkv::ledger::Refusal;
using hybridkv::testing::Choices;
using hybridkv::testing::expect;
using hybridkv::testing::LeafOrder;

constexpr std::size_t kMaxSteps = 1500;
constexpr std::uint32_t kNumSegments = 5;

struct Held {
  KeyState state = KeyState::kReserved;
  std::uint32_t num_pins = 0;
  std::uint64_t address = 0;
  std::uint32_t payload_bytes = 0;
};

bool is_held(const Held& held) { return held.state == KeyState::kReserved || held.state == KeyState::kCommitted; }

class Session {
 public:
  explicit Session(Choices choices)
      : choices_(choices),
        bounds_{choices_.between(1, 40), choices_.between(1, 12), static_cast<std::uint32_t>(choices_.between(1, 30)), 7,
                static_cast<std::uint32_t>(choices_.below(10))},
        ledger_(bounds_) {
    for (std::uint64_t number = 0; number < 24; ++number) {
      // Some are longer than an entry has room for.
      keys_.push_back(std::string(number % 5 == 0 ? 60 : 20, 'k') + std::to_string(number));
    }
  }

  void run() {
    for (std::size_t step = 0; step < kMaxSteps && !choices_.is_used_up(); ++step) {
      act();
      check();
    }
    end_walk();
  }

 private:
  const std::string& any_key() { return keys_[choices_.below(keys_.size())]; }
  std::uint64_t new_address() { return std::uint64_t{choices_.below(kNumSegments)} << 32 | 4096 * ++num_given_; }

  std::uint64_t used() const {
    std::uint64_t sum = 0;
    for (const auto& [key, one] : held_) sum += record_pages(one.payload_bytes);
    return sum;
  }
  std::string present(const Extends& extends) const {
    for (const Key key : {extends.first, extends.second}) {
      const auto found = held_.find(std::string(key));
      if (!key.empty() && found != held_.end() && is_held(found->second)) return found->first;
    }
    return "";
  }
  Extends some_extends() {
    Extends extends;
    if (choices_.one_in(2)) extends.first = any_key();
    if (choices_.one_in(2)) extends.second = any_key();
    return extends;
  }
  bool lacks_room(std::uint64_t pages) const {
    return used() + pages > bounds_.num_units || held_.size() + 1 > bounds_.max_keys;
  }
  void forget(const std::string& key) {
    order_.forget(key);
    held_.erase(key);
    seen_all_the_time_.erase(key);
  }

  void act() {
    ledger_.begin_call();
    ++order_.now;
    switch (choices_.below(14)) {
      case 0:
      case 1:
      case 2:
        return reserve();
      case 3:
      case 4:
        return commit();
      case 5:
        return abort();
      case 6:
        return withdraw();
      case 7:
        return touch();
      case 8:
        return pin();
      case 9:
        return unpin();
      case 10:
        return relocate();
      case 11:
        return choices_.one_in(8) ? forget_all() : restore();
      default:
        return walk();
    }
  }

  void reserve() {
    const std::string& key = any_key();
    const auto payload_bytes = static_cast<std::uint32_t>(choices_.between(1, 5) * 3000);
    const std::uint64_t pages = record_pages(payload_bytes);
    const Extends extends = some_extends();
    const std::string kept = present(extends);
    const std::vector<std::string> victims = order_.order(kept);
    std::uint64_t evictable = 0;
    for (const std::string& victim : victims) evictable += record_pages(held_.at(victim).payload_bytes);
    Refusal wanted = Refusal::kNone;
    if (held_.count(key) != 0) {
      wanted = Refusal::kPresent;
    } else if (pages > bounds_.largest_units) {
      wanted = Refusal::kTooLarge;
    } else if (used() + pages - evictable > bounds_.num_units ||
               held_.size() - victims.size() >= bounds_.max_keys) {
      wanted = Refusal::kNoRoom;
    }
    expect(ledger_.why_not(key, pages, extends) == wanted, "a refusal has the reason of the model");
    const RecordPlace place{new_address(), payload_bytes};
    if (wanted != Refusal::kNone)
      return expect(ledger_.take(key, place, extends) == wanted, "take refuses for the same reason");
    if (lacks_room(pages)) {
      expect(ledger_.take(key, place, extends) == Refusal::kNoRoom, "take without make_room is refused");
    }
    std::vector<std::string> gone;
    for (const std::string& victim : victims) {
      if (!lacks_room(pages)) break;
      gone.push_back(victim);
      forget(victim);
    }
    const std::vector<Record> evicted = ledger_.make_room(pages, 1, extends);
    expect(evicted.size() == gone.size(), "as many keys are evicted as in the model");
    for (std::size_t at = 0; at < gone.size(); ++at)
      expect(evicted[at].key == gone[at], "the evicted keys are those of the model");
    expect(ledger_.take(key, place, extends) == Refusal::kNone, "the key is reserved");
    held_[key] = {KeyState::kReserved, 0, place.address, payload_bytes};
    order_.last_use[key] = order_.now;
    order_.extend(key, kept);
  }

  void commit() {
    const std::string& key = any_key();
    const Key view = key;
    RecordPlace place{};
    bool is_offered = false;
    const bool is_reserved = held_.count(key) != 0 && (held_[key].state == KeyState::kReserved ||
                                                       held_[key].state == KeyState::kDoomedWrite);
    expect(ledger_.commit_all({&view, 1}, &place, &is_offered) == (is_reserved ? 1u : 0u),
           "a commit is valid as in the model");
    if (!is_reserved) return;
    expect(place.address == held_[key].address && place.payload_bytes == held_[key].payload_bytes,
           "a committed key has its reserved place");
    expect(is_offered == (held_[key].state == KeyState::kReserved), "a committed key is offered as in the model");
    if (!is_offered) return forget(key);
    held_[key].state = KeyState::kCommitted;
    order_.track(key);
  }

  void abort() {
    const std::string& key = any_key();
    const Key view = key;
    const bool is_reserved = held_.count(key) != 0 && (held_[key].state == KeyState::kReserved ||
                                                       held_[key].state == KeyState::kDoomedWrite);
    expect(ledger_.abort_all({&view, 1}) == (is_reserved ? 1u : 0u), "an abort is valid as in the model");
    if (is_reserved) forget(key);
  }

  void withdraw() {
    const std::string& key = any_key();
    const Key view = key;
    const bool is_present = held_.count(key) != 0 && is_held(held_[key]);
    expect(ledger_.invalidate_all({&view, 1}) == (is_present ? 1u : 0u),
           "as many keys are invalidated as in the model");
    if (!is_present) return;
    seen_all_the_time_.erase(key);
    Held& one = held_[key];
    if (one.state == KeyState::kReserved) {
      one.state = KeyState::kDoomedWrite;
    } else if (one.num_pins > 0) {
      one.state = KeyState::kDoomedRead;
    } else {
      forget(key);
    }
  }

  void touch() {
    const std::string& key = any_key();
    const Key view = key;
    std::vector<std::uint64_t> addresses;
    const Extends extends = some_extends();
    if (held_.count(key) != 0 && is_held(held_[key])) order_.extend(key, present(extends));
    ledger_.extend({&view, 1}, {&extends, 1});
    ledger_.touch({&view, 1}, addresses);
    const auto found = held_.find(key);
    if (found == held_.end()) return expect(addresses.empty(), "a missing key is not touched");
    const bool may_go = found->second.state == KeyState::kCommitted && found->second.num_pins == 0;
    expect(addresses.size() == (may_go ? 1u : 0u),
           "a touched key is returned exactly if it is committed and not pinned");
    if (!may_go) return;
    expect(addresses[0] == found->second.address, "touch returns the address of the key");
    order_.use(key);
  }

  void pin() {
    const std::string& key = any_key();
    const Key view = key;
    std::uint32_t entry = 0;
    const bool is_present = held_.count(key) != 0 && held_[key].state == KeyState::kCommitted;
    expect(ledger_.find_committed({&view, 1}, &entry) == is_present,
           "a key is committed exactly if it is in the model");
    if (!is_present) return;
    std::vector<RecordPlace> places;
    std::vector<std::uint64_t> first;
    ledger_.pin_found({&entry, 1}, places, first);
    expect(places.size() == 1 && places[0].address == held_[key].address, "a pinned key has its place");
    expect(first.size() == (held_[key].num_pins == 0 ? 1u : 0u), "only a first pin is reported");
    if (held_[key].num_pins++ == 0) order_.untrack(key);
  }

  void unpin() {
    const std::string& key = any_key();
    const Key view = key;
    std::vector<RecordPlace> used;
    std::vector<RecordPlace> freed;
    const bool is_pinned = held_.count(key) != 0 && held_[key].num_pins > 0;
    expect(ledger_.unpin_all({&view, 1}, used, freed) == (is_pinned ? 1u : 0u), "an unpin is valid as in the model");
    if (!is_pinned) return;
    if (--held_[key].num_pins > 0)
      return expect(used.empty() && freed.empty(), "a key with another pin is not reported");
    const bool is_committed = held_[key].state == KeyState::kCommitted;
    expect(used.size() == is_committed && freed.size() == !is_committed,
           "a key without pins is evictable again or freed");
    is_committed ? order_.track(key) : forget(key);
  }

  void relocate() {
    const std::string& key = any_key();
    if (held_.count(key) == 0) return expect(!ledger_.relocate(key, 1 << 20), "a missing key is not relocated");
    if (held_[key].state != KeyState::kCommitted || held_[key].num_pins > 0) return;
    held_[key].address = new_address();
    expect(ledger_.relocate(key, held_[key].address), "a key is relocated");
  }

  void restore() {
    const std::string& key = any_key();
    const RecordPlace place{new_address(), 4096};
    const bool fits = held_.count(key) == 0 && held_.size() < bounds_.max_keys;
    expect(ledger_.restore(key, place) == fits, "a key is restored exactly if it fits");
    if (!fits) return;
    held_[key] = {KeyState::kCommitted, 0, place.address, place.payload_bytes};
    order_.track(key);
    order_.last_use[key] = 0;
  }

  void forget_all() {
    std::uint64_t num_held = 0;
    for (const auto& [key, one] : held_) num_held += is_held(one);
    expect(ledger_.forget_all() == num_held, "as many keys are forgotten as in the model");
    std::erase_if(held_, [](const auto& each) { return each.second.state != KeyState::kReserved &&
                                                       each.second.state != KeyState::kDoomedWrite &&
                                                       each.second.num_pins == 0; });
    for (auto& [key, one] : held_) {
      one.state = one.num_pins > 0 ? KeyState::kDoomedRead : KeyState::kDoomedWrite;
    }
    order_.forget_all();
    // A walk in progress continues over the old records.
  }

  void walk() {
    if (!walk_) {
      walk_ = ledger_.begin_walk();
      columns_ = {};
      seen_all_the_time_.clear();
      for (const auto& [key, one] : held_) {
        if (one.state == KeyState::kCommitted) seen_all_the_time_.insert(key);
      }
      return;
    }
    const std::optional<bool> goes_on = ledger_.walk(*walk_, choices_.between(1, 6), columns_);
    expect(goes_on.has_value(), "the walk is in progress");
    if (!*goes_on) check_walk();
  }
  void end_walk() {
    while (walk_) walk();
  }
  void check_walk() {
    walk_.reset();
    std::set<std::string> named;
    std::size_t at = 0;
    for (const std::uint16_t num_bytes : columns_.key_bytes) {
      named.insert(columns_.keys.substr(at, num_bytes));
      at += num_bytes;
    }
    expect(at == columns_.keys.size(), "the lengths of all keys are returned");
    expect(columns_.addresses.size() == columns_.key_bytes.size() && columns_.turns.size() == columns_.key_bytes.size() &&
               columns_.payload_bytes.size() == columns_.key_bytes.size(),
           "columns have one length");
    const std::set<std::uint64_t> addresses(columns_.addresses.begin(), columns_.addresses.end());
    expect(addresses.size() == columns_.addresses.size(), "each record is returned once");
    for (const std::string& key : seen_all_the_time_)
      expect(named.count(key) == 1, "the walk returns every record that was present");
    const std::set<std::string> all(keys_.begin(), keys_.end());
    for (const std::string& key : named) expect(all.count(key) == 1, "every returned record was present");
    expect(!ledger_.walk(1, 1, columns_).has_value(), "the walk has ended");
  }

  void check() {
    expect(ledger_.eviction_order() == order_.order(), "the eviction order is that of the model");
    expect(ledger_.used_units() == used(), "the used pages are those of the model");
    expect(ledger_.has_evictable() == !order_.leaves.empty(), "a key is evictable exactly if the model has a leaf");
    const std::string& key = any_key();
    const std::optional<Record> record = ledger_.find(key);
    const auto found = held_.find(key);
    expect(record.has_value() == (found != held_.end()), "a record is found exactly if it is in the model");
    if (record) {
      expect(record->state == found->second.state && record->num_pins == found->second.num_pins &&
                 record->place.address == found->second.address,
             "a found record is that of the model");
    }
    const auto number = static_cast<std::uint32_t>(choices_.below(kNumSegments));
    std::map<std::uint64_t, std::string> in_segment;
    for (const auto& [other, one] : held_) {
      if (is_held(one) && one.address >> 32 == number) in_segment[one.address] = other;
    }
    const std::vector<Record> rows = ledger_.held_in(number);
    expect(rows.size() == in_segment.size(), "a segment has as many records as in the model");
    std::size_t at = 0;
    for (const auto& [address, other] : in_segment)
      expect(rows[at++].key == other, "a segment has the records of the model");
    if (in_segment.empty() && choices_.one_in(4)) ledger_.drop_segment(number);
  }

  Choices choices_;
  Bounds bounds_;
  RecordLedger ledger_;
  std::vector<std::string> keys_;
  std::map<std::string, Held> held_;
  LeafOrder order_;
  std::uint64_t num_given_ = 0;
  std::optional<std::uint64_t> walk_;
  Columns columns_;
  std::set<std::string> seen_all_the_time_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Session(Choices(data, size)).run();
  return 0;
}
