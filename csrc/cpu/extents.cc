#include "csrc/cpu/extents.h"

#include <cstdint>

#include "csrc/cpu/copy.h"

namespace hybridkv::cpu {

Digest128 digest(const std::vector<iovec>& extents) {
  std::vector<std::int64_t> addresses;
  std::vector<std::int64_t> sizes;
  for (const iovec& extent : extents) {
    addresses.push_back(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(extent.iov_base)));
    sizes.push_back(static_cast<std::int64_t>(extent.iov_len));
  }
  const auto end = static_cast<std::int64_t>(sizes.size());
  Digest128 found{};
  digest(RunArrays(addresses.data(), nullptr, sizes.data(), sizes.size()), &end, 1, &found, {});
  return found;
}

}  // namespace hybridkv::cpu
