#include "winnow/python/documented.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <vector>

#include "winnow/python/framework.h"

namespace winnow::python {
namespace {

using contract::Spec;

// "a, b or c"
std::string either(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + names[i];
  }
  return text;
}

// "    q, kv: text", wrapped at 100 columns.
std::string entry(const std::string& names, const std::string& text) {
  constexpr std::size_t kColumns = 100;
  std::string line = "    " + names + ":", entry;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    if (line.size() + 1 + word.size() > kColumns) {
      entry += line + "\n";
      line = "       ";
    }
    line += " " + word;
    begin = end + 1;
  }
  return entry + line + "\n";
}

std::string text_of(const Spec& spec, std::span<const Spec> specs) {
  std::string text(spec.note);
  if (spec.role != contract::Role::value) {
    text =
        shapes_of(spec) + ", " + dtypes_of(spec, specs, true) + (text.empty() ? "" : ": ") + text;
  }
  return text + ".";
}

}  // namespace

std::string shapes_of(const Spec& spec) {
  std::string text = in_words(spec.extents);
  if (spec.other.rank >= 0) text += " or " + in_words(spec.other);
  return text;
}

std::string dtypes_of(const Spec& spec, std::span<const Spec> specs, bool of_python) {
  const contract::Dtypes& dtypes = spec.dtypes;
  const auto name = [&](DType dtype) {
    return std::string(of_python ? kDTypeNames[static_cast<std::size_t>(dtype)] : to_string(dtype));
  };
  std::vector<std::string> all, cpu;
  bool with_f64 = false;
  if (spec.follows >= 0) {
    const contract::Dtypes& leader = specs[static_cast<std::size_t>(spec.follows)].dtypes;
    for (const auto follow : dtypes.follows) {
      if (follow == nullptr) continue;
      const bool sums = follow == accumulator_of;
      all.push_back(sums ? name(DType::f32) : "as " + std::string(dtypes.of));
      with_f64 |= sums && std::ranges::find(leader.list, DType::f64) != leader.list.end();
    }
  }
  for (int i = 0; i < dtypes.count; ++i) {
    const auto end = dtypes.gpu.begin() + dtypes.gpu_count;
    const bool everywhere =
        dtypes.gpu_count == 0 || std::find(dtypes.gpu.begin(), end, dtypes.list[i]) != end;
    (everywhere ? all : cpu).push_back(name(dtypes.list[i]));
  }
  std::string text = either(all);
  if (!cpu.empty()) text += "; on the CPU also " + either(cpu);
  if (with_f64 && !of_python) text += "; f64 with f64";
  return text;
}

std::string documented(std::string_view doc, std::span<const std::string_view> parameters,
                       std::span<const Spec> specs) {
  constexpr std::string_view kArgs = "Args:\n";
  const std::size_t begin = doc.find(kArgs) + kArgs.size();
  const std::size_t end = std::min(doc.find("\n\n", begin), doc.size() - 1) + 1;
  std::map<std::string_view, std::string> own;  // the entries of `doc` by their first names
  std::vector<std::string_view> named;          // all names in them
  for (std::size_t at = begin; at < end;) {
    std::size_t next = doc.find('\n', at) + 1;
    while (next < end && doc.substr(next).starts_with("     ")) next = doc.find('\n', next) + 1;
    std::string_view names = doc.substr(at, doc.find(':', at) - at);
    names.remove_prefix(names.find_first_not_of(' '));
    const std::string_view first = names.substr(0, names.find(','));
    own[first] = doc.substr(at, next - at);
    for (std::size_t name = 0; name < names.size();) {
      const std::size_t comma = std::min(names.find(", ", name), names.size());
      named.push_back(names.substr(name, comma - name));
      name = comma + 2;
    }
    at = next;
  }

  std::string text(doc.substr(0, begin)), together;
  for (const std::string_view parameter : parameters) {
    const bool has_own = std::ranges::find(named, parameter) != named.end();
    const auto spec = std::ranges::find(specs, parameter, &Spec::name);
    const bool has_note = spec != specs.end() && !spec->note.empty();
    if (has_own == has_note) {
      throw std::logic_error(std::string(parameter) + " is described twice or not at all in: " +
                             std::string(doc.substr(0, doc.find('\n'))));
    }
    if (has_own) {
      text += own[parameter];  // nothing unless the parameter is the first of its entry
    } else if (spec->note == contract::kWithNext) {
      together += std::string(parameter) + ", ";
    } else {
      text += entry(together + std::string(parameter), text_of(*spec, specs));
      together.clear();
    }
  }
  return text + std::string(doc.substr(end));
}

}  // namespace winnow::python
