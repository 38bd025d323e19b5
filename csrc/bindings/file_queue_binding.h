// The file queue's part of the module.
#ifndef HYBRIDKV_BINDINGS_FILE_QUEUE_BINDING_H_
#define HYBRIDKV_BINDINGS_FILE_QUEUE_BINDING_H_

#include <nanobind/nanobind.h>

#include "hybridkv/xxh3.h"

namespace hybridkv::bindings {

// As python's xxhash gives it: 16 bytes, big-endian.
inline void write_canonical(const Digest128& digest, unsigned char* to) {
  for (int byte = 0; byte < 8; ++byte) {
    to[byte] = static_cast<unsigned char>(digest.high >> (56 - 8 * byte));
    to[8 + byte] = static_cast<unsigned char>(digest.low >> (56 - 8 * byte));
  }
}

void bind_file_queue(nanobind::module_& module);

}  // namespace hybridkv::bindings

#endif  // HYBRIDKV_BINDINGS_FILE_QUEUE_BINDING_H_
