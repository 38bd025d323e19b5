// Canonical bytes of a digest, as in files and Python's xxhash.
#ifndef HYBRIDKV_CANONICAL_DIGEST_H_
#define HYBRIDKV_CANONICAL_DIGEST_H_

#include "hybridkv/xxh3.h"

namespace hybridkv {

// 16 bytes, big-endian.
inline void write_canonical(const Digest128& digest, unsigned char* to) {
  for (int byte = 0; byte < 8; ++byte) {
    to[byte] = static_cast<unsigned char>(digest.high >> (56 - 8 * byte));
    to[8 + byte] = static_cast<unsigned char>(digest.low >> (56 - 8 * byte));
  }
}

}  // namespace hybridkv

#endif  // HYBRIDKV_CANONICAL_DIGEST_H_
