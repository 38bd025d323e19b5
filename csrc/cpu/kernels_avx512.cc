// Kernels with registers of 64 bytes: a stripe of the checksum is one register.
#if defined(__x86_64__)

#include <immintrin.h>

#include "csrc/cpu/kernels.h"

// GCC 12 warns of undefined registers in its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw")

namespace hybridkv::cpu {
namespace {

struct Vector {
  using Register = __m512i;
  static constexpr std::size_t kBytes = 64;

  static Register zero() { return _mm512_setzero_si512(); }
  static Register load(const void* from) { return _mm512_loadu_si512(from); }
  static void store(void* to, Register value) { _mm512_storeu_si512(to, value); }
  static void stream(void* to, Register value) { _mm512_stream_si512(static_cast<__m512i*>(to), value); }
  static Register add(Register one, Register other) { return _mm512_add_epi64(one, other); }
  static Register exclusive_or(Register one, Register other) { return _mm512_xor_si512(one, other); }
  static Register multiply_low_halves(Register one, Register other) { return _mm512_mul_epu32(one, other); }
  static Register swap_neighbours(Register value) { return _mm512_shuffle_epi32(value, _MM_PERM_BADC); }
  static Register broadcast(Word value) { return _mm512_set1_epi64(static_cast<long long>(value)); }
  template <int kBits>
  static Register shift_right(Register value) {
    return _mm512_srli_epi64(value, kBits);
  }
  template <int kBits>
  static Register shift_left(Register value) {
    return _mm512_slli_epi64(value, kBits);
  }
};

constexpr std::size_t kStripesPerTurn = 4;

#include "csrc/cpu/kernels_vector.inc"

}  // namespace

const Kernels detail::kAvx512Kernels{Level::kAvx512, true, copy, copy_and_sum, sum, fold, add_stripes, fence};

}  // namespace hybridkv::cpu

#pragma GCC pop_options

#endif
