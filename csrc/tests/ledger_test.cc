// The parts of a ledger: keys with equal tags are distinct, each granule is allocated once, unused memory costs nothing
// and is freed. Random sequences of calls are in ledger_fuzz.cc.
#include "csrc/ledger/ledger.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <sys/resource.h>
#include <unistd.h>

#include "csrc/ledger/granules.h"
#include "csrc/ledger/key_table.h"
#include "csrc/tests/expect.h"

namespace {

using hybridkv::ledger::Answer;
using hybridkv::ledger::Granules;
using hybridkv::ledger::Key;
using hybridkv::ledger::KeyState;
using hybridkv::ledger::KeyTable;
using hybridkv::ledger::kNone;
using hybridkv::ledger::Ledger;
using hybridkv::ledger::Places;
using hybridkv::ledger::Refusal;
using hybridkv::ledger::Run;
using hybridkv::testing::expect;
using hybridkv::testing::Noise;

constexpr std::uint64_t kSeed = 7;

std::string key_of(std::uint64_t number, std::size_t num_bytes = 48) {
  Noise noise(number);
  std::string key(num_bytes, '\0');
  for (char& byte : key) byte = static_cast<char>(noise.next() >> 32);
  const std::string digits = std::to_string(number);
  key.replace(0, std::min(digits.size(), num_bytes), digits);
  return key;
}

// Two keys with the same tag.
std::pair<std::string, std::string> keys_of_one_tag(const KeyTable& table) {
  std::vector<std::pair<std::uint32_t, std::uint64_t>> tags;
  for (std::uint64_t number = 0;; ++number) {
    tags.emplace_back(table.tag_of(key_of(number)), number);
    if (tags.size() % 100'000 != 0) continue;
    std::sort(tags.begin(), tags.end());
    for (std::size_t at = 1; at < tags.size(); ++at) {
      if (tags[at].first == tags[at - 1].first) return {key_of(tags[at - 1].second), key_of(tags[at].second)};
    }
  }
}

std::uint32_t insert(KeyTable& table, const std::string& key) {
  const std::uint32_t index = table.insert(key, table.tag_of(key));
  table[index].state = KeyState::kReserved;
  return index;
}

void test_keys_with_equal_tags_are_distinct() {
  KeyTable table(8, kSeed);
  const auto [one, other] = keys_of_one_tag(table);
  expect(table.tag_of(one) == table.tag_of(other) && one != other, "two keys have one tag");
  const std::uint32_t first = insert(table, one);
  expect(table.find(other) == kNone, "a key is not found by its tag alone");
  const std::uint32_t second = insert(table, other);
  expect(table.find(one) == first && table.find(other) == second, "both are found");
  const std::vector<Key> keys{other, one, "unknown"};
  std::vector<std::uint32_t> found;
  table.each(keys, [&](std::size_t, std::uint32_t index) {
    found.push_back(index);
    return true;
  });
  expect(found == std::vector<std::uint32_t>{second, first, kNone}, "a lookup of many keys finds both");
  table.erase(first);
  expect(table.find(one) == kNone && table.find(other) == second, "only one of them is erased");
}

void test_keys_chosen_without_the_seed_have_different_tags() {
  // If one factor is zero, the product is zero for every other factor.
  constexpr std::uint64_t kFactors[] = {0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9};
  const KeyTable table(8, kSeed);
  for (const std::uint64_t factor : kFactors) {
    for (std::size_t place = 0; place < 48; place += sizeof factor) {
      std::vector<std::uint32_t> tags;
      for (std::uint64_t number = 0; number < 100; ++number) {
        std::string key = key_of(number);
        std::memcpy(key.data() + place, &factor, sizeof factor);
        tags.push_back(table.tag_of(key));
      }
      std::sort(tags.begin(), tags.end());
      const auto num_tags = std::unique(tags.begin(), tags.end()) - tags.begin();
      expect(num_tags > 90, "keys that share a word have different tags");
    }
  }
}

void test_a_key_may_be_any_bytes_of_any_length() {
  const std::size_t lengths[] = {0, 1, 7, 8, 15, 16, 17, 32, 47, 48, 49, 64, 255, 256, 300};
  KeyTable table(64, kSeed);
  std::vector<std::string> keys;
  for (const std::size_t length : lengths) keys.push_back(key_of(length, length));
  keys.push_back(std::string(5, '\0'));
  keys.push_back(std::string(6, '\0'));
  std::vector<std::uint32_t> indices;
  for (const std::string& key : keys) indices.push_back(insert(table, key));
  for (std::size_t at = 0; at < keys.size(); ++at) {
    expect(table.find(keys[at]) == indices[at], "a key is found");
    expect(table.key_of(indices[at]) == keys[at], "the table returns the key");
    expect(keys[at].empty() || table.find(keys[at].substr(1) + "x") == kNone, "another key is not found");
  }
  for (std::size_t at = 0; at < keys.size(); at += 2) table.erase(indices[at]);
  for (std::size_t at = 0; at < keys.size(); ++at) {
    expect(table.find(keys[at]) == (at % 2 == 0 ? kNone : indices[at]), "erased keys are not found, all others are");
  }
}

void test_a_full_table_finds_all_its_keys_after_erasures() {
  constexpr std::uint32_t kMaxKeys = 1000;
  KeyTable table(kMaxKeys, kSeed);
  Noise noise(3);
  std::vector<std::string> held;
  std::uint64_t next = 0;
  for (int step = 0; step < 40'000; ++step) {
    if (held.size() < kMaxKeys && (held.empty() || noise.below(100) < 60)) {
      held.push_back(key_of(next++));
      insert(table, held.back());
    } else {
      std::swap(held[noise.below(held.size())], held.back());
      table.erase(table.find(held.back()));
      expect(table.find(held.back()) == kNone, "an erased key is not found");
      held.pop_back();
    }
    if (step % 500 != 0) continue;
    expect(table.size() == held.size(), "the table counts its keys");
    for (const std::string& key : held) {
      const std::uint32_t index = table.find(key);
      expect(index < kMaxKeys && table.key_of(index) == key, "every held key is found");
    }
  }
}

void test_granules_are_allocated_once_in_runs_that_are_not_adjacent() {
  for (const std::uint32_t count : {1u, 63u, 64u, 65u, 4096u, 4097u, 300'000u}) {
    Granules granules(count);
    Noise noise(count);
    std::vector<std::vector<Run>> taken;
    std::vector<bool> is_taken(count);
    std::uint64_t num_free = count;
    for (int step = 0; step < 3000; ++step) {
      const std::uint64_t most = std::min<std::uint64_t>(num_free, noise.below(2) == 0 ? 20 : count);
      if (most > 0 && noise.below(5) < 3) {
        std::vector<Run> runs;
        const auto wanted = static_cast<std::uint32_t>(1 + noise.below(most));
        granules.take(wanted, runs);
        std::uint64_t end = 0;
        std::uint64_t sum = 0;
        for (std::size_t run = 0; run < runs.size(); ++run) {
          expect(run == 0 || runs[run].first > end, "runs are in order and not adjacent");
          end = std::uint64_t{runs[run].first} + runs[run].count;
          expect(runs[run].count > 0 && end <= count, "a run lies in the arena");
          sum += runs[run].count;
          for (std::uint64_t granule = runs[run].first; granule < end; ++granule) {
            expect(!is_taken[granule], "an allocated granule was free");
            is_taken[granule] = true;
          }
        }
        expect(sum == wanted, "an allocation has the requested size");
        num_free -= sum;
        taken.push_back(runs);
      } else if (!taken.empty()) {
        std::swap(taken[noise.below(taken.size())], taken.back());
        for (const Run& run : taken.back()) {
          granules.free(run);
          num_free += run.count;
          for (std::uint32_t granule = run.first; granule < run.first + run.count; ++granule) is_taken[granule] = false;
        }
        taken.pop_back();
      }
    }
    for (std::uint32_t granule = 0; granule < count; ++granule) {
      expect(granules.is_taken(granule) == is_taken[granule], "the bitmap equals the model");
    }
  }
}

void test_an_allocation_prefers_few_runs() {
  Granules granules(100'000);
  std::vector<Run> runs;
  granules.take(100'000, runs);
  for (std::uint32_t hole = 0; hole < 50; ++hole) granules.free({hole * 20, 1 + hole % 3});
  granules.free({50'000, 40});
  granules.free({60'000, 32});
  granules.free({2'000, 1});
  granules.take(32, runs);
  expect(runs.size() == 1 && runs[0].first == 60'000, "a hole that fits is taken whole");
  granules.take(41, runs);
  expect(runs.size() == 2 && runs[1].first == 50'000, "if no hole is large enough, the largest are taken");
}

void test_the_hole_freed_last_is_used_first() {
  Granules granules(1 << 20);
  std::vector<Run> runs;
  for (int turn = 0; turn < 1000; ++turn) granules.take(32, runs);
  granules.free({320, 32});
  granules.free({288, 32});
  granules.take(64, runs);
  expect(runs.size() == 1 && runs[0].first == 288 && runs[0].count == 64, "a hole is used from its beginning");
}

[[maybe_unused]] std::uint64_t resident_bytes() {
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  unsigned long long all = 0;
  unsigned long long resident = 0;
  const int num_read = file == nullptr ? 0 : std::fscanf(file, "%llu %llu", &all, &resident);
  if (file != nullptr) std::fclose(file);
  expect(num_read == 2, "the resident size can be read");
  return resident * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

void fill(Ledger& ledger, std::uint32_t count, std::uint64_t num_bytes) {
  for (std::uint32_t number = 0; number < count; ++number) {
    const std::string key = key_of(number);
    const Key view = key;
    Places places;
    bool is_offered = false;
    expect(ledger.reserve(view, num_bytes, {}, places) == Refusal::kNone, "there is room");
    expect(ledger.commit_all({&view, 1}, &is_offered) == 1 && is_offered, "a committed key is offered");
  }
}

// Not with a sanitizer: its shadow memory would be counted too.
void test_unused_tables_have_no_memory_and_an_entry_has_at_most_116_bytes() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  constexpr std::uint32_t kCount = 200'000;
  const std::uint64_t before = resident_bytes();
  Ledger ledger({kCount * 16, 4096, kCount, kSeed});
  const std::uint64_t made = resident_bytes();
  expect(made - before < 1 << 20, "a new ledger has less than 1 MiB of memory");
  fill(ledger, kCount, 16 * 4096);
  const std::uint64_t full = resident_bytes();
  expect(ledger.num_keys() == kCount, "all keys are held");
  expect(full - before <= 116 * std::uint64_t{kCount}, "an entry takes at most 116 bytes in total");
  expect(ledger.most_bytes() <= 116 * std::uint64_t{kCount}, "most_bytes reports the same");
  expect(ledger.forget_all() == kCount && ledger.num_keys() == 0, "all keys are forgotten");
  expect(ledger.leftover_bytes() > 80 * std::uint64_t{kCount}, "the memory is freed later");
  fill(ledger, 1000, 16 * 4096);
  expect(ledger.leftover_bytes() == 0 && resident_bytes() < before + 64 * std::uint64_t{kCount},
         "later reservations free the memory");
#endif
}

void test_many_calls_of_forget_all_leave_little_memory() {
  Ledger ledger({1 << 16, 4096, 1 << 16, kSeed});
  for (int turn = 0; turn < 500; ++turn) {
    fill(ledger, 1, 4096);
    ledger.forget_all();
  }
  expect(ledger.leftover_bytes() < std::uint64_t{64} << 20, "the memory that is not freed yet is bounded");
}

void test_forget_all_frees_little_memory_at_once() {
  constexpr std::uint32_t kCount = 100'000;
  for (const std::uint32_t num_stored : {0u, 1u, 40u}) {
    Ledger ledger({kCount, 4096, kCount, kSeed});
    fill(ledger, kCount, 4096);
    ledger.forget_all();
    for (int turn = 0; turn < 100; ++turn) {
      fill(ledger, num_stored, 4096);
      const std::uint64_t left = ledger.leftover_bytes();
      ledger.forget_all();
      expect(ledger.leftover_bytes() >= left, "reservations free the old memory");
    }
  }
}

// Not with a sanitizer: it reserves addresses itself.
void test_forget_all_needs_no_memory() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  constexpr std::uint32_t kCount = 200'000;
  Ledger ledger({kCount, 4096, kCount, kSeed});
  ledger.watch(10);
  fill(ledger, 1000, 4096);
  Places places;
  expect(ledger.reserve("written", 4096, {}, places) == Refusal::kNone, "there is room");
  const std::string read = key_of(0);
  const std::vector<Key> keys{read};
  std::uint32_t found[1];
  expect(ledger.find_committed(keys, found), "the key is a hit");
  ledger.pin_found(found, places);
  rlimit before{};
  getrlimit(RLIMIT_AS, &before);
  const rlimit none{1 << 20, before.rlim_max};
  setrlimit(RLIMIT_AS, &none);
  const std::uint64_t count = ledger.forget_all();
  setrlimit(RLIMIT_AS, &before);
  expect(count == 1001 && ledger.num_keys() == 0 && ledger.used_bytes() == 2 * 4096, "all keys are invalidated");
  expect(ledger.state("written") == KeyState::kDoomedWrite && ledger.state(read) == KeyState::kDoomedRead,
         "keys that are written or read stay until their last use");
  expect(ledger.take_changes().is_any && ledger.eviction_order().empty(), "any key may have changed");
  expect(ledger.unpin_all(keys) == 1 && ledger.used_bytes() == 4096, "an unpin frees its key");
  fill(ledger, kCount - 1, 4096);
  expect(ledger.num_keys() == kCount - 1, "all other granules are free");
#endif
}

void test_a_chunk_in_pieces_has_its_requested_size() {
  Ledger ledger({8, 100, 8, kSeed});
  fill(ledger, 8, 100);
  for (const std::uint32_t number : {1u, 3u, 4u, 6u}) {
    const std::string key = key_of(number);
    const Key view = key;
    ledger.invalidate_all({&view, 1});
  }
  Places places;
  expect(ledger.reserve("in pieces", 350, {}, places) == Refusal::kNone, "a chunk can use separate free granules");
  expect(places.ends == std::vector<std::size_t>{3} && places.extents.size() == 3, "the chunk has three runs");
  std::uint64_t num_bytes = 0;
  for (const auto& extent : places.extents) num_bytes += extent.num_bytes;
  expect(num_bytes == 350 && places.extents[1].offset == 300 && places.extents[1].num_bytes == 200,
         "the runs have 350 bytes");
}

void test_the_number_of_keys_may_be_limited() {
  Ledger ledger({100, 10, 2, kSeed});
  fill(ledger, 3, 10);
  expect(ledger.num_keys() == 2 && ledger.answer(key_of(0)) == Answer::kMiss, "the first one was evicted");
  const std::string one = key_of(1);
  const std::string two = key_of(2);
  const std::vector<Key> keys{one, two};
  std::uint32_t found[2];
  Places places;
  expect(ledger.find_committed(keys, found), "the others were not evicted");
  ledger.pin_found(found, places);
  expect(ledger.reserve("more", 1, {}, places) == Refusal::kNoRoom, "pinned keys are not evicted");
}

}  // namespace

int main() {
  test_keys_with_equal_tags_are_distinct();
  test_keys_chosen_without_the_seed_have_different_tags();
  test_a_key_may_be_any_bytes_of_any_length();
  test_a_full_table_finds_all_its_keys_after_erasures();
  test_granules_are_allocated_once_in_runs_that_are_not_adjacent();
  test_an_allocation_prefers_few_runs();
  test_the_hole_freed_last_is_used_first();
  test_unused_tables_have_no_memory_and_an_entry_has_at_most_116_bytes();
  test_many_calls_of_forget_all_leave_little_memory();
  test_forget_all_frees_little_memory_at_once();
  test_forget_all_needs_no_memory();
  test_a_chunk_in_pieces_has_its_requested_size();
  test_the_number_of_keys_may_be_limited();
  return 0;
}
