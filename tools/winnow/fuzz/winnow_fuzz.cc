// libFuzzer target: random tensor descriptors through the entry point of every operation, and
// random bytes through the text reader. Whatever comes in, the answer is a result or an Error that
// names the argument.
//
// The arguments follow from the table of the operation (winnow/core/contract.h).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <map>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "tools/winnow/demo/text_reader.h"
#include "tools/winnow/fuzz/tensors.h"

#include "winnow/compressor/backward/backward_contract.h"
#include "winnow/compressor/forward/forward_contract.h"
#include "winnow/compressor/step/step_contract.h"
#include "winnow/core/error.h"
#include "winnow/expert_parallel/layout/layout_contract.h"
#include "winnow/indexer/backward/backward_contract.h"
#include "winnow/indexer/quantize/quantize_contract.h"
#include "winnow/indexer/scores/scores_contract.h"
#include "winnow/indexer/scores_paged/scores_paged_contract.h"
#include "winnow/indexer/topk/topk_contract.h"
#include "winnow/indexer/topk_paged/topk_paged_contract.h"
#include "winnow/paged_xl/attention/attention_contract.h"
#include "winnow/paged_xl/cache/append_contract.h"
#include "winnow/paged_xl/position_term/position_term_contract.h"
#include "winnow/sparse_mla/backward/backward_contract.h"
#include "winnow/sparse_mla/decode/decode_contract.h"
#include "winnow/sparse_mla/distribution/distribution_contract.h"
#include "winnow/sparse_mla/forward/forward_contract.h"
#include "winnow/sparse_mla/store/store_contract.h"
#include "winnow/winnow.h"

namespace {

using winnow::DType;
using winnow::contract::Dimension;
using winnow::contract::Role;
using winnow::contract::Spec;
using winnow::fuzz::attempt;
using winnow::fuzz::Bytes;
using winnow::fuzz::Tensors;

// The arguments of one call: equal sizes where the table has equal names, and dtypes that it takes.
class Arguments {
 public:
  explicit Arguments(Bytes& bytes) : bytes_(bytes), altered_(bytes.flag()), tensor_(bytes) {}

  template <class Contract, class Args>
  void fill(const Contract& contract, Args& args) {
    contract.visit(args, [&](const Spec& spec, auto& value) { give(spec, value); });
  }
  // Whether the call would go through more elements than a tensor can have memory of its own.
  bool huge() const { return huge_; }

 private:
  void give(const Spec& spec, winnow::BasicTensorView<const void>& view) { view = tensor(spec); }
  void give(const Spec& spec, winnow::TensorView& view) { view = tensor(spec); }
  void give(const Spec&, bool& value) { value = bytes_.flag(); }
  void give(const Spec& spec, std::int64_t& value) {
    value = spec.extents.rank > 0 ? size(spec.extents.dims[0]) : bytes_.number();
  }
  void give(const Spec&, double& value) {
    value = bytes_.flag() ? double(bytes_.number()) : bytes_.take<double>();
  }
  template <class T>
  void give(const Spec& spec, std::optional<T>& value) {
    if (bytes_.flag()) give(spec, value.emplace());
  }
  void give(const Spec&, winnow::indexer::Ties& value) {
    value = bytes_.flag() ? winnow::indexer::Ties::larger : winnow::indexer::Ties::smaller;
  }
  // Mostly that of the cache's rows.
  void give(const Spec&, winnow::sparse_mla::CacheFormat& value) {
    using winnow::sparse_mla::CacheFormat;
    const std::int64_t row = size("row");
    const auto of_row = row == 656   ? CacheFormat::fp8_656
                        : row == 584 ? CacheFormat::fp8_584
                                     : CacheFormat::bf16;
    const auto drawn = bytes_.take<std::uint8_t>();
    value = drawn % 4 == 3 ? static_cast<CacheFormat>(drawn / 4 % 4) : of_row;
  }

  winnow::TensorView tensor(const Spec& spec) {
    const DType dtype = dtype_of(spec);
    dtypes_[spec.name] = dtype;
    if (spec.optional && !wanted(spec.name)) return {};
    std::vector<std::int64_t> shape;
    for (const Dimension& dim : extents(spec).view()) shape.push_back(size(dim));
    const winnow::TensorView view = tensor_(dtype, std::move(shape), altered_);
    huge_ = huge_ || (view.present() && view.numel() > (std::int64_t{1} << 20));
    return view;
  }
  const winnow::contract::Extents& extents(const Spec& spec) {
    return spec.other.rank >= 0 && bytes_.flag() ? spec.other : spec.extents;
  }
  // What belongs to a second source or cache is absent in half of the calls.
  bool wanted(std::string_view name) {
    if (!name.starts_with("extra_") && !name.starts_with("dextra_")) return bytes_.flag();
    if (!extra_) extra_ = bytes_.flag();
    return *extra_ && bytes_.flag();
  }
  DType dtype_of(const Spec& spec) {
    const winnow::contract::Dtypes& dtypes = spec.dtypes;
    if (dtypes.of.empty()) return dtypes.list[bytes_.take<std::uint8_t>() % dtypes.count];
    const bool second = dtypes.follows[1] != nullptr && bytes_.flag();
    return dtypes.follows[second ? 1 : 0](dtypes_.at(dtypes.of));
  }

  std::int64_t size(const Dimension& dim) {
    if (dim.number >= 0) return dim.number;
    if (dim.quotient) return size(dim.name) / std::max<std::int64_t>(size(dim.second), 1);
    if (dim.second.empty() || bytes_.flag()) return size(dim.name);
    return size(dim.third.empty() || bytes_.flag() ? dim.second : dim.third);
  }
  std::int64_t size(std::string_view name) {
    const auto [found, drawn] = sizes_.try_emplace(name, 0);
    return drawn ? found->second = draw(name) : found->second;
  }
  // Most sizes may be any number.
  std::int64_t draw(std::string_view name) {
    const auto one_of = [&](std::initializer_list<std::int64_t> values) {
      return values.begin()[bytes_.take<std::uint8_t>() % values.size()];
    };
    if (name == "d_qk") return one_of({512, 576});
    if (name == "d") return one_of({128, 64, 24});
    if (name == "head_size") return 64;
    if (name == "block_size") return one_of({8, 16, 64, bytes_.number()});
    if (name == "x") return 16 / winnow::size_of(dtypes_.begin()->second);
    if (name == "row") return one_of({656, 584, 576, 512});
    if (name == "n") return bytes_.take<std::uint8_t>() % 4;
    if (name == "n + 1") return size("n") + 1;
    if (name == "columns") return size("d") * one_of({1, 2});
    if (name == "2 * columns") return 2 * size("columns");
    if (name == "64 * (d + 4)") return 64 * (size("d") + 4);
    return bytes_.number();
  }

  Bytes& bytes_;
  bool altered_;  // tensors may be others than the table says
  Tensors tensor_;
  std::map<std::string_view, std::int64_t> sizes_;
  std::map<std::string_view, DType> dtypes_;
  std::optional<bool> extra_;
  bool huge_ = false;
};

// A call with tensors of which a megabyte has any number of elements, since they share memory, is
// checked and not run: it could take for ever.
template <const auto& kContract, auto kOperation>
void call(Bytes& bytes) {
  typename std::decay_t<decltype(kContract)>::Args args;
  Arguments arguments(bytes);
  arguments.fill(kContract, args);
  attempt([&] { kOperation(args, {.dry_run = arguments.huge()}); });
  if (arguments.huge()) attempt([&] { kContract.apart(args); });
}

void read_text(Bytes& bytes) {
  try {
    winnow::demo::parse_document(bytes.rest(), "fuzz", 4096);
  } catch (const winnow::Error&) {
  }
}

constexpr void (*kTargets[])(Bytes&) = {
    read_text,
    call<winnow::compressor::kForward, winnow::compressor::forward>,
    call<winnow::compressor::kBackward, winnow::compressor::backward>,
    call<winnow::compressor::kStep, winnow::compressor::step>,
    call<winnow::expert_parallel::kLayout, winnow::expert_parallel::layout>,
    call<winnow::indexer::kTopk, winnow::indexer::topk>,
    call<winnow::indexer::kTopkPaged, winnow::indexer::topk_paged>,
    call<winnow::indexer::kScores, winnow::indexer::scores>,
    call<winnow::indexer::kScoresPaged, winnow::indexer::scores_paged>,
    call<winnow::indexer::kBackward, winnow::indexer::backward>,
    call<winnow::indexer::kQuantize, winnow::indexer::quantize>,
    call<winnow::paged_xl::kAttention, winnow::paged_xl::attention>,
    call<winnow::paged_xl::kAppend, winnow::paged_xl::append>,
    call<winnow::paged_xl::kPositionTerm, winnow::paged_xl::position_term>,
    call<winnow::sparse_mla::kForward, winnow::sparse_mla::forward>,
    call<winnow::sparse_mla::kDistribution, winnow::sparse_mla::distribution>,
    call<winnow::sparse_mla::kBackward, winnow::sparse_mla::backward>,
    call<winnow::sparse_mla::kDecode, winnow::sparse_mla::decode>,
    call<winnow::sparse_mla::kStore, winnow::sparse_mla::store>};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const bool single_threaded = [] {
    winnow::set_num_threads(1);
    return true;
  }();
  (void)single_threaded;
  Bytes bytes(data, size);
  kTargets[bytes.take<std::uint8_t>() % std::size(kTargets)](bytes);
  return 0;
}
