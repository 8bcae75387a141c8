// What the steps of the demo tell: on the terminal, or as one JSON object.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <variant>
#include <vector>

#include <nlohmann/json_fwd.hpp>  // the whole of it takes the compiler two seconds

namespace winnow::demo {

// A figure for programs: what the steps write where JSON will stand.
struct Figure;
using Figures = std::vector<Figure>;
struct Figure {
  std::string name;
  std::variant<bool, std::int64_t, double, std::string, std::vector<double>, std::vector<Figures>>
      value;
};

struct Check {
  std::string what;
  std::string found;  // "1.2e-07, at most 2e-05"
  bool passed = false;
};

// Filled in by a step.
class StepReport {
 public:
  std::string name;
  std::string size;               // "2048 tokens, 16 heads"
  std::vector<std::string> done;  // sentences
  double seconds = 0;
  Figures numbers;

  // NaN passes neither.
  void at_most(const std::string& what, double value, double limit);
  void at_least(const std::string& what, double value, double limit);
  void require(const std::string& what, bool passed);

  bool passed() const;
  const std::vector<Check>& checks() const { return checks_; }

 private:
  std::vector<Check> checks_;
};

// A quantity of the summary before and after training.
struct Change {
  std::string what;
  double before = 0;
  double after = 0;
  std::string note;  // "best possible 0.81"; may be empty
};

// The first step comes below the titles of the columns.
void print_step(std::ostream& out, int number, const StepReport& step);
void print_changes(std::ostream& out, const std::vector<Change>& changes);
nlohmann::ordered_json to_json(const StepReport& step);

}  // namespace winnow::demo
