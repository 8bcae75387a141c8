// The extension module winnow._winnow: the operations of every room, and the library's settings.
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include "winnow/core/error.h"
#include "winnow/core/interrupt.h"
#include "winnow/core/nearest.h"
#include "winnow/core/parallel.h"
#include "winnow/core/version.h"
#include "winnow/expert_parallel/transport/fault.h"
#include "winnow/python/bindings.h"
#include "winnow/python/call.h"
#include "winnow/python/lock.h"
#include "winnow/python/operation.h"
#include "winnow/python/text.h"

namespace winnow::python {
namespace {

const char* name_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "invalid_argument";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::resource:
      return "resource";
    case ErrorCode::timeout:
      return "timeout";
    case ErrorCode::internal:
      return "internal";
  }
  return "internal";
}

const char* name_of(ErrorReason reason) {
  switch (reason) {
    case ErrorReason::none:
      return "";
    case ErrorReason::arguments_differ:
      return "arguments_differ";
    case ErrorReason::call_order:
      return "call_order";
    case ErrorReason::two_callers:
      return "two_callers";
    case ErrorReason::absent:
      return "absent";
    case ErrorReason::peer_gone:
      return "peer_gone";
    case ErrorReason::interrupted:
      return "interrupted";
  }
  return "";
}

// The text of an Error. If indices have 64 bits, as those of torch.topk() do, it also says how to
// convert them.
std::string text_of(const Error& error) {
  const std::string text = error.what();
  const bool wide = text.ends_with("want dtype i32, got i64");
  return wide ? text + "; .int() converts a tensor of torch, .astype('int32') an array" : text;
}

std::string without_suggestion(const std::string& got) {
  return got.substr(0, got.find("; did you mean "));
}

// winnow::Error becomes an exception of winnow.errors with its text and fields.
void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const bool invalid = error.code() == ErrorCode::invalid_argument;
    const nb::object type =
        nb::module_::import_("winnow.errors").attr(invalid ? "InvalidArgument" : "Error");
    const nb::object exception = type(text_of(error));
    exception.attr("operation") = error.operation();
    exception.attr("code") = name_of(error.code());
    exception.attr("reason") = name_of(error.reason());
    exception.attr("argument") = error.argument();
    exception.attr("wanted") = error.details().wanted;
    exception.attr("got") = without_suggestion(error.details().got);
    exception.attr("differing") = error.details().differing;
    PyErr_SetObject(type.ptr(), exception.ptr());
  }
}

// Ctrl-C ends a call of the main thread, the only one to which Python gives signals. Other threads
// do not ask for the lock: a daemon thread may never get it once the interpreter is ending.
void check_signals() {
  if (gettid() != getpid() || !nb::is_alive()) return;
  const Locked locked;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// What winnow.supports() can be asked, in the order of the names.
std::map<std::string, Supports> askable() {
  std::map<std::string, Supports> all = {
      {"expert_parallel.combine", supports_expert_parallel_combine},
      {"expert_parallel.dispatch", supports_expert_parallel_dispatch},
      {"expert_parallel.low_latency", supports_expert_parallel_low_latency},
      {"expert_parallel.notify", supports_expert_parallel_notify}};
  for (const auto& [name, operation] : registered_operations()) all[name] = operation.supports;
  return all;
}

// The backend that would run, or empty with the reason why none would.
std::tuple<std::string, std::string> supports(nb::handle op, nb::handle dtype, nb::handle device,
                                              nb::handle backend, nb::dict sizes) {
  Shape shape(std::move(sizes));
  shape.dtype = dtype_argument("supports", "dtype", dtype);
  shape.device = device_argument("supports", device);
  RunOptions options{.backend = optional_backend("supports", backend), .dry_run = true};
  const std::string operation = python::text_of(op);
  std::vector<std::string> names;
  std::string known;
  for (const auto& [name, ask] : askable()) {
    names.push_back(name);
    known += (known.empty() ? "" : ", ") + name;
    if (operation != name) continue;
    try {
      return {std::string(to_string(ask(shape, options))), ""};
    } catch (const Error& error) {
      return {"", error.what()};
    }
  }
  throw Error(ErrorCode::invalid_argument, "supports", "op", "one of " + known,
              operation + suggestion(operation, names));
}

nb::list list_backends() {
  nb::list list;
  for (const BackendStatus& status : backends()) {
    nb::dict entry;
    entry["name"] = std::string(to_string(status.backend));
    entry["description"] = status.description;
    entry["supported"] = status.supported;
    entry["reason"] = status.reason;
    list.append(entry);
  }
  return list;
}

// Splits the message of an Error, such as one that another rank reported, into the name of the
// argument, what was wanted of it, and what was given.
std::tuple<std::string, std::string, std::string> details_of(const std::string& message) {
  const ErrorDetails details = expert_parallel::details_of(message);
  return {details.argument, details.wanted, without_suggestion(details.got)};
}

}  // namespace

template <class T>
T Shape::take(const char* name, std::type_identity_t<T> otherwise) {
  if (!sizes_.contains(name)) return otherwise;
  const nb::object size = sizes_[name];
  PyDict_DelItemString(sizes_.ptr(), name);
  const auto value = value_argument<T>("supports", name, size);
  if (value < 0) refuse_argument("supports", name, "0 or more", size);
  return value;
}
template std::int64_t Shape::take<std::int64_t>(const char* name, std::int64_t otherwise);
template int Shape::take<int>(const char* name, int otherwise);

std::int64_t Shape::size(std::string_view name, std::int64_t otherwise) {
  const auto found = known_.find(name);
  if (found != known_.end()) return found->second;
  const std::string text(name);
  return known_[text] = take(text.c_str(), otherwise);
}

std::int64_t Shape::known(std::string_view name, std::int64_t otherwise) const {
  const auto found = known_.find(name);
  return found == known_.end() ? otherwise : found->second;
}

void Shape::done() const {
  for (const auto [name, size] : sizes_) {
    throw nb::type_error(
        ("supports: unknown size " + nb::cast<std::string>(nb::repr(name))).c_str());
  }
}

TensorView without_memory(DType type, std::span<const std::int64_t> shape, Device device) {
  return {nowhere(), type, shape, device};
}

NB_MODULE(_winnow, m) {
  m.doc() = "The C++ library; use it through the package winnow.";
  nb::register_exception_translator(translate);
  set_interrupt_hook(check_signals);
  // A layer may be alive when the interpreter ends, in a global or a graph of torch.
  nb::set_leak_warnings(false);
  m.attr("__version__") = WINNOW_VERSION;

  std::map<std::string, nb::module_> families;
  for (const auto& [name, text] :
       {std::pair("sparse_mla", "Top-k sparse MLA attention."),
        std::pair("indexer", "The lightning indexer."),
        std::pair("compressor", "Rows that stand for several tokens each."),
        std::pair("paged_xl", "Decode with Transformer-XL positions."),
        std::pair("expert_parallel", "The all-to-all of mixtures of experts.")}) {
    families.emplace(name, m.def_submodule(name, text));
  }
  nb::module_& expert_parallel = families.at("expert_parallel");
  bind_expert_parallel_transport(expert_parallel);
  bind_expert_parallel_descriptor(expert_parallel);
  bind_expert_parallel_all_to_all(expert_parallel);
  bind_expert_parallel_notify(expert_parallel);
  bind_expert_parallel_low_latency(expert_parallel);
  bind_expert_parallel_sizes(expert_parallel);
  nb::dict by_position, arguments;
  for (const auto& [name, operation] : registered_operations()) {
    operation.bind(families.at(name.substr(0, name.find('.'))));
    by_position[name.c_str()] = operation.by_position();
    nb::list rows;
    for (const contract::Spec& spec : operation.arguments) {
      if (spec.role == contract::Role::value) continue;
      rows.append(nb::make_tuple(std::string(spec.name), shapes_of(spec),
                                 dtypes_of(spec, operation.arguments, false),
                                 spec.optional && !spec.described));
    }
    arguments[operation.operation] = rows;
  }
  // (name, shape, dtype, whether it is optional by the table and not by a rule, as described() ones
  // are) of tensors. A test compares them with the pages.
  m.attr("tensors_of") = arguments;
  // For the torch operators.
  m.attr("by_position") = by_position;
  m.def(
      "_dry_run",
      [](const nb::callable& function, const nb::args& values) {
        const DryRun dry;
        return function(*values);
      },
      nb::arg("function"), nb::arg("values"));
  m.def("_in_dry_run", DryRun::running);
  m.attr("OF_A_CALL") = nb::tuple(nb::cast(std::vector<std::string>(kOfACall, std::end(kOfACall))));

  define<"def backends() -> list[dict[str, typing.Any]]">(
      m, list_backends,
      "Every backend in order of priority: dicts with name, description, supported and the\n"
      "reason where it is not.");
  define<"def num_threads() -> int">(
      m, num_threads,
      "Threads that a call on the CPU may use: what set_num_threads() said, else\n"
      "WINNOW_NUM_THREADS, else OMP_NUM_THREADS, else one for each processor allowed.\n"
      "torch.set_num_threads() does not change it.");
  define<"def set_num_threads(count: int) -> None">(
      m, set_num_threads,
      "Sets it for the whole process, from the next call on. ValueError below 1.");
  m.def("supports", supports, nb::arg("op"), nb::arg("dtype"), nb::arg("device"),
        nb::arg("backend").none(), nb::arg("sizes"));
  m.def("details_of", details_of, nb::arg("message"));
}

}  // namespace winnow::python
