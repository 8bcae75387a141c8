// One call from Python. It converts tensors of numpy, torch and other frameworks to views, and
// creates results of the kind of the inputs.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "winnow/core/backend.h"
#include "winnow/core/tensor.h"
#include "winnow/python/arguments.h"
#include "winnow/python/exporter.h"
#include "winnow/python/lock.h"

namespace winnow::python {

namespace nb = nanobind;

struct Framework;

// While one lives, calls of this thread are dry runs (RunOptions::dry_run). They read torch's
// tensors by what they say of themselves: fake ones and those on "meta", which counts as the CPU,
// have no memory.
class DryRun {
 public:
  DryRun() : before_(std::exchange(running_, true)) {}
  ~DryRun() { running_ = before_; }
  DryRun(const DryRun&) = delete;
  DryRun& operator=(const DryRun&) = delete;

  static bool running() { return running_; }

 private:
  static thread_local bool running_;
  bool before_;
};

// The views stay valid until the call is destroyed. Create, use and destroy it with the interpreter
// lock held; run() releases the lock while the library works.
class Call {
 public:
  // `operation` as the library names it: "sparse_mla::forward". `stream` is None (torch's current
  // stream for its CUDA tensors, else the default stream), a handle, or an object that has one;
  // `backend` is None or a name; `check` is RunOptions::check.
  Call(const char* operation, nb::handle stream, nb::handle backend, bool check = false);
  // use_stream() must follow before any tensor is read, since producers of DLPack get the stream.
  explicit Call(const char* operation) : operation_(operation) {}
  void use_stream(nb::handle stream);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call();

  // Sets the device of a layer's call, which may have no tensors. The default stream is then
  // torch's current one there, unless tensors on a GPU are those of another framework.
  void on(Device device) { home_ = device; }

  // None gives an absent view. Never copies: a tensor that the library cannot read in place is an
  // Error, here or, for some dtypes, in the library.
  ConstTensorView input(const char* argument, nb::handle object);
  // The same for flags: bool or u8 in Python, u8 in C++.
  ConstTensorView input_flags(const char* argument, nb::handle object);
  // An argument that is written to.
  TensorView in_out(const char* argument, nb::handle object);

  enum class Fill { none, zero };
  // `result` is the caller's tensor or None. None is replaced by a new tensor of this dtype and
  // shape, of the kind and on the device of the first input, and on a GPU for the call's stream.
  TensorView output(const char* argument, nb::object& result, DType dtype,
                    std::span<const std::int64_t> shape, Fill fill = Fill::none);
  TensorView output(const char* argument, nb::object& result, DType dtype,
                    std::initializer_list<std::int64_t> shape, Fill fill = Fill::none) {
    return output(argument, result, dtype, std::span(shape), fill);
  }
  // The same for flags; a new tensor is bool in Python.
  TensorView output_flags(const char* argument, nb::object& result,
                          std::initializer_list<std::int64_t> shape);

  // Hands the library's own tensors to Python, as the kind of the first input.
  Exporter exporter() const;

  // The scratch memory of GPU backends. It is the caller's unless `workspace` is None. With
  // torch's tensors on a GPU it is then bytes(RunOptions) bytes of torch's allocator, which later
  // work on the stream may reuse after the call. Otherwise it is absent: the library allocates it.
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
  }

 private:
  static constexpr int kMaxTensors = 16;

  bool lends_scratch() const;
  TensorView read(const char* argument, nb::handle object, bool write);
  TensorView read_buffer(const char* argument, nb::handle object, bool write);
  TensorView read_exchange(const char* argument, nb::handle object);
  TensorView read_described(const char* argument, nb::handle object) const;
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
  RunOptions options_{.dry_run = DryRun::running()};
  bool explicit_stream_ = false;
  nb::handle first_{};  // the first input, whose kind the outputs have
  const Framework* framework_ = nullptr;
  Device device_;
  std::optional<Device> home_;
  bool flags_ = false;  // the tensor that is being read may be bool
  int num_buffers_ = 0;
  std::array<Py_buffer, kMaxTensors> buffers_;
  int num_capsules_ = 0;
  std::array<nb::object, kMaxTensors> capsules_;
};

// The size of a dimension, or 0 if the view lacks it; the library then throws an Error.
inline std::int64_t size_of_dim(const ConstTensorView& view, int dim) {
  return dim < view.rank() ? view.size(dim) : 0;
}

}  // namespace winnow::python
