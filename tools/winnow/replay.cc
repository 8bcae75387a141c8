// `winnow replay`: repeats a recorded call and compares what it writes with what was written then.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <memory>

#include "tools/winnow/commands.h"
#include "tools/winnow/demo/text_format.h"
#include "tools/winnow/printable.h"
#include "tools/winnow/replay_file.h"

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/core/extent.h"
#include "winnow/expert_parallel/layout/layout_fields.h"
#include "winnow/indexer/backward/backward_fields.h"
#include "winnow/indexer/quantize/quantize_fields.h"
#include "winnow/indexer/scores/scores_fields.h"
#include "winnow/indexer/topk/topk_fields.h"
#include "winnow/indexer/topk_paged/topk_paged_fields.h"
#include "winnow/paged_xl/attention/attention_fields.h"
#include "winnow/paged_xl/cache/append_fields.h"
#include "winnow/paged_xl/position_term/position_term_fields.h"
#include "winnow/sparse_mla/backward/backward_fields.h"
#include "winnow/sparse_mla/decode/decode_fields.h"
#include "winnow/sparse_mla/distribution/distribution_fields.h"
#include "winnow/sparse_mla/forward/forward_fields.h"
#include "winnow/sparse_mla/store/store_fields.h"
#include "winnow/testing/compare.h"

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

// Gives the arguments of a call what the record has under their names.
struct Fill {
  const CallRecord& record;
  Copies& copies;

  const std::string& text(std::string_view name) const {
    const auto found = record.values.find(std::string(name));
    if (found == record.values.end()) {
      refuse("an argument \"" + std::string(name) + "\"", "a record of Winnow " + record.library);
    }
    return found->second;
  }
  template <class Void>
  void operator()(std::string_view name, BasicTensorView<Void>& view) const {
    if (const auto found = copies.find(std::string(name)); found != copies.end()) {
      view = found->second->view();
    }
  }
  template <class T>
  void operator()(std::string_view name, std::optional<T>& value) const {
    if (text(name).empty()) return;
    T number{};
    (*this)(name, number);
    value = number;
  }
  template <class T>
    requires std::is_arithmetic_v<T> || std::is_enum_v<T>
  void operator()(std::string_view name, T& value) const {
    try {
      if constexpr (std::is_same_v<T, double>) {
        value = std::stod(text(name));
      } else {
        value = static_cast<T>(std::stoll(text(name)));
      }
    } catch (const std::exception&) {
      refuse("a number for \"" + std::string(name) + "\"", "\"" + text(name) + "\"");
    }
  }
};

// A call that is ready to be made. Throws Error where the record does not fit the operation.
using Repeat = std::function<std::function<Backend()>(const Fill&, const RunOptions&)>;

template <class Args>
Repeat repeat(Backend (*operation)(const Args&, const RunOptions&)) {
  return [operation](const Fill& fill, const RunOptions& options) {
    Args args;
    each_argument(args, fill);
    return [operation, args, options] { return operation(args, options); };
  };
}

const std::map<std::string, Repeat>& operations() {
  static const std::map<std::string, Repeat> table = {
      {"expert_parallel::layout", repeat(expert_parallel::layout)},
      {"indexer::backward", repeat(indexer::backward)},
      {"indexer::quantize", repeat(indexer::quantize)},
      {"indexer::scores", repeat(indexer::scores)},
      {"indexer::topk", repeat(indexer::topk)},
      {"indexer::topk_paged", repeat(indexer::topk_paged)},
      {"paged_xl::append", repeat(paged_xl::append)},
      {"paged_xl::attention", repeat(paged_xl::attention)},
      {"paged_xl::position_term", repeat(paged_xl::position_term)},
      {"sparse_mla::backward", repeat(sparse_mla::backward)},
      {"sparse_mla::decode", repeat(sparse_mla::decode)},
      {"sparse_mla::distribution", repeat(sparse_mla::distribution)},
      {"sparse_mla::forward", repeat(sparse_mla::forward)},
      {"sparse_mla::store", repeat(sparse_mla::store)},
  };
  return table;
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
  const auto operation = operations().find(record.operation);
  if (operation == operations().end()) refuse("an operation of Winnow", record.operation);
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
  const std::function<Backend()> call = operation->second(Fill{record, copies}, run);
  const auto start = std::chrono::steady_clock::now();
  Backend backend{};
  try {
    backend = call();
    synchronize(device);
  } catch (const Error& error) {
    print("it fails: %s\n", error.what());
    const bool as_then = record.result == std::string("error ") + error.what();
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
    same = compare_output(name, copy.on_host(), copy.view_of(tensor->after), options.tolerance) &&
           same;
  }
  return same ? kOk : kCheckFailed;
}

}  // namespace winnow::cli
