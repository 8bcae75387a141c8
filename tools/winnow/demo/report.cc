#include "tools/winnow/demo/report.h"

#include <algorithm>
#include <ostream>

#include "tools/winnow/demo/text_format.h"
#include "tools/winnow/printable.h"
#include <nlohmann/json.hpp>

namespace winnow::demo {
namespace {

constexpr int kNameWidth = 13;
constexpr int kSizeWidth = 56;

std::string verdict(bool passed) { return passed ? "ok" : "FAILED"; }

nlohmann::ordered_json to_json(const Figures& figures);

struct ToJson {
  nlohmann::ordered_json operator()(const std::vector<Figures>& records) const {
    nlohmann::ordered_json result = nlohmann::ordered_json::array();
    for (const Figures& record : records) result.push_back(to_json(record));
    return result;
  }
  template <class Value>
  nlohmann::ordered_json operator()(const Value& value) const {
    return value;
  }
};

nlohmann::ordered_json to_json(const Figures& figures) {
  nlohmann::ordered_json result = nlohmann::ordered_json::object();
  for (const Figure& figure : figures) {
    result[figure.name] = std::visit(ToJson{}, figure.value);
  }
  return result;
}

}  // namespace

void StepReport::at_most(const std::string& what, double value, double limit) {
  checks_.push_back({what, format_text("%.3g, at most %.3g", value, limit), value <= limit});
}

void StepReport::at_least(const std::string& what, double value, double limit) {
  checks_.push_back({what, format_text("%.3g, at least %.3g", value, limit), value >= limit});
}

void StepReport::require(const std::string& what, bool passed) {
  checks_.push_back({what, passed ? "yes" : "no", passed});
}

bool StepReport::passed() const {
  return std::all_of(checks_.begin(), checks_.end(),
                     [](const Check& check) { return check.passed; });
}

void print_step(std::ostream& out, int number, const StepReport& step) {
  if (number == 1) {
    out << format_text("   %-*s%-*s%9s  checks\n", kNameWidth, "step", kSizeWidth, "size", "time");
  }
  out << format_text("%2d %-*s%-*s%7.2f s  %s\n", number, kNameWidth, step.name.c_str(), kSizeWidth,
                     step.size.c_str(), step.seconds, verdict(step.passed()).c_str());
  const std::string indent(3 + kNameWidth, ' ');
  for (const std::string& sentence : step.done) out << indent << cli::printable(sentence) << "\n";
  for (const Check& check : step.checks()) {
    out << indent << format_text("%-7s", verdict(check.passed).c_str()) << check.what << ": "
        << check.found << "\n";
  }
  out << "\n" << std::flush;
}

void print_changes(std::ostream& out, const std::vector<Change>& changes) {
  out << format_text("   %-*s%10s%10s\n", kNameWidth + 30, "training", "before", "after");
  for (const Change& change : changes) {
    out << format_text("   %-*s%10.4f%10.4f   %s", kNameWidth + 30, change.what.c_str(),
                       change.before, change.after, change.note.c_str())
        << "\n";
  }
  out << "\n";
}

nlohmann::ordered_json to_json(const StepReport& step) {
  nlohmann::ordered_json checks = nlohmann::ordered_json::array();
  for (const Check& check : step.checks()) {
    checks.push_back({{"what", check.what}, {"found", check.found}, {"ok", check.passed}});
  }
  return {{"name", step.name},
          {"size", step.size},
          {"seconds", step.seconds},
          {"ok", step.passed()},
          {"done", step.done},
          {"checks", checks},
          {"numbers", to_json(step.numbers)}};
}

}  // namespace winnow::demo
