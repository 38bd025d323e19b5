// The order of the bytes in a page, against the canonical order.
//
// Engines lay the same page out differently: heads before tokens or tokens before heads, K beside V or K before V. A
// permutation names the dimensions of a page in canonical order, outermost first, and where a step along each leads in
// the engine's page. It moves units of bytes and knows no element type. No copy is done here.
#ifndef HYBRIDKV_PAGE_PERMUTATION_H_
#define HYBRIDKV_PAGE_PERMUTATION_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hybridkv/host_device.h"

namespace hybridkv {

inline constexpr std::uint32_t kMaxPageDimensions = 6;

// Unit (i0, i1, ...) of the page is the unit `(i0 * extents[1] + i1) * extents[2] + ...` of the canonical page, and
// lies `i0 * strides[0] + i1 * strides[1] + ...` bytes into the engine's page. A unit is `unit_bytes` contiguous bytes
// on both sides. Zero dimensions are one unit.
struct PagePermutation {
  std::uint64_t unit_bytes;
  std::uint64_t num_dimensions;  // at most kMaxPageDimensions
  std::uint64_t extents[kMaxPageDimensions];
  std::uint64_t strides[kMaxPageDimensions];  // bytes
};

static_assert(std::is_trivially_copyable_v<PagePermutation> && std::is_standard_layout_v<PagePermutation>);
static_assert(sizeof(PagePermutation) == 112 && alignof(PagePermutation) == 8);
static_assert(offsetof(PagePermutation, extents) == 16);
static_assert(offsetof(PagePermutation, strides) == 64);

HYBRIDKV_HOST_DEVICE constexpr std::uint64_t num_units(const PagePermutation& permutation) {
  std::uint64_t units = 1;
  for (std::uint64_t dimension = 0; dimension < permutation.num_dimensions; ++dimension) {
    units *= permutation.extents[dimension];
  }
  return units;
}

// Bytes of the canonical page.
HYBRIDKV_HOST_DEVICE constexpr std::uint64_t canonical_bytes(const PagePermutation& permutation) {
  return num_units(permutation) * permutation.unit_bytes;
}

// How far into the engine's page unit `unit` of the canonical page lies, in bytes.
HYBRIDKV_HOST_DEVICE constexpr std::uint64_t page_offset(const PagePermutation& permutation, std::uint64_t unit) {
  std::uint64_t offset = 0;
  for (std::uint64_t dimension = permutation.num_dimensions; dimension-- > 0;) {
    const std::uint64_t extent = permutation.extents[dimension];
    offset += unit % extent * permutation.strides[dimension];
    unit /= extent;
  }
  return offset;
}

// The same permutation with units as long and dimensions as few as they can be: neighbours on both sides are joined,
// dimensions of extent 1 go. The copy of a page takes as many steps as it has units.
HYBRIDKV_HOST_DEVICE constexpr PagePermutation simplified(const PagePermutation& permutation) {
  PagePermutation simple{permutation.unit_bytes, 0, {}, {}};
  std::uint64_t kept = permutation.num_dimensions;
  while (kept > 0 && (permutation.extents[kept - 1] == 1 || permutation.strides[kept - 1] == simple.unit_bytes)) {
    simple.unit_bytes *= permutation.extents[kept - 1];
    --kept;
  }
  for (std::uint64_t dimension = 0; dimension < kept; ++dimension) {
    const std::uint64_t extent = permutation.extents[dimension];
    const std::uint64_t stride = permutation.strides[dimension];
    if (extent == 1) continue;
    const std::uint64_t last = simple.num_dimensions - 1;
    if (simple.num_dimensions > 0 && simple.strides[last] == extent * stride) {
      simple.extents[last] *= extent;
      simple.strides[last] = stride;
    } else {
      simple.extents[simple.num_dimensions] = extent;
      simple.strides[simple.num_dimensions] = stride;
      ++simple.num_dimensions;
    }
  }
  return simple;
}

}  // namespace hybridkv

#endif  // HYBRIDKV_PAGE_PERMUTATION_H_
