// Reference of all copy kernels: copies byte by byte, in order. For tests, on any device.
#ifndef HYBRIDKV_REFERENCE_H_
#define HYBRIDKV_REFERENCE_H_

#include <cstddef>
#include <cstdint>

#include "hybridkv/copy_run.h"

namespace hybridkv::reference {

inline void copy(std::uint64_t source, std::uint64_t destination, std::uint64_t num_bytes) {
  const auto* from = reinterpret_cast<const unsigned char*>(source);
  auto* to = reinterpret_cast<unsigned char*>(destination);
  for (std::uint64_t byte = 0; byte < num_bytes; ++byte) to[byte] = from[byte];
}

inline void copy_runs(const CopyRun* runs, std::size_t num_runs) {
  for (std::size_t run = 0; run < num_runs; ++run) copy(runs[run].source, runs[run].destination, runs[run].num_bytes);
}

}  // namespace hybridkv::reference

#endif  // HYBRIDKV_REFERENCE_H_
