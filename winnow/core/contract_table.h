// What tables of contract.h are written with: a row for each argument, and rules between them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "winnow/core/check.h"
#include "winnow/core/dtype.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::contract {

inline constexpr int kMostArguments = 32, kMostSizes = 16;

// In place of a note: the next argument has the same shape and dtype, and its note is for both.
inline constexpr std::string_view kWithNext = "with next";

// The dtypes of a tensor: a list, or up to two that follow from the dtype of another argument.
struct Dtypes {
  using Follow = DType (*)(DType);
  std::array<DType, 4> list{}, gpu{};
  int count = 0, gpu_count = 0;
  bool is_asked = false;
  std::string_view of{};
  std::array<Follow, 2> follows{};

  // Those of the list that the GPU backends take, if not all.
  template <class... Types>
  consteval Dtypes on_gpu(Types... types) const {
    Dtypes dtypes = *this;
    dtypes.gpu = {types...};
    dtypes.gpu_count = sizeof...(types);
    return dtypes;
  }
  // winnow.supports() asks about the dtype of this tensor; of others it takes the first.
  consteval Dtypes asked() const {
    Dtypes dtypes = *this;
    dtypes.is_asked = true;
    return dtypes;
  }
};
template <class... Types>
consteval Dtypes any_of(Types... types) {
  return {.list = {types...}, .count = sizeof...(types)};
}
constexpr DType same(DType dtype) { return dtype; }
consteval Dtypes follows(std::string_view argument, Dtypes::Follow first,
                         Dtypes::Follow second = nullptr) {
  return {.of = argument, .follows = {first, second}};
}
consteval Dtypes as(std::string_view argument) { return follows(argument, same); }
// As sums over that argument are formed, see accumulator_of().
consteval Dtypes sums_of(std::string_view argument) { return follows(argument, accumulator_of); }

// A dimension, from its text: a number, or
//   s_q        a size
//   h_q=64     a size for which supports() assumes 64 unless it is given one; "=name": that of
//              another size, "=8*name": a multiple of it. Calls are not restricted to it
//   d_v:512    a number with a name
//   a or b     size a, or b in a call without the argument that gives a; "a or b or c"
//   a/b        a quotient of sizes
struct Dimension {
  std::string_view text{};       // without the "=64"
  std::int64_t number = -1;      // of a fixed one
  std::string_view usual = "1";  // what supports() assumes if it is not given
  std::string_view name{}, second{}, third{};
  bool quotient = false;
  int size = -1, second_size = -1, third_size = -1;  // the places of the names in Sizes
};

struct Extents {
  std::array<Dimension, kMaxRank> dims{};
  int rank = -1;  // -1: there is no such shape

  consteval Extents() = default;
  consteval Extents(const char* text) : rank(0) {  // NOLINT: implicit on purpose
    std::string_view rest(text);
    if (!rest.starts_with('[') || !rest.ends_with(']')) throw "a shape is [a, b]";
    rest = rest.substr(1, rest.size() - 2);
    while (!rest.empty()) {
      const std::size_t comma = rest.find(", ");
      dims.at(rank++) = dimension(rest.substr(0, comma));
      rest = comma == rest.npos ? std::string_view() : rest.substr(comma + 2);
    }
  }
  constexpr std::span<const Dimension> view() const {
    return {dims.data(), static_cast<std::size_t>(rank < 0 ? 0 : rank)};
  }

 private:
  static consteval std::int64_t number_of(std::string_view text) {
    std::int64_t value = 0;
    for (const char c : text) value = c < '0' || c > '9' ? throw "no number" : value * 10 + c - '0';
    return value;
  }
  static consteval Dimension dimension(std::string_view text) {
    const auto split = [&](std::string_view sign) {
      const std::size_t at = text.find(sign);
      if (at == text.npos) return std::pair(text, std::string_view());
      return std::pair(text.substr(0, at), text.substr(at + sign.size()));
    };
    if (text.find_first_not_of("0123456789") == text.npos) {
      return {.text = text, .number = number_of(text)};
    }
    if (const auto [name, number] = split(":"); !number.empty()) {
      return {.text = name, .number = number_of(number)};
    }
    if (const auto [name, usual] = split("="); !usual.empty()) {
      return {.text = name, .usual = usual, .name = name};
    }
    if (const auto [name, other] = split(" or "); !other.empty()) {
      const std::size_t at = other.find(" or ");
      if (at == other.npos) return {.text = text, .name = name, .second = other};
      return {
          .text = text, .name = name, .second = other.substr(0, at), .third = other.substr(at + 4)};
    }
    if (const auto [name, other] = split("/"); !other.empty()) {
      return {.text = text, .name = name, .second = other, .quotient = true};
    }
    return {.text = text, .name = text};
  }
};

// "[s_q, h_q, 512]"
WINNOW_EXPORT std::string in_words(const Extents& extents);

// The sizes of one call.
class Sizes {
 public:
  bool knows(int size) const { return size < 0 || known_[static_cast<std::size_t>(size)]; }
  // The first tensor that has the size gives it.
  void take(const Dimension& dim, std::int64_t value) {
    if (dim.second_size >= 0 || knows(dim.size)) return;
    values_[static_cast<std::size_t>(dim.size)] = value;
    known_[static_cast<std::size_t>(dim.size)] = true;
  }
  bool knows(const Dimension& dim) const {
    if (knows(dim.size)) return true;
    if (dim.second_size < 0 || dim.quotient) return false;
    return knows(dim.second_size) || (dim.third_size >= 0 && knows(dim.third_size));
  }
  // With the name that a text about this call gives it.
  Dim of(const Dimension& dim) const {
    if (dim.size < 0) return {dim.text, dim.number};
    const std::int64_t value = values_[static_cast<std::size_t>(dim.size)];
    if (dim.second_size < 0) return {dim.text, value};
    const std::int64_t second = values_[static_cast<std::size_t>(dim.second_size)];
    if (dim.quotient) return {dim.text, second > 0 ? value / second : 0};
    if (knows(dim.size)) return {dim.name, value};
    if (dim.third_size < 0 || knows(dim.second_size)) return {dim.second, second};
    return {dim.third, values_[static_cast<std::size_t>(dim.third_size)]};
  }

 private:
  std::array<std::int64_t, kMostSizes> values_{};
  std::array<bool, kMostSizes> known_{};
};

enum class Role { input, output, scratch, value };

// What the table says of one argument.
struct Spec {
  std::string_view name;
  Role role = Role::value;
  bool optional = false;
  Extents extents{}, other{};
  Dtypes dtypes{};
  std::string_view note{};       // for Python's docstring
  std::string_view rank_text{};  // of an argument with two shapes, in the error for its rank
  Extents asked{};               // in place of `extents` in supports()
  bool described = false;        // optional, but in the call that supports() asks about
  bool by_rule = false;
  std::string_view unless{};
  int follows = -1, unless_place = -1;  // the places of `dtypes.of` and `unless`

  // The shape of a tensor of that rank.
  constexpr const Extents& shape(int rank) const { return rank == other.rank ? other : extents; }
};

// The name of a member, from the compiler.
template <auto kMember>
consteval std::string_view name_of() {
  std::string_view text = __PRETTY_FUNCTION__;  // "... [with auto kMember = &A::q; ...]"
  text = text.substr(text.find("kMember = "));
  text = text.substr(0, text.find_first_of(";]"));
  text = text.substr(text.rfind(':') + 1);
  return text.substr(0, text.find(')'));
}

template <auto kMember>
struct Field {
  static constexpr auto kPlace = kMember;
  Spec spec{};

  // Of that shape in place of the first, whose rank is checked with `rank_text`.
  consteval Field or_as(Extents extents, std::string_view rank_text = {}) const {
    return with([&](Spec& s) { s.other = extents, s.rank_text = rank_text; });
  }
  // Optional as far as the table goes: a rule decides. The call that supports() asks about has it.
  consteval Field described() const {
    return with([](Spec& s) { s.optional = s.described = true; });
  }
  consteval Field asked(Extents extents) const {
    return with([&](Spec& s) { s.asked = extents; });
  }
  // Rules check it, not the table.
  consteval Field by_rule() const {
    return with([](Spec& s) { s.by_rule = true; });
  }
  // Neither needed nor looked at in a call that has that argument, which stands before it.
  template <auto kOther>
  consteval Field unless() const {
    return with([](Spec& s) { s.unless = name_of<kOther>(); });
  }

 private:
  template <class Change>
  consteval Field with(const Change& change) const {
    Field field = *this;
    change(field.spec);
    return field;
  }
};
template <auto kMember>
consteval Field<kMember> field(Role role, bool optional, Extents extents, Dtypes dtypes,
                               std::string_view note) {
  return {{.name = name_of<kMember>(),
           .role = role,
           .optional = optional,
           .extents = extents,
           .dtypes = dtypes,
           .note = note}};
}
template <auto kMember>
consteval Field<kMember> input(Extents extents, Dtypes dtypes, std::string_view note) {
  return field<kMember>(Role::input, false, extents, dtypes, note);
}
template <auto kMember>
consteval Field<kMember> optional_input(Extents extents, Dtypes dtypes, std::string_view note) {
  return field<kMember>(Role::input, true, extents, dtypes, note);
}
template <auto kMember>
consteval Field<kMember> output(Extents extents, Dtypes dtypes, std::string_view note = {}) {
  return field<kMember>(Role::output, false, extents, dtypes, note);
}
template <auto kMember>
consteval Field<kMember> optional_output(Extents extents, Dtypes dtypes,
                                         std::string_view note = {}) {
  return field<kMember>(Role::output, true, extents, dtypes, note);
}
// Scratch memory: Check::workspace() checks it, where a backend wants it.
template <auto kMember>
consteval Field<kMember> scratch() {
  return field<kMember>(Role::scratch, true, "[bytes]", any_of(DType::u8), {});
}
// A number, flag or choice. `size`: it is a size of that name.
template <auto kMember>
consteval Field<kMember> value(std::string_view note, Extents size = {}) {
  return field<kMember>(Role::value, true, size, {}, note);
}

// A function (const Check&, const Args&), or of these and what the room gives to check() besides;
// where members are named: of the check and these.
template <auto kFunction, auto... kMembers>
struct Rule {};
template <auto kFunction, auto... kMembers>
inline constexpr Rule<kFunction, kMembers...> rule{};

// Checks ranks and takes sizes ahead of the place in the table, for rules in between.
template <auto... kMembers>
struct Ranks {};
template <auto... kMembers>
inline constexpr Ranks<kMembers...> ranks{};

}  // namespace winnow::contract
