// Operations as functions of Python. A room declares its operation once, as Python would:
//
//   constexpr Declaration<sparse_mla::kForward> kForward(
//       "def forward(q: T, kv: T, *, scale: float | None = None, out: T | None = None, ...) -> T");
//
// From the signature follow the parameters and their defaults, the stub and the torch operator;
// from the contract (core/contract.h) how arguments of its names are read, new results, what
// winnow.supports() describes and what the docstring says of the arguments.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include "winnow/python/bindings.h"
#include "winnow/python/call.h"
#include "winnow/python/declaration.h"
#include "winnow/python/described.h"
#include "winnow/python/documented.h"
#include "winnow/python/signature.h"

namespace winnow::python {

// How a call runs: torch operators have none of these, since they return results and use torch's
// current stream, its allocator, and the backend that the device says.
inline constexpr std::string_view kOfACall[] = {"out", "check", "workspace", "stream", "backend"};

namespace detail {

// The one of that name; throws Error where there is none.
template <class Choice>
Choice choice_of(const char* operation, std::string_view argument, const std::string& text) {
  std::string wanted;
  for (const auto& [name, choice] : Choices<Choice>::kAll) {
    if (text == name) return choice;
    const bool last = &choice == &std::rbegin(Choices<Choice>::kAll)->second;
    wanted += (wanted.empty() ? "" : last ? " or " : ", ") + std::string(name);
  }
  throw Error(ErrorCode::invalid_argument, operation, std::string(argument), wanted, text);
}

// The name of a member, as a text of C.
template <auto kMember>
inline constexpr auto kNameOf = [] {
  std::array<char, 32> text{};
  std::ranges::copy(contract::name_of<kMember>(), text.begin());
  return text;
}();

}  // namespace detail

// The arguments of one call.
template <const auto& kDeclaration>
class Arguments {
 public:
  using Args = typename std::decay_t<decltype(kDeclaration)>::Args;
  static constexpr std::size_t kCount = kDeclaration.count;

  explicit Arguments(const std::array<nb::handle, kCount>& values) : values_(values) {}

  // The one of that name as Python gave it, or as a T; a TypeError that names it where it is none.
  template <FixedString kName>
  nb::object get() const {
    return nb::borrow(values_[place<kName>()]);
  }
  template <FixedString kName, class T>
  T get() const {
    return detail::argument<T>(signature(), place<kName>(), values_[place<kName>()]);
  }

  // The call on the stream and the backend, and in checking mode, if those are parameters.
  Call call() const {
    bool check = false;
    if constexpr (kDeclaration.place("check") < kCount) check = get<"check", bool>();
    return Call(kDeclaration.operation, values_[place<"stream">()], values_[place<"backend">()],
                check);
  }

  // The arguments that the declaration and Args have in common. Outputs, and tensors that may be
  // one or the other, are left to the caller; only an annotation T of a TensorView is written to.
  Args read(Call& call) const {
    Args args;
    std::size_t field = 0;
    kDeclaration.kContract.visit(args, [&](const contract::Spec&, auto& value) {
      const std::size_t at = kPlaces[field++];
      if (at < kCount) read(call, kDeclaration.parameters[at].name.data(), at, value);
    });
    return args;
  }

  // What the call writes to: the caller's tensor, or if that is None a new one as the contract
  // describes it. `name`: as errors have it.
  template <auto kMember>
  void output(Call& call, Args& args, nb::object& result, std::optional<DType> dtype = {},
              const char* name = detail::kNameOf<kMember>.data()) const {
    constexpr const auto& kContract = kDeclaration.kContract;
    constexpr const contract::Spec& kSpec =
        kContract.specs[kContract.place(contract::name_of<kMember>())];
    if (!result.is_none()) {
      args.*kMember = call.in_out(name, result);
      return;
    }
    const contract::Sizes sizes = kContract.sizes(args);
    std::array<std::int64_t, kMaxRank> shape{};
    std::size_t rank = 0;
    for (const contract::Dimension& dim : kSpec.extents.view()) {
      shape[rank++] = std::max<std::int64_t>(sizes.of(dim).size, 0);
    }
    args.*kMember = call.output(name, result, dtype.value_or(kContract.dtype(kSpec, args)),
                                std::span(shape).first(rank));
  }

  // Runs the operation. `workspace_bytes`: of one with a workspace, which is the caller's or new.
  using Bytes = std::int64_t (*)(const Args&, const RunOptions&);
  void run(Call& call, Args& args, Backend (*operation)(const Args&, const RunOptions&),
           Bytes workspace_bytes = nullptr) const {
    nb::object workspace;  // as long as the operation runs
    if constexpr (kDeclaration.place("workspace") < kCount) {
      workspace = get<"workspace">();
      args.workspace = call.workspace(
          workspace, [&](const RunOptions& options) { return workspace_bytes(args, options); });
    }
    call.run([&](const RunOptions& options) { operation(args, options); });
  }

  static const Signature& signature() {
    static const Signature signature(kDeclaration);
    return signature;
  }

 private:
  template <FixedString kName>
  static consteval std::size_t place() {
    constexpr std::size_t kPlace = kDeclaration.place(kName);
    static_assert(kPlace < kCount, "the declaration has no parameter of that name");
    return kPlace;
  }

  template <class T>
  void read(Call& call, const char* name, std::size_t at, T& value) const {
    if constexpr (std::is_same_v<T, ConstTensorView>) {
      value = call.input(name, values_[at]);
    } else if constexpr (std::is_same_v<T, TensorView>) {
      value = call.in_out(name, values_[at]);
    } else if constexpr (std::is_enum_v<T>) {
      const auto text = detail::argument<std::string>(signature(), at, values_[at]);
      value = detail::choice_of<T>(kDeclaration.operation, name, text);
    } else {
      value = detail::argument<T>(signature(), at, values_[at]);
    }
  }

  // Where the fields of Args are among the parameters; kCount: nowhere.
  static consteval auto find_places() {
    std::array<std::size_t, kDeclaration.kMost> places{};
    std::size_t field = 0;
    kDeclaration.kContract.visit(Args(), [&]<class T>(const contract::Spec& spec, const T&) {
      const std::size_t at = kDeclaration.place(spec.name);
      const bool written = at < kCount && std::is_same_v<T, TensorView>;
      const bool left = written && kDeclaration.parameters[at].annotation != "T";
      places.at(field++) = left ? kCount : at;
    });
    return places;
  }
  static constexpr auto kPlaces = find_places();

  std::array<nb::handle, kCount> values_;
};

// What the rooms register: the functions of the module, by "sparse_mla.forward".
struct Registered {
  void (*bind)(nb::module_& m);
  nb::object (*by_position)();
  Supports supports;
  const char* operation;
  std::span<const contract::Spec> arguments;
};
inline std::map<std::string, Registered>& registered_operations() {
  static std::map<std::string, Registered> operations;
  return operations;
}

namespace detail {

// The function for torch's dispatcher, which gives all arguments but kOfACall by position and
// leaves out those at the end that have their default. What an operator has besides comes last.
template <const auto& kDeclaration, auto kFunction, std::size_t... kPlace>
nb::object by_position(std::index_sequence<kPlace...>) {
  constexpr auto kOperators = [] {
    std::pair<std::array<std::size_t, sizeof...(kPlace)>, std::size_t> kept{};
    for (std::size_t i = 0; i < sizeof...(kPlace); ++i) {
      const std::string_view name = kDeclaration.parameters[i].view();
      if (std::ranges::find(kOfACall, name) == std::end(kOfACall)) kept.first[kept.second++] = i;
    }
    return kept;
  }();
  return nb::cpp_function(
      [defaults = std::array{otherwise(kDeclaration.parameters[kPlace], missing())...},
       places = kOperators](const nb::args& given) {
        std::array<nb::handle, sizeof...(kPlace)> values{defaults[kPlace]...};
        const std::size_t count = std::min(given.size(), places.second);
        for (std::size_t i = 0; i < count; ++i) values[places.first[i]] = given[i];
        return kFunction(Arguments<kDeclaration>(values));
      });
}

}  // namespace detail

// A constant of a room: makes `kFunction`, nb::object (const Arguments<kDeclaration>&), a function
// of the module. `kDoc` describes those parameters that the contract does not. `kRun` is the
// operation in C++, which winnow.supports() runs dry; kAdjust(Shape&, Args&) changes what the
// contract cannot say of its tensors.
constexpr auto kNoAdjustment = [](Shape&, auto&) {};
template <const auto& kDeclaration, auto kFunction, const char* const& kDoc, auto kRun,
          auto kAdjust = kNoAdjustment>
struct Operation {
  Operation() {
    const std::string_view of = kDeclaration.operation;
    const std::string family(of.substr(0, of.find("::")));
    registered_operations()[family + "." + std::string(kDeclaration.name)] = {
        bind, by_position, supports, kDeclaration.operation, kDeclaration.kContract.specs};
  }
  static Backend supports(Shape& shape, const RunOptions& options) {
    return supports_described<kDeclaration>(kRun, shape, options, kAdjust);
  }
  static nb::object by_position() {
    return detail::by_position<kDeclaration, kFunction>(
        std::make_index_sequence<kDeclaration.count>());
  }
  static void bind(nb::module_& m) {
    const std::string doc =
        documented(kDoc, kDeclaration.parameter_names(), kDeclaration.kContract.specs);
    using All = Arguments<kDeclaration>;
    using Result = decltype(kFunction(std::declval<const All&>()));
    const auto function = [](auto... given) -> Result { return kFunction(All({given...})); };
    detail::Checked<Result>::template define<kDeclaration,
                                             std::array<nb::handle, kDeclaration.count>>(
        m, function, doc.c_str());
  }
};

}  // namespace winnow::python
