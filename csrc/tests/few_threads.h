// Limits the number of threads that a process can start.
#ifndef HYBRIDKV_TESTS_FEW_THREADS_H_
#define HYBRIDKV_TESTS_FEW_THREADS_H_

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>

#include "csrc/tests/expect.h"

namespace hybridkv::testing {

// While this object exists, the free address space is for the stacks of `num_threads` threads and half a stack more. A
// sanitizer and the allocator need little of that for each thread.
class FewThreads {
 public:
  explicit FewThreads(std::size_t num_threads) {
    expect(getrlimit(RLIMIT_AS, &before_) == 0, "the limit is known");
    pthread_attr_init(&attributes_);
    expect(pthread_getattr_default_np(&attributes_) == 0, "the size of a stack is known");
    pthread_attr_t large;
    pthread_attr_init(&large);
    expect(pthread_attr_setstacksize(&large, kStackBytes) == 0 && pthread_setattr_default_np(&large) == 0,
           "stacks can be large");
    pthread_attr_destroy(&large);
    rlimit now = before_;
    now.rlim_cur = address_space_bytes() + num_threads * kStackBytes + kStackBytes / 2;
    expect(setrlimit(RLIMIT_AS, &now) == 0, "the address space can be limited");
  }
  ~FewThreads() {
    setrlimit(RLIMIT_AS, &before_);
    pthread_setattr_default_np(&attributes_);
    pthread_attr_destroy(&attributes_);
  }
  FewThreads(const FewThreads&) = delete;
  FewThreads& operator=(const FewThreads&) = delete;

 private:
  static constexpr std::size_t kStackBytes = std::size_t{1} << 30;

  static std::size_t address_space_bytes() {
    std::size_t num_pages = 0;
    std::FILE* file = std::fopen("/proc/self/statm", "r");
    expect(file != nullptr && std::fscanf(file, "%zu", &num_pages) == 1, "the address space's size is known");
    std::fclose(file);
    return num_pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  }

  rlimit before_;
  pthread_attr_t attributes_;
};

}  // namespace hybridkv::testing

#endif  // HYBRIDKV_TESTS_FEW_THREADS_H_
