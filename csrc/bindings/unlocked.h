// Release of the interpreter lock.
#ifndef HYBRIDKV_BINDINGS_UNLOCKED_H_
#define HYBRIDKV_BINDINGS_UNLOCKED_H_

#include <Python.h>
#include <unistd.h>

namespace hybridkv::bindings {

// Releases the lock for the lifetime of the object.
//
// A daemon thread may return after the interpreter has begun to end. Python up to 3.13 then unwinds the thread's stack,
// which aborts the process at the first destructor. Here the thread sleeps until the process ends, as in Python 3.14.
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
