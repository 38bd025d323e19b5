// Runs of memory in the form that system calls take.
#ifndef HYBRIDKV_CPU_EXTENTS_H_
#define HYBRIDKV_CPU_EXTENTS_H_

#include <sys/uio.h>

#include <vector>

#include "hybridkv/xxh3.h"

namespace hybridkv::cpu {

// XXH3-128 of the joined bytes of `extents`.
Digest128 digest(const std::vector<iovec>& extents);

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_EXTENTS_H_
