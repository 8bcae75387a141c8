// The contract of an operation: a table that says of each argument, beside its struct, what it is.
// From it follow the checks at the entry point, the refusal of overlaps, the names in logs and
// records, what winnow.supports() describes, new results in Python, and the arguments in
// docstrings; a test compares the tables of the pages with it. Internal.
//
//   struct ForwardTable {
//     using Args = ForwardArgs;
//     static constexpr const char* kOperation = "sparse_mla::forward";
//     static consteval auto entries() {
//       return std::tuple(
//           input<&Args::q>("[s_q, h_q=64, d_qk]", any_of(DType::f32, DType::bf16), "queries"),
//           rule<check_width>,
//           value<&Args::scale>("of the logits"),
//           output<&Args::out>("[s_q, h_q, d_v:512]", as("q")));
//     }
//   };
//   inline constexpr Contract<ForwardTable> kForward;
//
// The order is that of the checks. The first tensor that names a size gives it, after its rank has
// been checked; the shapes of later ones must agree. A field that the table leaves out does not
// compile. What no row can say is a rule: a function of the room.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "winnow/core/check.h"
#include "winnow/core/contract_table.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::contract {

// Goes through the tensors of one call, in the order of the table.
class WINNOW_EXPORT Checker {
 public:
  Checker(std::string_view operation, std::span<const Spec> specs)
      : check(operation), specs_(specs) {}
  void rank(std::size_t place, const ConstTensorView& view);
  void tensor(std::size_t place, const ConstTensorView& view);
  void value(std::size_t place, std::int64_t value) {
    for (const Dimension& dim : specs_[place].extents.view()) sizes_.take(dim, value);
  }

  const Check check;

 private:
  std::span<const Spec> specs_;
  std::optional<Device> device_;  // of the first tensor, and of all
  Sizes sizes_;
  std::array<DType, kMostArguments> dtypes_{};
  std::array<bool, kMostArguments> given_{};
};

// No output shares memory with another tensor. `tensors` are in the order of the table.
WINNOW_EXPORT void refuse_overlaps(std::string_view operation, std::span<const Spec> specs,
                                   std::span<const Named> tensors);

template <class T>
inline constexpr bool kIsTensor =
    std::is_same_v<T, ConstTensorView> || std::is_same_v<T, TensorView>;

namespace detail {

// How many members an aggregate has.
struct Anything {
  template <class T>
  operator T() const;  // NOLINT: implicit on purpose
};
template <class T, std::size_t kCount = kMostArguments>
consteval std::size_t members_of() {
  constexpr bool kTakes = []<std::size_t... kN>(std::index_sequence<kN...>) {
    return requires { T{(void(kN), Anything{})...}; };
  }(std::make_index_sequence<kCount>());
  if constexpr (kTakes) {
    return kCount;
  } else {
    return members_of<T, kCount - 1>();
  }
}

template <class Entry>
inline constexpr bool kIsField = false;
template <auto kMember>
inline constexpr bool kIsField<Field<kMember>> = true;

}  // namespace detail

// Whether the table has a row for each field.
template <class Table>
consteval bool complete() {
  const std::size_t rows = std::apply(
      [](const auto&... entry) {
        return (std::size_t{detail::kIsField<std::decay_t<decltype(entry)>>} + ...);
      },
      Table::entries());
  return rows == detail::members_of<typename Table::Args>();
}

// A contract goes by the name of its table, so that errors of the compiler stay short.
template <class Table, class = decltype(Table::entries())>
class Contract;
template <class Table, class... Entries>
class Contract<Table, std::tuple<Entries...>> {
 public:
  using Args = typename Table::Args;
  static_assert(complete<Table>(), "the table leaves out a field");
  static constexpr std::size_t kCount = (std::size_t{detail::kIsField<Entries>} + ...);

  const char* operation = Table::kOperation;
  std::array<Spec, kCount> specs{};

  consteval Contract() {
    std::size_t count = 0;
    std::apply([&](const auto&... entry) { (take(entry, count), ...); }, Table::entries());
    std::array<std::string_view, kMostSizes> names{};
    const auto size = [&](std::string_view name) {
      if (name.empty()) return -1;
      int at = 0;
      while (!names.at(at).empty() && names[at] != name) ++at;
      names[at] = name;
      return at;
    };
    for (Spec& spec : specs) {
      for (Extents* extents : {&spec.extents, &spec.other}) {
        for (int d = 0; d < extents->rank; ++d) {
          Dimension& dim = extents->dims[d];
          dim.size = size(dim.name);
          dim.second_size = size(dim.second);
          dim.third_size = size(dim.third);
        }
      }
      if (!spec.dtypes.of.empty()) spec.follows = before(spec.dtypes.of, spec);
      if (!spec.unless.empty()) spec.unless_place = before(spec.unless, spec);
    }
  }

  // The row of that name; kCount where there is none.
  constexpr std::size_t place(std::string_view name) const {
    std::size_t at = 0;
    while (at < kCount && specs[at].name != name) ++at;
    return at;
  }

  // visitor(spec, member) for every argument, in the order of the table.
  template <class Given, class Visitor>
  constexpr void visit(Given&& args, Visitor&& visitor) const {
    std::size_t at = 0;
    const auto entry = [&]<class Entry>(Entry*) {
      if constexpr (detail::kIsField<Entry>) visitor(specs[at++], args.*Entry::kPlace);
    };
    (entry(static_cast<Entries*>(nullptr)), ...);
  }

  // Those of a call that has not been checked: 0 where a tensor lacks the dimension.
  Sizes sizes(const Args& args) const {
    Sizes sizes;
    visit(args, [&]<class T>(const Spec& spec, const T& value) {
      if constexpr (std::is_same_v<T, std::int64_t>) {
        for (const Dimension& dim : spec.extents.view()) sizes.take(dim, value);
      } else if constexpr (std::is_same_v<T, std::optional<std::int64_t>>) {
        for (const Dimension& dim : spec.extents.view()) {
          if (value.has_value()) sizes.take(dim, *value);
        }
      } else if constexpr (kIsTensor<T>) {
        const std::span<const Dimension> dims = spec.shape(value.rank()).view();
        for (std::size_t d = 0; d < dims.size() && d < value.shape().size(); ++d) {
          sizes.take(dims[d], value.shape()[d]);
        }
      }
    });
    return sizes;
  }

  // The device of the first tensor, on which check() has found all others.
  Device device(const Args& args) const {
    Device device;
    bool first = true;
    visit(args, [&]<class T>(const Spec&, const T& value) {
      if constexpr (kIsTensor<T>) {
        if (std::exchange(first, false)) device = value.device();
      }
    });
    return device;
  }

  // The dtype of a new tensor for that argument.
  DType dtype(const Spec& spec, const Args& args) const {
    DType leader = spec.dtypes.list[0];
    if (spec.follows < 0) return leader;
    visit(args, [&]<class T>(const Spec& other, const T& value) {
      if constexpr (kIsTensor<T>) {
        if (&other == &specs[static_cast<std::size_t>(spec.follows)]) leader = value.dtype();
      }
    });
    return spec.dtypes.follows[0](leader);
  }

  // Throws Error naming the argument at fault. `more` goes to the rules.
  template <class... More>
  void check(const Args& args, More&... more) const {
    Checker checker(operation, specs);
    std::size_t at = 0;
    (step(static_cast<Entries*>(nullptr), checker, at, args, more...), ...);
  }

  // Throws Error where an output shares memory with another tensor. `workspace`: what the call
  // uses of it.
  void apart(const Args& args, const TensorView& workspace = {}) const {
    std::array<Named, kCount> tensors;
    std::size_t at = 0;
    visit(args, [&]<class T>(const Spec& spec, const T& value) {
      if constexpr (kIsTensor<T>) {
        tensors[at] =
            spec.role == Role::scratch ? Named(spec.name, workspace) : Named(spec.name, value);
      }
      ++at;
    });
    refuse_overlaps(operation, specs, tensors);
  }

 private:
  template <auto kMember>
  constexpr void take(const Field<kMember>& field, std::size_t& count) {
    if (place(field.spec.name) < kCount) throw "the table has an argument twice";
    specs.at(count++) = field.spec;
  }
  constexpr void take(const auto&, std::size_t&) {}
  constexpr int before(std::string_view name, const Spec& spec) const {
    const std::size_t at = place(name);
    if (at >= kCount || &specs[at] >= &spec) throw "no argument of that name stands before";
    return static_cast<int>(at);
  }

  template <auto kMember>
  static void step(Field<kMember>*, Checker& checker, std::size_t& at, const Args& args, auto&...) {
    using T = std::decay_t<decltype(args.*kMember)>;
    if constexpr (kIsTensor<T>) checker.tensor(at, args.*kMember);
    if constexpr (std::is_same_v<T, std::int64_t>) checker.value(at, args.*kMember);
    if constexpr (std::is_same_v<T, std::optional<std::int64_t>>) {
      if ((args.*kMember).has_value()) checker.value(at, *(args.*kMember));
    }
    ++at;
  }
  template <auto kFunction, auto... kMembers>
  static void step(Rule<kFunction, kMembers...>*, Checker& checker, std::size_t&, const Args& args,
                   auto&... more) {
    if constexpr (sizeof...(kMembers) > 0) {
      kFunction(checker.check, args.*kMembers...);
    } else if constexpr (requires { kFunction(checker.check, args, more...); }) {
      kFunction(checker.check, args, more...);
    } else {
      kFunction(checker.check, args);
    }
  }
  template <auto... kMembers>
  static void step(Ranks<kMembers...>*, Checker& checker, std::size_t&, const Args& args,
                   auto&...) {
    constexpr Contract kContract;  // so that the places are found when this is compiled
    (checker.rank(std::integral_constant<std::size_t, kContract.place(name_of<kMembers>())>(),
                  args.*kMembers),
     ...);
  }
};

}  // namespace winnow::contract
