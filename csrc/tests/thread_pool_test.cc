// A pool runs every part once, with any number of threads, and survives a part that throws.
#include "csrc/cpu/thread_pool.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "csrc/tests/expect.h"
#include "csrc/tests/few_threads.h"

namespace {

using hybridkv::cpu::ThreadPool;
using hybridkv::testing::expect;
using hybridkv::testing::FewThreads;

void check_parts(ThreadPool& pool) {
  for (const std::size_t num_parts : {0, 1, 2, 3, 100}) {
    std::vector<std::atomic<int>> calls(num_parts);
    pool.run(num_parts, [&](std::size_t part) { ++calls[part]; });
    for (const std::atomic<int>& count : calls) expect(count == 1, "each part is called once");
  }
}

// Two parts that run at the same time. The given part throws first.
void check_failure(ThreadPool& pool, bool caller_throws) {
  const std::thread::id caller = std::this_thread::get_id();
  std::mutex mutex;
  std::condition_variable changed;
  int num_entered = 0;
  bool has_thrown = false;
  std::atomic<int> num_ended{0};
  std::string caught;
  try {
    pool.run(100, [&](std::size_t) {
      std::unique_lock lock(mutex);
      ++num_entered;
      changed.notify_all();
      changed.wait(lock, [&] { return num_entered >= 2; });
      if ((std::this_thread::get_id() == caller) == caller_throws && !has_thrown) {
        has_thrown = true;
        changed.notify_all();
        throw std::runtime_error("no memory");
      }
      changed.wait(lock, [&] { return has_thrown; });
      ++num_ended;
    });
  } catch (const std::runtime_error& error) {
    caught = error.what();
  }
  expect(caught == "no memory", "an exception of a part is rethrown");
  expect(num_ended >= 1, "the parts that were started have ended");
  check_parts(pool);
}

void check_few() {
  const FewThreads few(3);
  ThreadPool pool(64);
  expect(pool.num_threads() > 1 && pool.num_threads() < 64, "a pool has the threads that could be started");
  check_parts(pool);
}

void check_none() {
  const FewThreads none(0);
  ThreadPool pool(4);
  expect(pool.num_threads() == 1, "the calling thread always works");
  check_parts(pool);
}

}  // namespace

int main() {
  {
    ThreadPool pool(2);
    expect(pool.num_threads() == 2, "a pool has the requested number of threads");
    check_parts(pool);
    check_failure(pool, true);
    check_failure(pool, false);
  }
  check_few();
  check_none();
}
