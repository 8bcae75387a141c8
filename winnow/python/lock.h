// The interpreter lock, given back while the library works and taken for calls into Python.
//
// A daemon thread may want the lock when the interpreter is ending. Python before 3.14 then ends
// the thread by unwinding its stack, which the destructors of C++ on it turn into an abort of the
// whole process. Such a thread waits here for the end of the process instead, as Python 3.14 has
// it. The same holds for Python code that C++ calls: it gives the lock back now and then.
#pragma once

#include <memory>
#include <utility>

#include <nanobind/nanobind.h>

namespace winnow::python {

class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked();
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

class Locked {
 public:
  Locked();
  ~Locked() { PyGILState_Release(state_); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  PyGILState_STATE state_;
};

// `given`, which came from Python, for C++ that may let go of it without the lock: nanobind's own
// deleter would take the lock as a daemon thread must not.
template <class T>
std::shared_ptr<T> released_with_lock(std::shared_ptr<T> given) {
  T* const object = given.get();
  return {object, [given = std::move(given)](T*) mutable {
            if (!nanobind::is_alive()) return;
            const Locked locked;
            given.reset();
          }};
}

// function(*arguments), with the lock. Errors: nb::python_error.
nanobind::object call_python(nanobind::handle function, const nanobind::tuple& arguments);

}  // namespace winnow::python
