#include "tools/winnow/target.h"

#include <optional>

#include "tools/winnow/demo/text_format.h"

namespace winnow::cli {

using nlohmann::ordered_json;

std::span<const GpuTarget> gpu_targets() { return {}; }

void judge(const testing::Operation& operation, const testing::Benchmark& benchmark,
           std::string_view gpu, ordered_json& result, std::span<const GpuTarget> others) {
  std::optional<double> ratio, seconds;
  ordered_json gpus = ordered_json::array();
  if (benchmark.target || benchmark.target_seconds) {
    const std::string_view on = benchmark.device == DeviceType::cuda ? kReferenceGpu : "";
    gpus.push_back(on);
    if (gpu == on) {
      ratio = benchmark.target;
      seconds = benchmark.target_seconds;
    }
  }
  for (const GpuTarget& other : others) {
    if (other.operation != operation.name || other.benchmark != benchmark.name) continue;
    gpus.push_back(other.gpu);
    if (gpu == other.gpu) ratio = other.ratio;
  }
  if (ratio) {
    result["target"] = *ratio;
    result["reached"] = result["ratio"].get<double>() >= *ratio;
  } else if (seconds) {
    result["target_seconds"] = *seconds;
    result["reached"] = result["seconds"].get<double>() <= *seconds;
  } else if (!gpus.empty()) {
    result["target_gpus"] = gpus;
  }
}

std::string verdict(const ordered_json& result) {
  if (result.contains("target_gpus")) return "no target for this GPU";
  if (!result.contains("reached")) return "";
  const std::string promised =
      result.contains("target")
          ? demo::format_text("%.0f %% ", 100 * result["target"].get<double>())
          : demo::format_text("%.1f us ", 1e6 * result["target_seconds"].get<double>());
  return promised + (result["reached"] ? "reached" : "MISSED");
}

}  // namespace winnow::cli
