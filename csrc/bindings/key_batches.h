// Python's keys in batches of views of their bytes. The views are valid until Python code runs.
#ifndef HYBRIDKV_BINDINGS_KEY_BATCHES_H_
#define HYBRIDKV_BINDINGS_KEY_BATCHES_H_

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <string_view>

namespace hybridkv::bindings {

inline std::string_view key_of(PyObject* object) {
  char* bytes = nullptr;
  Py_ssize_t num_bytes = 0;
  if (PyBytes_AsStringAndSize(object, &bytes, &num_bytes) != 0) nanobind::raise_python_error();
  return {bytes, static_cast<std::size_t>(num_bytes)};
}

// Keeps a list or a tuple as it is, and makes a list of any other iterable.
class KeyBatches {
 public:
  static constexpr std::size_t kAtATime = 256;

  explicit KeyBatches(nanobind::handle keys) {
    if (PyList_Check(keys.ptr()) || PyTuple_Check(keys.ptr())) {
      keys_ = nanobind::borrow(keys);
    } else {
      keys_ = nanobind::steal(PySequence_List(keys.ptr()));
      if (!keys_.is_valid()) nanobind::raise_python_error();
    }
    is_list_ = PyList_Check(keys_.ptr()) != 0;
    size_ = static_cast<std::size_t>(is_list_ ? PyList_Size(keys_.ptr()) : PyTuple_Size(keys_.ptr()));
  }

  std::size_t size() const { return size_; }

  // The keys of one batch from `first` on. Raises TypeError for a key that is not bytes.
  std::span<const std::string_view> from(std::size_t first) { return between(first, first + kAtATime); }
  std::span<const std::string_view> between(std::size_t first, std::size_t end) {
    const std::size_t count = std::min(end, size_) - first;
    for (std::size_t key = 0; key < count; ++key) {
      const auto place = static_cast<Py_ssize_t>(first + key);
      batch_[key] = key_of(is_list_ ? PyList_GetItem(keys_.ptr(), place) : PyTuple_GetItem(keys_.ptr(), place));
    }
    return {batch_, count};
  }

  // Calls `act(first, batch)` for each batch, until it returns false.
  template <class Act>
  void each(Act&& act) {
    for (std::size_t first = 0; first < size_; first += kAtATime) {
      if (!act(first, from(first))) return;
    }
  }

 private:
  nanobind::object keys_;
  bool is_list_;
  std::size_t size_;
  std::string_view batch_[kAtATime];
};

}  // namespace hybridkv::bindings

#endif  // HYBRIDKV_BINDINGS_KEY_BATCHES_H_
