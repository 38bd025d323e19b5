// Memory of zeros that the system provides page by page, at the first write to each page.
#ifndef HYBRIDKV_LEDGER_LAZY_MEMORY_H_
#define HYBRIDKV_LEDGER_LAZY_MEMORY_H_

#include <cstddef>
#include <type_traits>
#include <utility>

namespace hybridkv::ledger {

class LazyMemory {
 public:
  LazyMemory() = default;
  // Throws std::bad_alloc if the system lacks the address space.
  explicit LazyMemory(std::size_t num_bytes);
  LazyMemory(LazyMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), num_bytes_(std::exchange(other.num_bytes_, 0)) {}
  LazyMemory& operator=(LazyMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(num_bytes_, other.num_bytes_);
    return *this;
  }
  ~LazyMemory() { give_back(num_bytes_); }

  unsigned char* data() const { return data_; }
  std::size_t num_bytes() const { return num_bytes_; }
  // Frees the first `num_bytes`, rounded to whole pages, or all. `data()` then points to the rest.
  void give_back(std::size_t num_bytes);
  // Frees the pages after the first `num_bytes`.
  void keep(std::size_t num_bytes);

 private:
  unsigned char* data_ = nullptr;
  std::size_t num_bytes_ = 0;
};

// Array of values for which all bytes zero is a valid value.
template <class T>
class LazyArray {
 public:
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

  LazyArray() = default;
  explicit LazyArray(std::size_t size) : memory_(size * sizeof(T)) {}

  T& operator[](std::size_t position) { return reinterpret_cast<T*>(memory_.data())[position]; }
  const T& operator[](std::size_t position) const { return reinterpret_cast<const T*>(memory_.data())[position]; }
  // Hands over the memory of the first `num_used` values, to be freed in pieces, and frees the rest. The array must not
  // be used after it.
  LazyMemory take_memory(std::size_t num_used) {
    memory_.keep(num_used * sizeof(T));
    return std::move(memory_);
  }

 private:
  LazyMemory memory_;
};

}  // namespace hybridkv::ledger

#endif  // HYBRIDKV_LEDGER_LAZY_MEMORY_H_
