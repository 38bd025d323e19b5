// Memory that costs nothing before it is used: zeros, of which the system gives a page when somebody writes to it.
#ifndef HYBRIDKV_LEDGER_LAZY_MEMORY_H_
#define HYBRIDKV_LEDGER_LAZY_MEMORY_H_

#include <cstddef>
#include <type_traits>
#include <utility>

namespace hybridkv::ledger {

class LazyMemory {
 public:
  LazyMemory() = default;
  // std::bad_alloc where the system has no room for so many addresses.
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
  // The first so many bytes, whole pages, or all that is left. What is behind them begins there from now on.
  void give_back(std::size_t num_bytes);
  // All but the first so many bytes, and the page in which they end.
  void keep(std::size_t num_bytes);

 private:
  unsigned char* data_ = nullptr;
  std::size_t num_bytes_ = 0;
};

// Values that are valid when all their bytes are zero.
template <class T>
class LazyArray {
 public:
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

  LazyArray() = default;
  explicit LazyArray(std::size_t size) : memory_(size * sizeof(T)) {}

  T& operator[](std::size_t position) { return reinterpret_cast<T*>(memory_.data())[position]; }
  const T& operator[](std::size_t position) const { return reinterpret_cast<const T*>(memory_.data())[position]; }
  // Of no use any more, to be given back piece by piece: the first so many, which alone were used.
  LazyMemory take_memory(std::size_t num_used) {
    memory_.keep(num_used * sizeof(T));
    return std::move(memory_);
  }

 private:
  LazyMemory memory_;
};

}  // namespace hybridkv::ledger

#endif  // HYBRIDKV_LEDGER_LAZY_MEMORY_H_
