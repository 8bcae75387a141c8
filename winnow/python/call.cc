#include "winnow/python/call.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "winnow/core/error.h"
#include "winnow/core/foreign_dtype.h"
#include "winnow/python/bindings.h"
#include "winnow/python/dlpack.h"
#include "winnow/python/framework.h"
#include "winnow/python/text.h"

namespace winnow::python {

namespace {

constexpr const char* kAnyTensor = "a tensor of numpy, torch or another framework with __dlpack__";

// Makes a stream torch's current one for a while, so that new tensors belong to it: zeros are
// queued before what follows there, and the memory is not in use elsewhere.
class TorchStream {
 public:
  TorchStream(Stream stream, nb::handle device) {
    const nb::object cuda = nb::module_::import_("torch.cuda");
    const auto handle = reinterpret_cast<std::uintptr_t>(stream.handle);
    constexpr std::uintptr_t kLegacy = 1;  // cudaStreamLegacy, a name of the default stream
    context_ = cuda.attr("stream")(handle > kLegacy ? cuda.attr("ExternalStream")(handle, device)
                                                    : cuda.attr("default_stream")(device));
    context_.attr("__enter__")();
  }
  ~TorchStream() {
    try {
      context_.attr("__exit__")(nb::none(), nb::none(), nb::none());
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("winnow: torch's stream");
    }
  }
  TorchStream(const TorchStream&) = delete;
  TorchStream& operator=(const TorchStream&) = delete;

 private:
  nb::object context_;
};

}  // namespace

thread_local bool DryRun::running_ = false;

void Call::fail(const char* argument, std::string wanted, std::string got) const {
  throw Error(ErrorCode::invalid_argument, operation_, argument, std::move(wanted), std::move(got));
}

void Call::fail_rank(const char* argument, std::size_t rank) const {
  fail(argument, "at most " + std::to_string(kMaxRank) + " dimensions", std::to_string(rank));
}

Call::Call(const char* operation, nb::handle stream, nb::handle backend, bool check)
    : Call(operation) {
  options_.check = check;
  options_.backend = optional_backend(operation, backend);
  use_stream(stream);
}

void Call::use_stream(nb::handle stream) {
  if (stream.is_none()) return;
  nb::object number = nb::borrow(stream);
  if (nb::hasattr(stream, "__cuda_stream__")) {
    number = stream.attr("__cuda_stream__")()[1];
  } else if (nb::hasattr(stream, "cuda_stream")) {  // torch
    number = stream.attr("cuda_stream");
  } else if (nb::hasattr(stream, "ptr")) {  // cupy
    number = stream.attr("ptr");
  }
  std::uintptr_t handle = 0;
  if (!nb::try_cast(number, handle)) {
    fail("stream", "None, a handle, or an object with __cuda_stream__, cuda_stream or ptr",
         repr_of(stream));
  }
  options_.stream.handle = reinterpret_cast<void*>(handle);
  explicit_stream_ = true;
}

Call::~Call() {
  for (int i = 0; i < num_buffers_; ++i) PyBuffer_Release(&buffers_[i]);
}

ConstTensorView Call::input(const char* argument, nb::handle object) {
  return read(argument, object, false);
}

ConstTensorView Call::input_flags(const char* argument, nb::handle object) {
  return read_flags(argument, object, false);
}

TensorView Call::read_flags(const char* argument, nb::handle object, bool write) {
  flags_ = true;
  const TensorView view = read(argument, object, write);  // a Call that threw reads no more
  flags_ = false;
  return view;
}

TensorView Call::in_out(const char* argument, nb::handle object) {
  return read(argument, object, true);
}

TensorView Call::read(const char* argument, nb::handle object, bool write) {
  if (object.is_none()) return {};
  const Framework& framework = framework_of(object);
  if (framework.masked) {
    fail(argument, "an array without a mask", "a masked one; filled() gives one without");
  }
  if (framework.kind == Framework::Kind::torch) {
    static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
    PyObject* const self = object.ptr();
    const nb::object negative = nb::steal(PyObject_VectorcallMethod(is_neg, &self, 1, nullptr));
    if (!negative.is_valid()) throw nb::python_error();
    if (negative.ptr() == Py_True) {
      fail(argument, "a tensor whose memory holds its values",
           "one whose negation is pending (an imaginary part of a conjugate); resolve_neg() gives "
           "its values");
    }
    static PyObject* const name = PyUnicode_InternFromString("requires_grad");
    const nb::object flag = nb::steal(PyObject_GetAttr(object.ptr(), name));
    if (flag.ptr() == Py_True) {
      const nb::object torch = nb::module_::import_("torch");
      if (nb::cast<bool>(torch.attr("is_grad_enabled")())) {
        fail(argument,
             "a tensor that requires no gradient (winnow.torch and "
             "winnow.expert_parallel.autograd have operations that do)",
             "one that requires it; detach() gives its values");
      }
    }
  }
  TensorView view;
  try {
    if (options_.dry_run && framework.kind == Framework::Kind::torch) {
      view = read_described(argument, object);
    } else if (framework.kind == Framework::Kind::numpy) {
      view = read_buffer(argument, object, write);
    } else {
      view = framework.api != nullptr ? read_exchange(argument, object)
                                      : read_capsule(argument, object, write);
    }
  } catch (const Error& error) {
    // Of a view, which knows neither operation nor argument: sizes or strides that no memory has.
    if (error.operation() == operation_) throw;
    throw Error(error.code(), operation_,
                std::string(argument) + ": " +
                    std::string(error.what()).substr(error.operation().size() + 2),
                {.argument = argument});
  }
  if (!first_.is_valid()) {
    first_ = object;
    framework_ = &framework;
    device_ = view.device();
  }
  return view;
}

TensorView Call::read_buffer(const char* argument, nb::handle object, bool write) {
  Py_buffer& buffer = buffers_[num_buffers_];
  if (PyObject_GetBuffer(object.ptr(), &buffer, write ? PyBUF_RECORDS : PyBUF_RECORDS_RO) != 0) {
    PyErr_Clear();
    const bool read_only = nb::cast<bool>(object.attr("flags").attr("writeable")) == false;
    if (write && read_only) fail(argument, "an array that may be written to", "a read-only one");
    // A dtype that numpy cannot describe, for instance of times.
    const auto shape = nb::cast<std::vector<std::int64_t>>(object.attr("shape"));
    if (shape.size() > kMaxRank) fail_rank(argument, shape.size());
    return {&buffer, foreign_dtype(dtype_of_object(object)), shape};
  }
  ++num_buffers_;
  if (buffer.itemsize == 0) fail(argument, "elements of at least a byte", dtype_of_object(object));
  const DType dtype = dtype_or_foreign(dtype_from(buffer.format, buffer.itemsize, flags_), object);
  if (buffer.ndim > kMaxRank) fail_rank(argument, static_cast<std::size_t>(buffer.ndim));
  std::array<std::int64_t, kMaxRank> shape{}, strides{};
  for (int dim = 0; dim < buffer.ndim; ++dim) {
    shape[dim] = buffer.shape[dim];
    strides[dim] = buffer.strides[dim] / buffer.itemsize;
    if (buffer.strides[dim] % buffer.itemsize != 0 && shape[dim] > 1) {
      fail(argument, "strides of whole elements", std::to_string(buffer.strides[dim]) + " bytes");
    }
  }
  const auto rank = static_cast<std::size_t>(buffer.ndim);
  return {buffer.buf, dtype, std::span(shape).first(rank), std::span(strides).first(rank)};
}

TensorView Call::read_exchange(const char* argument, nb::handle object) {
  dlpack::dltensor tensor;
  if (framework_of(object).api->to_tensor(object.ptr(), &tensor) != 0) {
    const nb::python_error error;
    if (passes_unchanged(error)) throw error;
    fail(argument, "a dense tensor in memory", kind_of(object) + ": " + first_line(error));
  }
  return view_of(argument, object, &tensor);
}

// What a method of a producer of DLPack tensors returns; its errors become one of the argument.
template <class Method>
nb::object Call::shared(const char* argument, const Method& method) const {
  try {
    return method();
  } catch (const nb::python_error& error) {
    if (passes_unchanged(error)) throw;
    fail(argument, "a tensor that can be shared", first_line(error));
  }
}

TensorView Call::read_described(const char* argument, nb::handle object) const {
  const auto shape = nb::cast<std::vector<std::int64_t>>(object.attr("shape"));
  const auto strides = nb::cast<std::vector<std::int64_t>>(
      shared(argument, [&] { return nb::object(object.attr("stride")()); }));
  if (shape.size() > kMaxRank) fail_rank(argument, shape.size());
  const auto& dtypes = framework_of(object).dtypes;
  const nb::object dtype = object.attr("dtype");
  const auto found =
      static_cast<std::size_t>(std::ranges::find(dtypes, dtype.ptr()) - dtypes.begin());
  std::optional<DType> known;
  if (found < kFlags) known = static_cast<DType>(found);
  if (found == kFlags && flags_) known = DType::u8;
  const nb::object device = object.attr("device");
  const Device where = text_of(device) == "meta" ? Device{} : device_argument(operation_, device);
  return {nowhere(), dtype_or_foreign(known, object), shape, strides, where};
}

TensorView Call::read_capsule(const char* argument, nb::handle object, bool write) {
  if (!nb::hasattr(object, "__dlpack__") || !nb::hasattr(object, "__dlpack_device__")) {
    fail(argument, kAnyTensor, kind_of(object));
  }
  nb::dict options;
  const nb::object device = shared(argument, [&] { return object.attr("__dlpack_device__")(); });
  int type = 0, number = 0;
  if (!PyTuple_Check(device.ptr()) || PyTuple_Size(device.ptr()) != 2 ||
      !nb::try_cast(device[0], type) || !nb::try_cast(device[1], number)) {
    fail(argument, "a tensor whose __dlpack_device__() is a type and a number", repr_of(device));
  }
  if (type == dlpack::kCuda) {
    // The producer makes its work visible to our stream; DLPack calls the default stream 1.
    const auto handle = reinterpret_cast<std::uintptr_t>(options_.stream.handle);
    options["stream"] = handle == 0 ? std::uintptr_t{1} : handle;
  }
  options["max_version"] = nb::make_tuple(1, 1);
  const nb::object capsule = shared(argument, [&] {
    try {
      return object.attr("__dlpack__")(**options);
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;
    }
    PyDict_DelItemString(options.ptr(), "max_version");  // from before DLPack 1.0
    return object.attr("__dlpack__")(**options);
  });
  // The capsule stays as it is: its producer frees the tensor when we release it.
  capsules_[num_capsules_++] = capsule;
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    const auto* managed = static_cast<const dlpack::ManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (managed->version.major != dlpack::kMajor) {
      fail(argument, "DLPack 1", "DLPack " + std::to_string(managed->version.major));
    }
    if (write && (managed->flags & dlpack::kReadOnly) != 0) {
      fail(argument, "an array that may be written to", "a read-only one");
    }
    return view_of(argument, object, &managed->tensor);
  }
  if (!PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    fail(argument, "a DLPack capsule from __dlpack__()", kind_of(capsule));
  }
  const auto* managed =
      static_cast<const dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  return view_of(argument, object, &managed->tensor);
}

TensorView Call::view_of(const char* argument, nb::handle object, const void* dltensor) const {
  const auto& tensor = *static_cast<const dlpack::dltensor*>(dltensor);
  const DType dtype = dtype_or_foreign(dtype_from(tensor.dtype, flags_), object);
  if (tensor.ndim > kMaxRank) fail_rank(argument, static_cast<std::size_t>(tensor.ndim));
  if (tensor.ndim < 0 || (tensor.ndim > 0 && tensor.shape == nullptr)) {
    fail(argument, "a DLPack tensor with a shape",
         std::to_string(tensor.ndim) + " dimensions" + (tensor.ndim < 0 ? "" : " and no shape"));
  }
  Device device;
  switch (tensor.device.device_type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
      break;
    case dlpack::kCuda:
    case dlpack::kCudaManaged:
      device = {DeviceType::cuda, tensor.device.device_id};
      break;
    default:
      fail(argument, "memory of the cpu or of a CUDA GPU",
           "device " + std::to_string(tensor.device.device_type) + " of DLPack");
  }
  void* data =
      tensor.data == nullptr ? nullptr : static_cast<char*>(tensor.data) + tensor.byte_offset;
  const auto rank = static_cast<std::size_t>(tensor.ndim);
  const std::span<const std::int64_t> shape(tensor.shape, rank);
  if (data == nullptr && std::find(shape.begin(), shape.end(), 0) == shape.end()) {
    fail(argument, "a tensor in memory", kind_of(object) + " without any (fake, or freed)");
  }
  if (tensor.strides == nullptr) return {data, dtype, shape, device};
  return {data, dtype, shape, std::span<const std::int64_t>(tensor.strides, rank), device};
}

TensorView Call::output(const char* argument, nb::object& result, DType dtype,
                        std::span<const std::int64_t> shape, Fill fill) {
  if (result.is_none()) result = make(static_cast<std::size_t>(dtype), shape, fill);
  return read(argument, result, true);
}

TensorView Call::output_flags(const char* argument, nb::object& result,
                              std::initializer_list<std::int64_t> shape) {
  if (result.is_none()) {
    result = make(kFlags, std::span(shape.begin(), shape.size()), Fill::none);
  }
  return read_flags(argument, result, true);
}

// `dtype` is an index of kDTypeNames.
nb::object Call::make(std::size_t dtype, std::span<const std::int64_t> shape, Fill fill) const {
  // No input, or one of a foreign dtype: the library will say so.
  if (framework_ == nullptr || is_foreign(static_cast<DType>(dtype))) return nb::none();
  PyObject* sizes = PyTuple_New(static_cast<Py_ssize_t>(shape.size()));
  if (sizes == nullptr) throw nb::python_error();
  const nb::object owner = nb::steal(sizes);
  for (std::size_t i = 0; i < shape.size(); ++i) {
    PyTuple_SetItem(sizes, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(shape[i]));
  }
  const bool zero = fill == Fill::zero;
  if (framework_->kind != Framework::Kind::other) {
    PyObject* type = framework_->dtypes[dtype];
    if (type == nullptr) {
      const bool bytes_serve = static_cast<DType>(dtype) == DType::f8_e4m3;
      throw Error(ErrorCode::invalid_argument, operation_,
                  std::string("numpy has no ") + kDTypeNames[dtype] +
                      ", which the result has: pass tensors of torch" +
                      (bytes_serve ? ", or out of uint8" : ""));
    }
    const nb::handle function(zero ? framework_->zeros : framework_->empty);
    if (framework_->kind == Framework::Kind::numpy) return function(owner, nb::handle(type));
    const nb::object device = first_.attr("device");  // torch's default may be another
    std::optional<TorchStream> current;
    if (explicit_stream_ && device_.type != DeviceType::cpu) {
      current.emplace(options_.stream, device);
    }
    return function(*owner, nb::arg("dtype") = nb::handle(type), nb::arg("device") = device);
  }
  return of_framework(zero ? "zeros" : "empty")(
      owner, nb::arg("dtype") = of_framework(kDTypeNames[dtype]));
}

// A function or dtype of the module of the first input, whose tensors outputs become.
nb::object Call::of_framework(const char* name) const {
  try {
    return namespace_of(first_).attr(name);
  } catch (const nb::python_error& error) {
    if (passes_unchanged(error)) throw;
    fail("out", "a tensor to write into, or inputs whose module has " + std::string(name),
         kind_of(first_) + ": " + first_line(error));
  }
}

Exporter Call::exporter() const {
  if (!first_.is_valid()) return {};
  if (framework_->kind == Framework::Kind::other) return Exporter(of_framework("from_dlpack"));
  return Exporter(*framework_);
}

bool Call::lends_scratch() const {
  return !options_.dry_run && device_.type == DeviceType::cuda && framework_ != nullptr &&
         framework_->kind == Framework::Kind::torch;
}

RunOptions Call::run_options() const {
  RunOptions options = options_;
  const Device device = home_.value_or(device_);
  if (options.dry_run || explicit_stream_ || device.type == DeviceType::cpu) return options;
  const Framework* framework = framework_;
  if (home_ && (framework == nullptr || device_.type == DeviceType::cpu)) {
    const nb::object tensor = type_in(imported("torch"), "Tensor");
    if (!tensor.is_valid()) return options;
    framework = &framework_of_type(reinterpret_cast<PyTypeObject*>(tensor.ptr()));
  }
  if (framework != nullptr && framework->api != nullptr &&
      framework->api->current_stream(dlpack::kCuda, device.index, &options.stream.handle) != 0) {
    throw nb::python_error();
  }
  return options;
}

}  // namespace winnow::python
