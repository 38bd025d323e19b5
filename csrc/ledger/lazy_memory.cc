#include "csrc/ledger/lazy_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace hybridkv::ledger {
namespace {

constexpr std::size_t kPageBytes = 4096;

std::size_t in_pages(std::size_t num_bytes) { return (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

}  // namespace

LazyMemory::LazyMemory(std::size_t num_bytes) {
  num_bytes = std::max(in_pages(num_bytes), kPageBytes);
  void* data =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<unsigned char*>(data);
  num_bytes_ = num_bytes;
}

void LazyMemory::give_back(std::size_t num_bytes) {
  if (data_ == nullptr) return;
  num_bytes = std::min(num_bytes, num_bytes_);
  munmap(data_, num_bytes);
  data_ = num_bytes < num_bytes_ ? data_ + num_bytes : nullptr;
  num_bytes_ -= num_bytes;
}

void LazyMemory::keep(std::size_t num_bytes) {
  num_bytes = in_pages(num_bytes);
  if (num_bytes >= num_bytes_) return;
  munmap(data_ + num_bytes, num_bytes_ - num_bytes);
  num_bytes_ = num_bytes;
  if (num_bytes == 0) data_ = nullptr;
}

}  // namespace hybridkv::ledger
