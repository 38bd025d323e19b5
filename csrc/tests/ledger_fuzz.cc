// Random sequences of calls give the results of a plain model with linear search: states, eviction order, counts and
// changes. No granule belongs to two chunks.
#include "csrc/ledger/ledger.h"

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

using hybridkv::ledger::Answer;
using hybridkv::ledger::Changes;
using hybridkv::ledger::Extends;
using hybridkv::ledger::Extent;
using hybridkv::ledger::Key;
using hybridkv::ledger::KeyState;
using hybridkv::ledger::Ledger;
using hybridkv::ledger::LedgerOptions;
using hybridkv::ledger::Places;
using hybridkv::ledger::Refusal;
using hybridkv::ledger::Tally;
using hybridkv::testing::Choices;
using hybridkv::testing::expect;
using hybridkv::testing::LeafOrder;

constexpr std::size_t kMaxSteps = 1500;

struct Held {
  KeyState state = KeyState::kReserved;
  std::uint64_t num_pins = 0;
  std::uint64_t num_granules = 0;
  std::vector<Extent> extents;
};

bool is_held(const Held& held) { return held.state == KeyState::kReserved || held.state == KeyState::kCommitted; }

// A second implementation of the rules, with a map and lists that are searched.
struct Model {
  explicit Model(const LedgerOptions& options) : options(options) {}

  LedgerOptions options;
  std::map<std::string, Held> held;
  LeafOrder order;
  std::uint64_t generation = 0;
  std::set<std::string> changed;
  bool is_any = false;
  bool is_closed = false;
  Tally tally;

  std::uint64_t used() const {
    std::uint64_t sum = 0;
    for (const auto& [key, one] : held) sum += one.num_granules;
    return sum;
  }
  std::uint64_t in_use() const { return held.size() - order.free.size(); }
  std::string present(const Extends& extends) const {
    for (const Key key : {extends.first, extends.second}) {
      if (!key.empty() && answer(std::string(key)) != Answer::kMiss) return std::string(key);
    }
    return "";
  }
  std::uint64_t num_keys() const {
    return static_cast<std::uint64_t>(
        std::count_if(held.begin(), held.end(), [](const auto& one) { return is_held(one.second); }));
  }
  Answer answer(const std::string& key) const {
    const auto found = held.find(key);
    if (found == held.end() || !is_held(found->second)) return Answer::kMiss;
    return found->second.state == KeyState::kReserved ? Answer::kPending : Answer::kHit;
  }

  void anew(const std::string& key) {
    ++generation;
    changed.insert(key);
  }
  void forget(const std::string& key) {
    order.forget(key);
    held.erase(key);
  }

  Refusal reserve(const std::string& key, std::uint64_t num_bytes, const Extends& extends) {
    const std::string kept = present(extends);
    const std::vector<std::string> victims = order.order(kept);
    std::uint64_t evictable = 0;
    for (const std::string& victim : victims) evictable += held.at(victim).num_granules;
    const std::uint64_t wanted = (num_bytes + options.granule_bytes - 1) / options.granule_bytes;
    Refusal refusal = Refusal::kNone;
    if (is_closed) {
      refusal = Refusal::kClosed;
    } else if (held.count(key) > 0) {
      refusal = Refusal::kPresent;
    } else if (wanted > options.num_granules) {
      refusal = Refusal::kTooLarge;
    } else if (used() + wanted - evictable > options.num_granules ||
               held.size() - victims.size() >= options.max_keys) {
      refusal = Refusal::kNoRoom;
    }
    if (refusal != Refusal::kNone) {
      ++tally.refusals[static_cast<std::size_t>(refusal)];
      return refusal;
    }
    for (const std::string& victim : victims) {
      if (used() + wanted <= options.num_granules && held.size() < options.max_keys) break;
      ++tally.evictions;
      tally.evicted_units += held.at(victim).num_granules;
      forget(victim);
      anew(victim);
    }
    held[key].num_granules = wanted;
    order.last_use[key] = order.now;
    order.extend(key, kept);
    anew(key);
    ++tally.reservations;
    return Refusal::kNone;
  }
  // Returns whether it was reserved. Sets `is_offered` if it is a hit now.
  bool commit(const std::string& key, bool& is_offered) {
    const auto found = held.find(key);
    if (found == held.end()) return false;
    is_offered = found->second.state == KeyState::kReserved;
    if (found->second.state == KeyState::kDoomedWrite) {
      forget(key);
      return true;
    }
    if (!is_offered) return false;
    found->second.state = KeyState::kCommitted;
    order.track(key);
    anew(key);
    ++tally.commits;
    return true;
  }
  bool abort(const std::string& key) {
    const auto found = held.find(key);
    if (found == held.end()) return false;
    if (found->second.state != KeyState::kReserved && found->second.state != KeyState::kDoomedWrite) return false;
    if (found->second.state == KeyState::kReserved) anew(key);
    forget(key);
    ++tally.aborts;
    return true;
  }
  bool invalidate(const std::string& key) {
    const auto found = held.find(key);
    if (found == held.end() || !is_held(found->second)) return false;
    anew(key);
    ++tally.invalidations;
    if (found->second.state == KeyState::kReserved) {
      found->second.state = KeyState::kDoomedWrite;
    } else if (found->second.num_pins > 0) {
      found->second.state = KeyState::kDoomedRead;
    } else {
      forget(key);
    }
    return true;
  }
  void extend(const std::string& key, const Extends& extends) {
    if (answer(key) != Answer::kMiss) order.extend(key, present(extends));
  }
  void pin(const std::string& key) {
    if (held.at(key).num_pins++ == 0) order.untrack(key);
  }
  bool unpin(const std::string& key) {
    const auto found = held.find(key);
    if (found == held.end() || found->second.num_pins == 0) return false;
    if (--found->second.num_pins > 0) return true;
    if (found->second.state == KeyState::kCommitted) {
      order.track(key);
    } else {
      forget(key);
    }
    return true;
  }
  void forget_all() {
    const std::uint64_t count = num_keys();
    for (const std::string& key : order.free) held.erase(key);
    order.forget_all();
    for (auto& [key, one] : held) {
      one.state = one.num_pins > 0 ? KeyState::kDoomedRead : KeyState::kDoomedWrite;
    }
    generation += count;
    tally.invalidations += count;
    is_any = true;
    changed.clear();
  }
};

class Session {
 public:
  explicit Session(Choices& choices)
      : choices_(choices), options_(some_options()), ledger_(options_), model_(options_) {
    max_changed_ = choices_.one_in(2) ? 10'000 : 5;
    ledger_.watch(max_changed_);
    // Including long keys that do not fit into an entry.
    for (std::size_t number = 0; number < 1 + choices_.below(60); ++number) {
      const std::size_t lengths[] = {48, 48, 1, 49, 200, 32};
      keys_.push_back(std::string(lengths[number % 6] - 1, 'k') + static_cast<char>('0' + number));
    }
  }

  void run() {
    for (std::size_t step = 0; step < kMaxSteps && !choices_.is_used_up(); ++step) {
      do_something();
      check();
    }
  }

 private:
  LedgerOptions some_options() {
    const std::uint64_t granule_bytes = choices_.between(1, 40);
    const auto num_granules = static_cast<std::uint32_t>(choices_.one_in(3) ? choices_.between(1, 300) : 20);
    const auto max_keys = choices_.one_in(3) ? static_cast<std::uint32_t>(choices_.between(1, 20)) : num_granules;
    const std::uint32_t few_keys = choices_.one_in(2) ? 0 : 256;
    return {num_granules, granule_bytes, max_keys, choices_.below(1000), few_keys};
  }

  const std::string& some_key() { return keys_[choices_.below(keys_.size())]; }
  // Sometimes more keys than are processed in one step.
  std::vector<Key> some_keys() {
    const std::size_t count = choices_.one_in(8) ? 40 + choices_.below(40) : choices_.below(6);
    std::vector<Key> keys;
    for (std::size_t key = 0; key < count; ++key) keys.push_back(some_key());
    return keys;
  }
  // For each key, candidates that it may extend.
  std::vector<Extends> some_extends(std::size_t count) {
    std::vector<Extends> extends(count);
    for (Extends& each : extends) {
      if (choices_.one_in(2)) each.first = some_key();
      if (choices_.one_in(2)) each.second = some_key();
    }
    return extends;
  }
  // Mostly valid keys. Copies, because the model may remove them.
  template <class Fits>
  std::vector<std::string> some_that(Fits&& fits) {
    std::vector<std::string> keys;
    if (choices_.one_in(5)) {
      for (const Key key : some_keys()) keys.emplace_back(key);
      return keys;
    }
    for (const auto& [key, held] : model_.held) {
      if (fits(held) && !choices_.one_in(3)) keys.push_back(key);
    }
    if (keys.size() > 1) std::swap(keys.front(), keys[choices_.below(keys.size())]);
    return keys;
  }
  static bool is_written(const Held& held) {
    return held.state == KeyState::kReserved || held.state == KeyState::kDoomedWrite;
  }

  void do_something() {
    ledger_.begin_call();
    ++model_.order.now;
    switch (choices_.below(12)) {
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
        return invalidate();
      case 7:
        return use();
      case 8:
        return pin();
      case 9:
        return unpin();
      case 10:
        return ask();
      default:
        return end();
    }
  }

  void reserve() {
    const std::vector<Key> keys = some_keys();
    std::vector<std::uint64_t> num_bytes;
    for (std::size_t key = 0; key < keys.size(); ++key) {
      const std::uint64_t granules = choices_.one_in(20) ? options_.num_granules + 2 : 5;
      num_bytes.push_back(1 + choices_.below(granules * options_.granule_bytes));
    }
    const std::vector<Extends> extends = some_extends(keys.size());
    std::vector<Refusal> refusals(keys.size());
    Places places;
    ledger_.reserve_all(keys, num_bytes.data(), extends.data(), refusals.data(), places);
    std::size_t begin = 0;
    std::size_t taken = 0;
    for (std::size_t key = 0; key < keys.size(); ++key) {
      const std::string name(keys[key]);
      expect(model_.reserve(name, num_bytes[key], extends[key]) == refusals[key],
             "a reservation has the result of the model");
      if (refusals[key] != Refusal::kNone) continue;
      std::vector<Extent> extents(places.extents.begin() + static_cast<std::ptrdiff_t>(begin),
                                  places.extents.begin() + static_cast<std::ptrdiff_t>(places.ends[taken]));
      begin = places.ends[taken++];
      std::uint64_t sum = 0;
      for (const Extent& extent : extents) sum += extent.num_bytes;
      expect(sum == num_bytes[key], "a slot has the requested size");
      // Chunks that a later reservation evicted are skipped.
      if (model_.held.count(name) > 0) model_.held[name].extents = extents;
    }
    expect(taken == places.ends.size(), "a place for each reservation");
  }

  void commit() {
    const std::vector<std::string> names = some_that(is_written);
    const std::vector<Key> keys(names.begin(), names.end());
    const auto are_offered = std::make_unique<bool[]>(keys.size() + 1);
    const std::size_t done = ledger_.commit_all(keys, are_offered.get());
    for (std::size_t key = 0; key < keys.size(); ++key) {
      bool is_offered = false;
      const bool is_fit = model_.commit(std::string(keys[key]), is_offered);
      expect(is_fit == (key < done), "a commit is valid as in the model");
      if (!is_fit) return;
      expect(is_offered == are_offered[key], "a committed key is offered as in the model");
    }
  }

  void abort() {
    const std::vector<std::string> names = some_that(is_written);
    const std::vector<Key> keys(names.begin(), names.end());
    const std::size_t done = ledger_.abort_all(keys);
    for (std::size_t key = 0; key < keys.size(); ++key) {
      const bool is_fit = model_.abort(std::string(keys[key]));
      expect(is_fit == (key < done), "an abort is valid as in the model");
      if (!is_fit) return;
    }
  }

  void invalidate() {
    std::size_t count = 0;
    const std::vector<Key> keys = some_keys();
    for (const Key key : keys) count += model_.invalidate(std::string(key));
    expect(ledger_.invalidate_all(keys) == count, "as many keys are invalidated as in the model");
  }

  void use() {
    const std::vector<Key> keys = some_keys();
    if (choices_.one_in(2)) {
      const std::vector<Extends> extends = some_extends(keys.size());
      for (std::size_t key = 0; key < keys.size(); ++key) model_.extend(std::string(keys[key]), extends[key]);
      ledger_.extend(keys, extends);
    }
    for (const Key key : keys) model_.order.use(std::string(key));
    ledger_.touch(keys);
  }

  void pin() {
    const auto names = some_that([](const Held& held) { return held.state == KeyState::kCommitted; });
    const std::vector<Key> keys(names.begin(), names.end());
    std::vector<std::uint32_t> found(keys.size());
    const bool are_all = std::all_of(keys.begin(), keys.end(), [this](Key key) {
      return model_.answer(std::string(key)) == Answer::kHit;
    });
    expect(ledger_.find_committed(keys, found.data()) == are_all, "all keys are hits exactly if they are in the model");
    if (!are_all) return;
    Places places;
    ledger_.pin_found(found, places);
    std::size_t begin = 0;
    for (std::size_t key = 0; key < keys.size(); ++key) {
      model_.pin(std::string(keys[key]));
      expect_extents(std::string(keys[key]), places, begin, places.ends[key]);
      begin = places.ends[key];
    }
  }

  void unpin() {
    const std::vector<std::string> names = some_that([](const Held& held) { return held.num_pins > 0; });
    const std::vector<Key> keys(names.begin(), names.end());
    const std::size_t done = ledger_.unpin_all(keys);
    for (std::size_t key = 0; key < keys.size(); ++key) {
      const bool is_fit = model_.unpin(std::string(keys[key]));
      expect(is_fit == (key < done), "an unpin is valid as in the model");
      if (!is_fit) return;
    }
  }

  void ask() {
    const std::vector<Key> keys = some_keys();
    std::size_t num_leading = 0;
    std::optional<std::size_t> last;
    bool is_pending = false;
    for (std::size_t key = 0; key < keys.size(); ++key) {
      const Answer answer = model_.answer(std::string(keys[key]));
      if (num_leading == key && answer != Answer::kMiss) ++num_leading;
      if (answer != Answer::kMiss) last = key;
      is_pending = is_pending || answer == Answer::kPending;
    }
    expect(ledger_.leading(keys) == num_leading, "the leading hits are those of the model");
    expect(ledger_.last_held(keys) == last, "the last held key is that of the model");
    expect(ledger_.any_pending(keys) == is_pending, "pending keys as in the model");
  }

  void end() {
    if (choices_.one_in(3)) {
      check_changes();
      check_tally();
    }
    if (!choices_.one_in(6)) return;
    const std::uint64_t count = model_.num_keys();
    if (choices_.one_in(10)) {
      model_.is_closed = true;
      ledger_.close();
    } else {
      expect(ledger_.forget_all() == count, "as many keys are forgotten as in the model");
    }
    model_.forget_all();
  }

  void check_changes() {
    const Changes changes = ledger_.take_changes();
    if (model_.is_any || model_.changed.size() > max_changed_) {
      expect(changes.is_any && changes.keys.empty(), "any key may have changed");
    } else {
      expect(!changes.is_any && std::set<std::string>(changes.keys.begin(), changes.keys.end()) == model_.changed,
             "the changed keys are those of the model");
    }
    model_.changed.clear();
    model_.is_any = false;
  }

  void check_tally() {
    const Tally told = ledger_.take_tally();
    const Tally wanted = std::exchange(model_.tally, {});
    expect(told.reservations == wanted.reservations && told.commits == wanted.commits && told.aborts == wanted.aborts &&
               told.invalidations == wanted.invalidations && told.evictions == wanted.evictions &&
               told.evicted_units == wanted.evicted_units &&
               std::equal(std::begin(told.refusals), std::end(told.refusals), std::begin(wanted.refusals)),
           "the counters are those of the model");
  }

  void expect_extents(const std::string& key, const Places& places, std::size_t begin, std::size_t end) {
    const std::vector<Extent>& wanted = model_.held.at(key).extents;
    expect(wanted.size() == end - begin && std::equal(wanted.begin(), wanted.end(),
                                                      places.extents.begin() + static_cast<std::ptrdiff_t>(begin),
                                                      [](const Extent& a, const Extent& b) {
                                                        return a.offset == b.offset && a.num_bytes == b.num_bytes;
                                                      }),
           "a chunk is at its reserved place");
  }

  void check() {
    const std::uint64_t used = model_.used();
    expect(ledger_.used_bytes() == used * options_.granule_bytes && used <= options_.num_granules,
           "the used bytes are those of the model");
    expect(ledger_.num_keys() == model_.num_keys() && ledger_.generation() == model_.generation,
           "the number of keys is that of the model");
    expect(ledger_.num_reserved() + ledger_.num_pinned() == model_.in_use(),
           "the number of keys in use is that of the model");
    const std::string& key = some_key();
    expect(ledger_.answer(key) == model_.answer(key), "a key has the answer of the model");
    Places places;
    const bool is_hit = ledger_.find(key, places);
    expect(is_hit == (model_.answer(key) == Answer::kHit), "a key is found exactly if it is a hit");
    if (is_hit) expect_extents(key, places, 0, places.extents.size());
    if (!choices_.one_in(8)) return;
    expect(ledger_.eviction_order() == model_.order.order(), "the eviction order is that of the model");
    std::vector<bool> is_taken(options_.num_granules);
    for (const auto& [name, one] : model_.held) {
      for (const Extent& extent : one.extents) {
        expect(extent.offset % options_.granule_bytes == 0, "an extent begins with a granule");
        for (std::uint64_t byte = 0; byte < extent.num_bytes; byte += options_.granule_bytes) {
          const std::uint64_t granule = (extent.offset + byte) / options_.granule_bytes;
          expect(granule < options_.num_granules && !is_taken[granule], "a granule belongs to one chunk");
          is_taken[granule] = true;
        }
      }
    }
  }

  Choices& choices_;
  LedgerOptions options_;
  Ledger ledger_;
  Model model_;
  std::vector<std::string> keys_;
  std::size_t max_changed_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Choices choices(data, size);
  Session(choices).run();
  return 0;
}
