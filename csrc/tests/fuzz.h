// Interface of fuzz targets: that of libFuzzer, with a driver for compilers without it.
//
// A target defines `LLVMFuzzerTestOneInput`, and reads its actions from `Choices`. `fuzz_main.cc` calls it with random
// bytes. Linked with clang's -fsanitize=fuzzer instead, libFuzzer calls the target.
#ifndef HYBRIDKV_TESTS_FUZZ_H_
#define HYBRIDKV_TESTS_FUZZ_H_

#include <cstddef>
#include <cstdint>

namespace hybridkv::testing {

// Reads choices from an input, one after the other. After its end, every choice is the first one.
class Choices {
 public:
  Choices(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}

  bool is_used_up() const { return left_ == 0; }
  // A number below `bound`, which is at least 1.
  std::uint64_t below(std::uint64_t bound) {
    std::uint64_t value = 0;
    for (std::uint64_t limit = bound - 1; limit != 0; limit >>= 8) value = value << 8 | byte();
    return value % bound;
  }
  std::uint64_t between(std::uint64_t first, std::uint64_t last) { return first + below(last - first + 1); }
  // True for one of `count` choices.
  bool one_in(std::uint64_t count) { return below(count) == count - 1; }

 private:
  std::uint8_t byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }

  const std::uint8_t* data_;
  std::size_t left_;
};

}  // namespace hybridkv::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

#endif  // HYBRIDKV_TESTS_FUZZ_H_
