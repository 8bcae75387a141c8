// One call from Python: tensors of numpy, torch and other frameworks come in as views, new ones go
// out as the kind that came in.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "winnow/core/backend.h"
#include "winnow/core/tensor.h"
#include "winnow/python/exporter.h"
#include "winnow/python/lock.h"
#include "winnow/python/signature.h"

namespace winnow::python {

namespace nb = nanobind;

struct Framework;

// Repetitions of the C++ call alone, for the benchmark of the binding: see time_native().
struct NativeTiming {
  int repeats = 0;
  double seconds = 0;
};
extern NativeTiming native_timing;

// The tensors of a call stay valid until it is destroyed. Create, use and destroy it with the
// interpreter lock held; run() gives the lock back while the library works.
class Call {
 public:
  // `operation` as the library names it: "sparse_mla::forward". `stream` is None (torch's current
  // stream for its CUDA tensors, else the default stream), a handle, or an object that has one;
  // `backend` is None or a name; `check` is RunOptions::check.
  Call(const char* operation, nb::handle stream, nb::handle backend, bool check = false);
  // With the stream to be said by use_stream(), before any tensor.
  explicit Call(const char* operation) : operation_(operation) {}
  void use_stream(nb::handle stream);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call();

  // The call is one of an object on that device, whatever its tensors are, which may be none: its
  // stream is torch's current one there, unless the tensors are of another framework.
  void on(Device device) { home_ = device; }

  // None gives an absent view. Never copies: what the library cannot read as it lies is an Error,
  // here, or by the library for a dtype that it does not have.
  ConstTensorView input(const char* argument, nb::handle object);
  // The same for flags, which are bool or u8 in Python and u8 here.
  ConstTensorView input_flags(const char* argument, nb::handle object);
  // An argument that is written to.
  TensorView in_out(const char* argument, nb::handle object);

  enum class Fill { none, zero };
  // `result` is the caller's tensor, or None; then it becomes a new one of this dtype and shape, of
  // the kind and on the device of the first input, and on a GPU for use on the call's stream.
  TensorView output(const char* argument, nb::object& result, DType dtype,
                    std::initializer_list<std::int64_t> shape, Fill fill = Fill::none);
  // A new one is bool in Python.
  TensorView output_flags(const char* argument, nb::object& result,
                          std::initializer_list<std::int64_t> shape);

  // For what the library makes: of the kind of the first input.
  Exporter exporter() const;

  // The scratch memory of GPU backends: the caller's, or if `workspace` is None and torch's tensors
  // are on a GPU, bytes(RunOptions) bytes of torch's allocator, which takes them back when the call
  // from Python ends and gives them to later work on the stream. Otherwise absent: the library
  // takes its own.
  template <class Bytes>
  TensorView workspace(nb::object& workspace, const Bytes& bytes) {
    if (!workspace.is_none() || !lends_scratch()) return in_out("workspace", workspace);
    const std::int64_t size = bytes(run_options());
    return size > 0 ? output("workspace", workspace, DType::u8, {size}) : TensorView();
  }
  RunOptions run_options() const;

  // function(const RunOptions&) without the interpreter lock.
  template <class Function>
  void run(const Function& function) {
    const RunOptions options = run_options();
    const Unlocked unlocked;
    function(options);
    if (native_timing.repeats > 0) [[unlikely]] {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < native_timing.repeats; ++i) function(options);
      native_timing.seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() /
          native_timing.repeats;
    }
  }

 private:
  static constexpr int kMaxTensors = 16;

  bool lends_scratch() const;
  TensorView read(const char* argument, nb::handle object, bool write);
  TensorView read_buffer(const char* argument, nb::handle object, bool write);
  TensorView read_exchange(const char* argument, nb::handle object);
  template <class Method>
  nb::object shared(const char* argument, const Method& method) const;
  TensorView read_capsule(const char* argument, nb::handle object, bool write);
  TensorView view_of(const char* argument, nb::handle object, const void* dltensor) const;
  TensorView read_flags(const char* argument, nb::handle object, bool write);
  nb::object of_framework(const char* name) const;
  nb::object make(std::size_t dtype, std::span<const std::int64_t> shape, Fill fill) const;
  [[noreturn]] void fail(const char* argument, std::string wanted, std::string got) const;
  [[noreturn]] void fail_rank(const char* argument, std::size_t rank) const;

  const char* operation_;
  RunOptions options_;
  bool explicit_stream_ = false;
  nb::handle first_{};  // the first input: what outputs are like
  const Framework* framework_ = nullptr;
  Device device_;
  std::optional<Device> home_;
  bool flags_ = false;  // what is read now may be bool
  int num_buffers_ = 0;
  std::array<Py_buffer, kMaxTensors> buffers_;
  int num_capsules_ = 0;
  std::array<nb::object, kMaxTensors> capsules_;
};

// Size of a dimension; 0 where the view has none: the library then says what it wanted.
inline std::int64_t size_of_dim(const ConstTensorView& view, int dim) {
  return dim < view.rank() ? view.size(dim) : 0;
}

// The members of an `out` argument that takes one tensor or a tuple of as many, None for those that
// are to be made.
void split_out(const char* operation, nb::handle out, std::span<nb::object> members);
template <std::size_t kCount>
std::array<nb::object, kCount> split_out(const char* operation, nb::handle out) {
  std::array<nb::object, kCount> members;
  split_out(operation, out, members);
  return members;
}

// Throws Error: the argument is not what was wanted. It shows numbers and texts, of others the
// type.
[[noreturn]] void refuse_argument(const char* operation, const char* argument,
                                  const std::string& wanted, nb::handle got);

// A flag, a number, or an object that is bound, by pointer: null for None. The same as an argument
// of that type in a binding's signature, but the Error names `operation` and `argument`.
template <class T>
T value_argument(const char* operation, const char* argument, nb::handle value) {
  T result{};
  if (nb::try_cast(value, result)) return result;
  refuse_argument(operation, argument, InWords<T>::text(), value);
}

// A dtype by its name in numpy, torch or the library. Errors name `operation` and `argument`.
DType dtype_argument(const char* operation, const char* argument, nb::handle dtype);

// A backend by its name. Errors name `operation` and the argument "backend".
Backend backend_argument(const char* operation, const std::string& name);

// "cpu", "cpu:0", "cuda:1", or a device of torch; "cuda" is torch's current GPU, or the first one
// where torch has not been imported. Errors name `operation`.
Device device_argument(const char* operation, nb::handle device);

}  // namespace winnow::python
