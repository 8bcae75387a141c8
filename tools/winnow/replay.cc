// `winnow replay`: repeats a recorded call and compares what it writes with what was written then.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <type_traits>

#include "tools/winnow/commands.h"
#include "tools/winnow/demo/text_format.h"
#include "tools/winnow/printable.h"
#include "tools/winnow/replay_file.h"

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/core/extent.h"
#include "winnow/core/record.h"
#include "winnow/testing/compare.h"
#include "winnow/testing/operation.h"

namespace winnow::cli {
namespace {

template <class... Values>
void print(const char* format, const Values&... values) {
  std::cout << demo::format_text(format, values...);
}

[[noreturn]] void refuse(const std::string& wanted, const std::string& got) {
  throw Error(ErrorCode::invalid_argument, "replay", "FILE", wanted, got);
}

// The memory of a recorded tensor on `device`.
class Copy {
 public:
  Copy(const RecordedTensor& tensor, Device device) : layout_(tensor.layout) {
    const Extent extent = extent_of(layout_);
    memory_ = Tensor(DType::u8, {std::max<std::int64_t>(extent.bytes, 1)}, device);
    if (!tensor.before.empty()) {
      copy_between(memory_.data(), device, tensor.before.data(), Device{}, tensor.before.size());
    }
    offset_ = extent.offset;
    layout_.device = device;
  }
  TensorView view() { return view_of(memory_); }
  // A copy on the host.
  ConstTensorView on_host() {
    host_ = memory_.to(Device{});
    return view_of(host_);
  }
  // Of the recorded bytes, laid out like this.
  ConstTensorView view_of(const std::vector<char>& bytes) const {
    return {bytes.data() + offset_, layout_.dtype, shape(), strides(), Device{}};
  }

 private:
  std::span<const std::int64_t> shape() const {
    return {layout_.shape.data(), std::size_t(layout_.rank)};
  }
  std::span<const std::int64_t> strides() const {
    return {layout_.strides.data(), std::size_t(layout_.rank)};
  }
  TensorView view_of(Tensor& memory) const {
    char* data = static_cast<char*>(memory.data()) + offset_;
    return {data, layout_.dtype, shape(), strides(), memory.device()};
  }
  detail::TensorLayout layout_;
  Tensor memory_, host_;
  std::int64_t offset_ = 0;
};

using Copies = std::map<std::string, std::unique_ptr<Copy>>;

// What the record has under the names of the arguments.
class Recorded : public testing::NamedArguments {
 public:
  Recorded(const CallRecord& record, Copies& copies) : record_(record), copies_(copies) {}

  TensorView tensor(std::string_view name) const override {
    taken_.emplace(name);
    const auto found = copies_.find(std::string(name));
    return found == copies_.end() ? TensorView() : found->second->view();
  }
  bool has(std::string_view name) const override { return !text(name).empty(); }
  double number(std::string_view name) const override {
    return converted(
        name, [](const std::string& given, std::size_t* end) { return std::stod(given, end); });
  }
  std::int64_t integer(std::string_view name) const override {
    return converted(
        name, [](const std::string& given, std::size_t* end) { return std::stoll(given, end); });
  }
  // What the call has not taken it has not checked either: neither its memory nor its size is
  // that of a result.
  void refuse_others() const {
    for (const auto& [name, copy] : copies_) {
      if (!taken_.contains(name)) refuse("tensors of " + record_.operation, printable(name));
    }
  }

 private:
  const std::string& text(std::string_view name) const {
    const auto found = record_.values.find(std::string(name));
    if (found == record_.values.end()) {
      refuse("an argument \"" + std::string(name) + "\"", "a record of Winnow " + record_.library);
    }
    return found->second;
  }
  template <class Convert>
  std::invoke_result_t<Convert, std::string, std::size_t*> converted(std::string_view name,
                                                                     const Convert& convert) const {
    try {
      std::size_t end = 0;
      const auto value = convert(text(name), &end);
      if (end == text(name).size()) return value;
    } catch (const std::logic_error&) {  // of stod() and stoll()
    }
    refuse("a number for \"" + std::string(name) + "\"", "\"" + printable(text(name)) + "\"");
  }

  const CallRecord& record_;
  Copies& copies_;
  mutable std::set<std::string, std::less<>> taken_;
};

const testing::Operation& operation_of(const CallRecord& record) {
  for (const testing::Operation& operation : testing::operations()) {
    if (operation.name == record.operation && operation.repeat) return operation;
  }
  refuse("an operation of Winnow", record.operation);
}

// Every element's bytes, in row-major order.
std::string bits(const ConstTensorView& view) {
  const std::int64_t size = size_of(view.dtype()), count = view.numel();
  std::string all;
  all.reserve(static_cast<std::size_t>(count * size));
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t rest = i, position = 0;
    for (int d = view.rank() - 1; d >= 0; --d) {
      position += rest % view.size(d) * view.stride(d);
      rest /= view.size(d);
    }
    all.append(static_cast<const char*>(view.data()) + position * size, std::size_t(size));
  }
  return all;
}

// Prints how an output compares; whether it is the same within the tolerance.
bool compare_output(const std::string& name, const ConstTensorView& now,
                    const ConstTensorView& then, double tolerance) {
  const std::string now_bits = bits(now), then_bits = bits(then);
  if (now_bits == then_bits) {
    print("%-14s %s: the same bits\n", name.c_str(), to_string(now).c_str());
    return true;
  }
  if (now.dtype() == DType::u8) {
    std::int64_t different = 0;
    for (std::size_t i = 0; i < now_bits.size(); ++i) different += now_bits[i] != then_bits[i];
    print("%-14s %s: %lld bytes differ\n", name.c_str(), to_string(now).c_str(),
          static_cast<long long>(different));
    return false;
  }
  const std::vector<double> a = testing::read(now), b = testing::read(then);
  double largest = 0, difference = 0;
  std::int64_t specials = 0;  // NaN or infinity where the other has none, or another
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isfinite(a[i]) && std::isfinite(b[i])) {
      largest = std::max(largest, std::abs(b[i]));
      difference = std::max(difference, std::abs(a[i] - b[i]));
    } else {
      specials += !(a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])));
    }
  }
  const double relative = largest > 0 ? difference / largest : difference;
  print("%-14s %s: largest difference %.3g of the largest magnitude%s\n", name.c_str(),
        to_string(now).c_str(), relative,
        specials == 0 ? "" : "; NaN or infinity elsewhere than then");
  const bool whole = now.dtype() == DType::i32 || now.dtype() == DType::i64;
  return specials == 0 && relative <= (whole ? 0 : tolerance);
}

}  // namespace

int run_replay(const ReplayOptions& options) {
  const CallRecord record = read_record(options.file);
  const testing::Operation& operation = operation_of(record);
  Device recorded_on;
  for (const auto& [name, tensor] : record.tensors) {
    if (tensor) recorded_on = tensor->layout.device;
  }
  RunWhere where = options.where;
  if (where.device == "auto") where.device = recorded_on.type == DeviceType::cpu ? "cpu" : "cuda";
  if (where.backend.empty() && record.backend && options.where.device == "auto") {
    where.backend = std::string(to_string(*record.backend));
  }
  const testing::Target target = make_target("replay", where);
  const Device device{target.device, 0};
  print("%s, recorded with Winnow %s: %s\n", record.operation.c_str(),
        printable(record.library).c_str(),
        record.result.empty() ? "it never ended" : printable(record.result).c_str());

  Copies copies;
  for (const auto& [name, tensor] : record.tensors) {
    if (tensor) copies[name] = std::make_unique<Copy>(*tensor, device);
  }
  RunOptions run = target.options;
  run.check = record.check || options.check;
  const Recorded recorded(record, copies);
  const std::function<Backend()> call = operation.repeat(recorded, run);
  recorded.refuse_others();
  const auto start = std::chrono::steady_clock::now();
  Backend backend{};
  try {
    backend = call();
    synchronize(device);
  } catch (const Error& error) {
    print("it fails: %s\n", printable(error.what()).c_str());
    const bool as_then = record.result == "error " + in_one_line(error.what());
    if (as_then) print("as it did then\n");
    return as_then ? kOk : kCheckFailed;
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  print("now: %s, %.3f ms\n", std::string(to_string(backend)).c_str(), seconds * 1e3);
  if (record.result.empty()) return kOk;
  if (record.result.starts_with("error")) {
    print("it works now\n");
    return kCheckFailed;
  }
  bool same = true;
  for (const auto& [name, tensor] : record.tensors) {
    if (!tensor || !tensor->output || name == "workspace" || tensor->after.empty()) continue;
    Copy& copy = *copies[name];
    same = compare_output(printable(name), copy.on_host(), copy.view_of(tensor->after),
                          options.tolerance) &&
           same;
  }
  return same ? kOk : kCheckFailed;
}

}  // namespace winnow::cli
