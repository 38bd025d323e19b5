// Without the interpreter lock, and back.
#ifndef HYBRIDKV_BINDINGS_UNLOCKED_H_
#define HYBRIDKV_BINDINGS_UNLOCKED_H_

#include <Python.h>
#include <unistd.h>

namespace hybridkv::bindings {

// Gives up the lock for as long as this lives.
//
// A daemon thread may come back when the interpreter has begun to end. Python until 3.13 then ends the thread by
// unwinding its stack, which aborts the process at the first destructor; here the thread stands still until the process
// is over, as Python 3.14 has it.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      while (true) pause();
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace hybridkv::bindings

#endif  // HYBRIDKV_BINDINGS_UNLOCKED_H_
