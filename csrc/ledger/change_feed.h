// Keys with changed lookup answers, for one reader. The same as ChangeFeed of tests/kits/plain_ledger.py.
#ifndef HYBRIDKV_LEDGER_CHANGE_FEED_H_
#define HYBRIDKV_LEDGER_CHANGE_FEED_H_

#include <cstddef>
#include <string>
#include <unordered_set>
#include <utility>

#include "csrc/ledger/key_table.h"

namespace hybridkv::ledger {

struct Changes {
  std::unordered_set<std::string> keys;
  bool is_any = false;  // any key may have changed
};

class ChangeFeed {
 public:
  // Starts the feed. It names at most `max_keys` keys; with more it reports that any key may have changed.
  void watch(std::size_t max_keys) {
    if (is_on_) return;
    is_on_ = true;
    max_keys_ = max_keys;
  }
  void add(Key key) {
    if (!is_on_ || changes_.is_any) return;
    changes_.keys.emplace(key);
    if (changes_.keys.size() > max_keys_) add_all();
  }
  void add_all() {
    if (is_on_) changes_ = {{}, true};
  }
  Changes take() { return std::exchange(changes_, {}); }

 private:
  bool is_on_ = false;
  std::size_t max_keys_ = 0;
  Changes changes_;
};

}  // namespace hybridkv::ledger

#endif  // HYBRIDKV_LEDGER_CHANGE_FEED_H_
