#include "winnow/python/lock.h"

#include <cxxabi.h>
#include <unistd.h>

namespace winnow::python {
namespace {

// function(), which may end this thread by unwinding its stack.
template <class Function>
auto take(const Function& function) {
  try {
    return function();
  } catch (abi::__forced_unwind&) {
    while (true) pause();
  }
}

}  // namespace

Unlocked::~Unlocked() {
  take([this] { PyEval_RestoreThread(state_); });
}

nanobind::object call_python(nanobind::handle function, const nanobind::tuple& arguments) {
  // Nothing that has a destructor lies between here and Python's own frames.
  PyObject* const result =
      take([&] { return PyObject_CallObject(function.ptr(), arguments.ptr()); });
  if (result == nullptr) throw nanobind::python_error();
  return nanobind::steal(result);
}

Locked::Locked() : state_(take([] { return PyGILState_Ensure(); })) {}

}  // namespace winnow::python
