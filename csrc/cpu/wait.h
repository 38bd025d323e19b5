// Timeouts for clocks.
#ifndef HYBRIDKV_CPU_WAIT_H_
#define HYBRIDKV_CPU_WAIT_H_

#include <algorithm>
#include <chrono>

namespace hybridkv::cpu {

// 31 years. Clocks count nanoseconds in 64 bits: a longer wait would end before it began.
inline constexpr double kForeverS = 1e9;

// Timeout that a clock accepts. Negative numbers and NaN become 0; infinity becomes kForeverS.
inline std::chrono::duration<double> wait_of(double timeout_s) {
  return std::chrono::duration<double>(timeout_s > 0.0 ? std::min(timeout_s, kForeverS) : 0.0);
}

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_WAIT_H_
