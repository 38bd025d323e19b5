// A kernel that does less than it was asked, is interrupted, refuses, or fails: it stands between the queues and the
// real one. Every program that links faulty_kernel.cc calls it, since it has the names that the queues call.
//
// What it says of a call it has also done, but for errors, of which it says what it likes. So whoever repeats what was
// not done as he should ends with the same bytes as without it.
#ifndef HYBRIDKV_TESTS_FAULTY_KERNEL_H_
#define HYBRIDKV_TESTS_FAULTY_KERNEL_H_

#include <cstdint>

namespace hybridkv::testing {

struct Faults {
  std::uint64_t seed = 1;
  // Once in so many calls, or completions of a ring; 0: never.
  std::uint64_t partial_one_in = 0;      // fewer bytes than were asked for, or fewer entries taken
  std::uint64_t interrupted_one_in = 0;  // EINTR, EAGAIN
  std::uint64_t failed_one_in = 0;       // EIO; ENOMEM for what a ring was given
  std::uint64_t unit_bytes = 1;          // a part is whole ones: with O_DIRECT a kernel stops nowhere else
};

// From now on. Not while a queue has something in flight.
void set_faults(const Faults& faults);
// Calls and completions that were said to have failed, since then.
std::uint64_t num_failed();
// Those that were partial or interrupted.
std::uint64_t num_repeated();

}  // namespace hybridkv::testing

#endif  // HYBRIDKV_TESTS_FAULTY_KERNEL_H_
