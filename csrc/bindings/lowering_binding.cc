#include "csrc/bindings/lowering_binding.h"

#include <nanobind/ndarray.h>

#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "csrc/bindings/unlocked.h"
#include "csrc/cpu/lowering.h"

namespace hybridkv::bindings {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

// Python's bytes, read in place during the call without a copy.
template <typename T>
std::span<const T> array_of(const nb::bytes& bytes, const char* message) {
  const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
  if (bytes.size() % sizeof(T) != 0 || address % alignof(T) != 0) throw std::invalid_argument(message);
  return {static_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
}

using Array = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

using Words = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableWords = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Words of the elements, which are words or structs of words.
template <typename Element>
Array array_from(std::vector<Element>&& elements) {
  static_assert(sizeof(Element) % sizeof(std::int64_t) == 0);
  auto kept = std::make_unique<std::vector<Element>>(std::move(elements));
  auto* const data = reinterpret_cast<std::int64_t*>(kept->data());
  const std::size_t size = kept->size() * (sizeof(Element) / sizeof(std::int64_t));
  const nb::capsule owner(kept.get(),
                          [](void* pointer) noexcept { delete static_cast<std::vector<Element>*>(pointer); });
  (void)kept.release();
  return Array(data, {size}, owner);
}

cpu::BlockPages pages_of(const nb::bytes& columns, std::int64_t block_bytes, std::int64_t num_blocks) {
  const auto rows = array_of<cpu::PageColumn>(columns, "columns: expected rows of four words");
  return {{rows.begin(), rows.end()}, block_bytes, num_blocks};
}

void add_group(cpu::Lowering& lowering, std::int32_t group_index, std::int64_t block_tokens, const nb::bytes& columns,
               std::int64_t block_bytes, std::int64_t num_blocks) {
  cpu::BlockPages pages = pages_of(columns, block_bytes, num_blocks);
  const Unlocked unlocked;
  lowering.add_group(group_index, block_tokens, std::move(pages));
}

void add_part(cpu::Lowering& lowering, std::int32_t group_index, std::int64_t start, std::int64_t end,
              const nb::bytes& columns, std::int64_t block_bytes, std::int64_t num_blocks) {
  cpu::BlockPages pages = pages_of(columns, block_bytes, num_blocks);
  const Unlocked unlocked;
  lowering.add_part(group_index, start, end, std::move(pages));
}

// Rows of six words: `CopyRow`.
std::span<const CopyRow> rows_of(const Words& words) {
  constexpr std::size_t kWords = sizeof(CopyRow) / sizeof(std::int64_t);
  if (words.size() % kWords != 0) throw std::invalid_argument("rows: expected rows of six words");
  return {reinterpret_cast<const CopyRow*>(words.data()), words.size() / kWords};
}

// True if two arrays share memory.
bool overlap(std::span<const std::int64_t> one, std::span<const std::int64_t> other) {
  const std::less<const std::int64_t*> before;
  return before(one.data(), other.data() + other.size()) && before(other.data(), one.data() + one.size());
}

void expand_rows(const Words& words, const WritableWords& sources, const WritableWords& destinations,
                 const WritableWords& num_bytes) {
  const std::span<const CopyRow> rows = rows_of(words);
  const std::size_t num_runs = sources.size();
  if (destinations.size() != num_runs || num_bytes.size() != num_runs) {
    throw std::invalid_argument("sources, destinations, num_bytes: expected arrays of one length");
  }
  // Otherwise a write could change the counts that are checked below.
  const std::span<const std::int64_t> arrays[] = {{words.data(), words.size()},
                                                  {sources.data(), num_runs},
                                                  {destinations.data(), num_runs},
                                                  {num_bytes.data(), num_runs}};
  for (std::size_t one = 0; one < std::size(arrays); ++one) {
    for (std::size_t other = 0; other < one; ++other) {
      if (overlap(arrays[one], arrays[other])) {
        throw std::invalid_argument("rows, sources, destinations, num_bytes: expected arrays that do not overlap");
      }
    }
  }
  std::size_t counted = 0;
  for (const CopyRow& row : rows) {
    if (row.num_runs < 1 || static_cast<std::size_t>(row.num_runs) > num_runs - counted) {
      throw std::invalid_argument("rows: expected as many runs as the arrays have elements");
    }
    counted += static_cast<std::size_t>(row.num_runs);
  }
  if (counted != num_runs) throw std::invalid_argument("rows: expected as many runs as the arrays have elements");
  const Unlocked unlocked;
  cpu::expand(rows, sources.data(), destinations.data(), num_bytes.data());
}

nb::tuple lower(const cpu::Lowering& lowering, bool is_store, const nb::bytes& shapes, const nb::bytes& block_ids,
                const nb::bytes& local_ids, const nb::bytes& extents) {
  const cpu::CopyTable table{array_of<cpu::CopyShape>(shapes, "shapes: expected rows of ten half words"),
                             array_of<std::int32_t>(block_ids, "block_ids: expected half words"),
                             array_of<std::int32_t>(local_ids, "local_ids: expected half words"),
                             array_of<cpu::SlotExtent>(extents, "extents: expected rows of two words")};
  cpu::LoweredRuns runs;
  {
    const Unlocked unlocked;
    runs = is_store ? lowering.store(table) : lowering.load(table);
  }
  return nb::make_tuple(array_from(std::move(runs.rows)), runs.num_runs, runs.total_bytes,
                        nb::make_tuple(runs.sources.begin, runs.sources.end, runs.destinations.begin,
                                       runs.destinations.end),
                        array_from(std::move(runs.ends)), runs.zero_bytes);
}

}  // namespace

void bind_lowering(nb::module_& module) {
  module.def("expand_rows", &expand_rows, "rows"_a.noconvert(), "sources"_a.noconvert(), "destinations"_a.noconvert(),
             "num_bytes"_a.noconvert());
  nb::class_<cpu::Lowering>(module, "Lowering")
      .def(nb::init<std::int64_t, std::int64_t, std::int64_t, std::int64_t>(), "arena_address"_a, "arena_bytes"_a,
           "zeros_address"_a, "zeros_bytes"_a)
      .def("add_group", &add_group, "group_index"_a, "block_tokens"_a, "columns"_a, "block_bytes"_a, "num_blocks"_a)
      .def("add_part", &add_part, "group_index"_a, "start"_a, "end"_a, "columns"_a, "block_bytes"_a, "num_blocks"_a)
      .def("lower", &lower, "is_store"_a, "shapes"_a, "block_ids"_a, "local_ids"_a, "extents"_a);
}

}  // namespace hybridkv::bindings
