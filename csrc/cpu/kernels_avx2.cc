// Kernels with registers of 32 bytes: a stripe of the checksum is two registers.
#if defined(__x86_64__)

#include <immintrin.h>

#include "csrc/cpu/kernels.h"

#pragma GCC push_options
#pragma GCC target("avx2")

namespace hybridkv::cpu {
namespace {

struct Vector {
  using Register = __m256i;
  static constexpr std::size_t kBytes = 32;

  static Register zero() { return _mm256_setzero_si256(); }
  static Register load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
  static void store(void* to, Register value) { _mm256_storeu_si256(static_cast<__m256i*>(to), value); }
  static void stream(void* to, Register value) { _mm256_stream_si256(static_cast<__m256i*>(to), value); }
  static Register add(Register one, Register other) { return _mm256_add_epi64(one, other); }
  static Register exclusive_or(Register one, Register other) { return _mm256_xor_si256(one, other); }
  static Register multiply_low_halves(Register one, Register other) { return _mm256_mul_epu32(one, other); }
  static Register swap_neighbours(Register value) { return _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2)); }
  static Register broadcast(Word value) { return _mm256_set1_epi64x(static_cast<long long>(value)); }
  template <int kBits>
  static Register shift_right(Register value) {
    return _mm256_srli_epi64(value, kBits);
  }
  template <int kBits>
  static Register shift_left(Register value) {
    return _mm256_slli_epi64(value, kBits);
  }
};

constexpr std::size_t kStripesPerTurn = 2;

#include "csrc/cpu/kernels_vector.inc"

}  // namespace

const Kernels detail::kAvx2Kernels{Level::kAvx2, true, copy, copy_and_sum, sum, fold, add_stripes, fence};

}  // namespace hybridkv::cpu

#pragma GCC pop_options

#endif
