// What the bindings of collective calls share.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "winnow/core/contract_table.h"
#include "winnow/core/error.h"
#include "winnow/expert_parallel/transport/arguments_py.h"
#include "winnow/expert_parallel/transport/fault.h"
#include "winnow/expert_parallel/transport/transport.h"
#include "winnow/python/call.h"

namespace winnow::python {

// Calls of one object that must not overlap: a second one is refused while the first runs without
// the interpreter lock.
class OneCall {
 public:
  class Turn {
   public:
    Turn(OneCall& calls, const char* operation) : calls_(calls) {
      if (calls_.running_.exchange(true)) {
        throw Error(ErrorCode::invalid_argument, operation,
                    "another call of the same object has not ended: of another thread, or the one "
                    "that a signal handler has interrupted");
      }
    }
    ~Turn() { calls_.running_ = false; }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    OneCall& calls_;
  };

 private:
  std::atomic<bool> running_{false};
};

// The number of an object, by which an operator of torch finds it while it is alive. Guarded by the
// interpreter lock.
class Number {
 public:
  Number() = default;
  ~Number() { known().erase(value_); }
  Number(const Number&) = delete;
  Number& operator=(const Number&) = delete;

  // Numbers `object`, which this is a part of.
  std::int64_t give(nanobind::handle object) {
    static std::int64_t given = 0;
    value_ = ++given;
    known().emplace(value_, object.ptr());
    return value_;
  }
  // None if the object does not exist any more.
  static nanobind::object find(std::int64_t value) {
    const auto found = known().find(value);
    return found == known().end() ? nanobind::none() : nanobind::borrow(found->second);
  }

 private:
  static std::unordered_map<std::int64_t, PyObject*>& known() {
    static auto& objects = *new std::unordered_map<std::int64_t, PyObject*>();
    return objects;
  }
  std::int64_t value_ = 0;
};

// Type slots of a class whose members() are Python objects: the garbage collector looks for cycles
// through them.
template <class Class>
struct Collected {
  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nanobind::inst_ready(self)) return 0;
    for (const nanobind::object* member : nanobind::inst_ptr<Class>(self)->members()) {
      Py_VISIT(member->ptr());
    }
    return 0;
  }
  static int clear(PyObject* self) {
    for (nanobind::object* member : nanobind::inst_ptr<Class>(self)->members()) member->reset();
    return 0;
  }
  static inline const PyType_Slot kSlots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
                                              {Py_tp_clear, reinterpret_cast<void*>(&clear)},
                                              {0, nullptr}};
};

// A member of a result under its own name. `annotation`: as stubs have it.
template <auto kMember, class Class>
void define_member(nanobind::class_<Class>& type, const char* doc, const char* annotation = "T") {
  const std::string name(contract::name_of<kMember>());
  const std::string signature = "def " + name + "(self) -> " + annotation;
  type.def_ro(name.c_str(), kMember, doc, nanobind::for_getter(nanobind::sig(signature.c_str())));
}

// What reading the arguments threw; null for nothing.
template <class Function>
std::exception_ptr caught(const Function& function) {
  try {
    function();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

// As all ranks are told of it, and whether it was an Error.
inline std::pair<Error, bool> error_of(const char* operation, const std::exception_ptr& thrown) {
  const auto refused = [&](const std::string& text) {
    return std::pair(Error(ErrorCode::invalid_argument, operation, text), false);
  };
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    return {error, true};
  } catch (const nanobind::python_error& error) {
    return refused(nanobind::cast<std::string>(nanobind::str(error.value())));
  } catch (const std::exception& error) {
    return refused(error.what());
  }
}

// The other ranks wait in the call of a rank whose arguments could not be read: it takes part with
// those that `run` has then, which the library refuses on all ranks. `told`: the library throws
// here what `refused` is; else it is thrown afterwards.
template <class Function>
[[noreturn]] void run_refused(const std::exception_ptr& refused, bool told, const Function& run) {
  try {
    run();
  } catch (const Error& error) {
    // Broken, closed, or a peer that did not come: that counts more.
    if (told || error.code() == ErrorCode::timeout) throw;
  }
  std::rethrow_exception(refused);
}

template <class Function>
void run_collective(const std::exception_ptr& refused, const Function& run) {
  refused ? run_refused(refused, false, run) : run();
}

// With arguments that carry a refusal. An exception that is not an Error stays on this rank.
template <class Args, class Function>
void run_collective(const char* operation, const std::exception_ptr& refused, Args& args,
                    const Function& run) {
  if (!refused) return run();
  const auto [refusal, told] = error_of(operation, refused);
  args = {};
  args.refusal = &refusal;
  run_refused(refused, told, run);
}

// Takes part in a call, with arguments that are a refusal and nothing else, so that all ranks
// refuse it. `text` names the argument first: "x: want ...". `Bound` has a layer and a one_call;
// make(args) makes the call.
template <class Args, class Bound, class Function>
void refuse_on_all_ranks(const char* operation, Bound& self, const std::string& text,
                         const Function& make) {
  const OneCall::Turn turn(self.one_call, operation);
  Call call(operation);
  call.on(self.layer.config().device);
  const Error refusal =
      expert_parallel::error_from_message(ErrorCode::invalid_argument, operation, text);
  call.run([&](const RunOptions& options) {
    Args args;
    args.stream = options.stream;
    args.refusal = &refusal;
    make(args);
  });
}

// A field of a configuration, its name in Python, and what the caller gave for it.
template <class T>
struct Option {
  T& field;
  const char* name;
  nanobind::handle given;
};
template <class T>
Option(T&, const char*, nanobind::handle) -> Option<T>;

// Constructs the object at `self`, whose ranks meet in the store, with the configuration that the
// arguments say. `options` ends with those that have no default: if anything cannot be read, one of
// them is 0, which every rank refuses when it learns of it.
template <class Bound, class Config, class... T>
void make_on_all_ranks(const char* operation, Bound* self,
                       std::shared_ptr<expert_parallel::Transport> transport,
                       nanobind::handle store, Config& config, nanobind::handle timeout,
                       nanobind::handle device, const Option<T>&... options) {
  transport = released_with_lock(std::move(transport));
  std::shared_ptr<expert_parallel::Store> shared_store = store_argument(operation, store);
  const auto read = [&]<class Field>(const Option<Field>& option) {
    if constexpr (std::is_same_v<Field, DType>) {
      option.field = dtype_argument(operation, option.name, option.given);
    } else {
      option.field = value_argument<Field>(operation, option.name, option.given);
    }
  };
  const std::exception_ptr refused = caught([&] {
    config.timeout = timeout_argument(operation, timeout);
    config.device = device_argument(operation, device);
    (read(options), ...);
  });
  run_collective(refused, [&] {
    const Unlocked unlocked;
    new (self) Bound(std::move(transport), std::move(shared_store), config);
  });
}

}  // namespace winnow::python
