// A second implementation of the eviction order, with plain lists that are searched. Ignores sizes and states.
#ifndef HYBRIDKV_TESTS_LEAF_ORDER_H_
#define HYBRIDKV_TESTS_LEAF_ORDER_H_

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace hybridkv::testing {

struct LeafOrder {
  std::map<std::string, std::string> extends;
  std::set<std::string> free;        // committed and not pinned
  std::vector<std::string> leaves;   // those without an extension, next one to evict first
  std::map<std::string, int> last_use;
  int now = 0;

  std::size_t num_extensions(const std::string& key) const {
    return static_cast<std::size_t>(
        std::count_if(extends.begin(), extends.end(), [&](const auto& each) { return each.second == key; }));
  }
  // `extended` is present, or empty.
  void extend(const std::string& key, const std::string& extended) {
    if (extended.empty() || extends.count(key) > 0) return;
    for (std::string above = extended; !above.empty(); above = extends.count(above) > 0 ? extends.at(above) : "") {
      if (above == key) return;
    }
    extends[key] = extended;
    std::erase(leaves, extended);
  }
  void track(const std::string& key) {
    free.insert(key);
    last_use[key] = now;
    if (num_extensions(key) == 0) leaves.push_back(key);
  }
  void untrack(const std::string& key) {
    free.erase(key);
    std::erase(leaves, key);
  }
  void use(const std::string& key) {
    if (std::erase(leaves, key) > 0) leaves.push_back(key);
    if (free.count(key) > 0) last_use[key] = now;
  }
  // Called when a key is removed.
  void forget(const std::string& key) {
    untrack(key);
    const std::string extended = extends.count(key) > 0 ? extends.at(key) : "";
    extends.erase(key);
    for (auto each = extends.begin(); each != extends.end();) {
      if (each->second == key && extended.empty()) {
        each = extends.erase(each);
      } else {
        if (each->second == key) each->second = extended;
        ++each;
      }
    }
    if (free.count(extended) > 0 && num_extensions(extended) == 0) {
      leaves.insert(last_use[extended] > last_use[key] ? leaves.end() : leaves.begin(), extended);
    }
  }
  void forget_all() {
    extends.clear();
    free.clear();
    leaves.clear();
    last_use.clear();
  }
  // Evictable keys in order, without `kept` and the keys that it extends.
  std::vector<std::string> order(const std::string& kept = "") const {
    std::vector<std::string> keys;
    std::map<std::string, std::size_t> num_left;
    std::vector<std::string> queue = leaves;
    for (std::size_t at = 0; at < queue.size(); ++at) {
      for (std::string key = queue[at]; key != kept;) {
        keys.push_back(key);
        if (extends.count(key) == 0) break;
        const std::string extended = extends.at(key);
        if (num_left.count(extended) == 0) num_left[extended] = num_extensions(extended);
        if (--num_left[extended] > 0 || free.count(extended) == 0) break;
        if (last_use.at(extended) > last_use.at(key)) {
          queue.push_back(extended);
          break;
        }
        key = extended;
      }
    }
    return keys;
  }
};

}  // namespace hybridkv::testing

#endif  // HYBRIDKV_TESTS_LEAF_ORDER_H_
