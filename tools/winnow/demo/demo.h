// `winnow demo`: a sparse attention layer over a real document learns where to look.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>

#include "tools/winnow/demo/text_reader.h"

namespace winnow::demo {

// The options' ranges.
inline constexpr std::int64_t kMinTokens = static_cast<std::int64_t>(kMinDocumentBytes);
inline constexpr std::int64_t kMaxTokens = 8192;
inline constexpr std::int64_t kMinSteps = 50;
inline constexpr std::int64_t kMaxRanks = 32;

enum class DeviceChoice { automatic, cpu, cuda };

// "auto", "cpu" or "cuda". Errors (winnow::Error): anything else, naming the choices.
DeviceChoice device_choice_from_string(const std::string& name);

struct DemoOptions {
  std::optional<std::string> file;  // the document; default_document if absent
  std::string default_document;     // path
  DeviceChoice device = DeviceChoice::automatic;
  std::string out_dir = "winnow-demo";  // for the pictures; created if missing
  bool json = false;                    // one JSON object on `out` and nothing else there
  bool progress = false;                // a line on `err` that overwrites itself: for terminals
  std::int64_t tokens = 2048;           // bytes of the document that are used at most
  std::int64_t steps = 200;             // of training; at least 50
  std::int64_t ranks = 4;               // of the mixture of experts; 1 to 32
};

inline constexpr int kExitOk = 0;
inline constexpr int kExitCheckFailed = 1;

// Runs every step and prints what each did. Returns kExitOk, or kExitCheckFailed if a check of a
// step failed. Errors (winnow::Error), before the work begins: options out of range, a document
// that cannot be used, a device that this build or machine does not have, a directory that cannot
// be written to.
int run_demo(const DemoOptions& options, std::ostream& out, std::ostream& err);

}  // namespace winnow::demo
