// Injects faults into system calls: partial transfers, interruptions, refusals and errors. Defines the functions that
// the queues call, so every program that links faulty_kernel.cc uses it.
//
// Except for injected errors, a call does what its result says. So a queue that correctly repeats partial calls ends
// with the same bytes as without faults.
#ifndef HYBRIDKV_TESTS_FAULTY_KERNEL_H_
#define HYBRIDKV_TESTS_FAULTY_KERNEL_H_

#include <cstdint>

namespace hybridkv::testing {

struct Faults {
  std::uint64_t seed = 1;
  // Each fault happens once in that many calls or completions of a ring; 0: never.
  std::uint64_t partial_one_in = 0;      // fewer bytes moved, or fewer entries taken
  std::uint64_t interrupted_one_in = 0;  // EINTR, EAGAIN
  std::uint64_t failed_one_in = 0;       // EIO; ENOMEM for entries of a ring
  std::uint64_t unit_bytes = 1;          // granularity of partial transfers; O_DIRECT needs whole units
};

// Applies from now on. Must not be called while a queue has requests in flight.
void set_faults(const Faults& faults);
// Number of injected failures since then.
std::uint64_t num_failed();
// Number of partial or interrupted calls since then.
std::uint64_t num_repeated();

}  // namespace hybridkv::testing

#endif  // HYBRIDKV_TESTS_FAULTY_KERNEL_H_
