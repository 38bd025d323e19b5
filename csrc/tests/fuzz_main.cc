// Runs a target with random inputs. FUZZ_SEED: the first seed. FUZZ_INPUTS: the number of inputs. FUZZ_S: the duration
// in seconds, instead of a number of inputs. Prints the seed of a failing input; FUZZ_SEED=<seed> FUZZ_INPUTS=1 repeats
// it.
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <unistd.h>

#include "csrc/tests/expect.h"
#include "csrc/tests/fuzz.h"

namespace {

constexpr std::uint64_t kInputs = 150;
constexpr std::size_t kLargestInputBytes = 4000;

std::uint64_t seed = 0;

std::uint64_t number_of(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

void print_seed() { std::fprintf(stderr, "the input of FUZZ_SEED=%llu\n", static_cast<unsigned long long>(seed)); }

void print_seed_after_a_signal(int number) {
  print_seed();
  std::signal(number, SIG_DFL);
  raise(number);
}

std::vector<std::uint8_t> input() {
  hybridkv::testing::Noise noise(seed);
  for (int skipped = 0; skipped < 4; ++skipped) noise.next();  // adjacent seeds have similar first numbers
  std::vector<std::uint8_t> bytes(noise.below(kLargestInputBytes));
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(noise.next() >> 32);
  return bytes;
}

}  // namespace

int main() {
  std::atexit([] {
    if (seed != ~std::uint64_t{0}) print_seed();
  });
  for (const int number : {SIGABRT, SIGALRM, SIGSEGV}) std::signal(number, print_seed_after_a_signal);
  const std::uint64_t first = number_of("FUZZ_SEED", 1);
  const std::uint64_t duration_s = number_of("FUZZ_S", 0);
  const std::uint64_t count = duration_s != 0 ? ~std::uint64_t{0} : number_of("FUZZ_INPUTS", kInputs);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(duration_s);
  std::uint64_t tried = 0;
  for (seed = first; tried < count; ++seed, ++tried) {
    if (duration_s != 0 && std::chrono::steady_clock::now() >= end) break;
    alarm(60);  // an input that hangs fails
    const std::vector<std::uint8_t> bytes = input();
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%llu inputs from FUZZ_SEED=%llu on\n", static_cast<unsigned long long>(tried),
              static_cast<unsigned long long>(first));
  seed = ~std::uint64_t{0};
  return 0;
}
