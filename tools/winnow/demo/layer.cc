#include "tools/winnow/demo/layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

namespace winnow::demo {

Tensor unwritten(std::initializer_list<std::int64_t> shape, DType dtype) {
  Tensor result(dtype, shape);
  testing::fill_unwritten(result);
  return result;
}

Tensor gather_queries(const Tensor& q, std::span<const std::int64_t> positions) {
  Tensor result(DType::f32, {static_cast<std::int64_t>(positions.size()), kHeads, kRowDim});
  const float* from = q.values<float>().data();
  float* to = result.values<float>().data();
  for (const std::int64_t position : positions) {
    to = std::copy_n(from + position * kHeads * kRowDim, kHeads * kRowDim, to);
  }
  return result;
}

namespace {

Tensor narrowed(const Tensor& values) {
  Tensor result(DType::bf16, values.view().shape());
  const std::span<const float> from = values.values<float>();
  std::transform(from.begin(), from.end(), result.values<BFloat16>().begin(),
                 [](float value) { return BFloat16(value); });
  return result;
}

Tensor widened(const Tensor& values) {
  Tensor result(DType::f32, values.view().shape());
  const std::span<const BFloat16> from = values.values<BFloat16>();
  std::transform(from.begin(), from.end(), result.values<float>().begin(),
                 [](BFloat16 value) { return static_cast<float>(value); });
  return result;
}

}  // namespace

std::string to_string(const BackendsUsed& backends) {
  std::string text;
  for (const auto& [backend, parts] : backends) {
    text += (text.empty() ? "" : ", ") + std::string(to_string(backend));
    if (backends.size() == 1) break;
    std::string list;
    for (const std::string& part : parts) list += (list.empty() ? "" : ", ") + part;
    text += " (" + list + ")";
  }
  return text;
}

// The queries of a selection: a window on q where they follow one another, which also lets the
// operations apply the causal limit; else a copy of the rows.
struct Layer::SelectedQueries {
  SelectedQueries(const Layer& layer, std::span<const std::int64_t> positions) {
    const std::int64_t count = static_cast<std::int64_t>(positions.size());
    bool consecutive = count > 0;
    for (std::int64_t i = 1; i < count; ++i) {
      consecutive = consecutive && positions[i] == positions[0] + i;
    }
    if (consecutive) {
      view = layer.q_.view.slice(0, positions[0], positions[0] + count);
      q_start = positions[0];
    } else {
      rows = gather_queries(layer.q(), positions);
      placed = layer.place_values(rows);
      view = placed.view;
    }
  }
  Tensor rows;
  Operand placed;
  ConstTensorView view;
  std::optional<std::int64_t> q_start;
};

Layer::Layer(Embedding embedding, const Placement& placement)
    : embedding_(std::move(embedding)), placement_(placement) {
  if (placement_.dtype == DType::bf16) {
    embedding_.q = widened(narrowed(embedding_.q));
    embedding_.kv = widened(narrowed(embedding_.kv));
  }
  q_ = place_values(embedding_.q);
  kv_ = place_values(embedding_.kv);
}

Layer::Operand Layer::place(const ConstTensorView& host) const {
  if (on_host()) return {{}, host};
  Tensor copy(host.dtype(), host.shape());
  std::memcpy(copy.data(), host.data(),
              static_cast<std::size_t>(host.numel() * size_of(host.dtype())));
  Operand result;
  result.memory = copy.to(placement_.device);
  result.view = result.memory;
  return result;
}

Layer::Operand Layer::place_values(const Tensor& host) const {
  if (placement_.dtype == DType::f32) return place(host);
  Operand result;
  result.memory = narrowed(host);
  if (!on_host()) result.memory = result.memory.to(placement_.device);
  result.view = result.memory;
  return result;
}

Tensor Layer::output(std::initializer_list<std::int64_t> shape, DType dtype) const {
  Tensor result = unwritten(shape, dtype);
  return on_host() ? std::move(result) : result.to(placement_.device);
}

Tensor Layer::fetch(Tensor result) const {
  if (!on_host()) result = result.to(Device{});  // waits for the operation
  return result.dtype() == DType::bf16 ? widened(result) : std::move(result);
}

void Layer::note(Backend backend, std::string_view what) {
  std::vector<std::string>& parts = backends_used_[backend];
  if (std::find(parts.begin(), parts.end(), what) == parts.end()) parts.emplace_back(what);
}

LayerOutput Layer::forward(const Selection& selection) {
  const std::int64_t queries = static_cast<std::int64_t>(selection.positions.size());
  const SelectedQueries selected(*this, selection.positions);
  const Operand indices = place(selection.view());
  Tensor out = output({queries, kHeads, sparse_mla::kValueDim}, placement_.dtype);
  Tensor lse = output({queries, kHeads}, DType::f32);
  note(sparse_mla::forward({.q = selected.view,
                            .kv = kv_.view,
                            .indices = indices.view,
                            .q_start = selected.q_start,
                            .out = out,
                            .lse = lse},
                           placement_.options),
       "forward");
  return {fetch(std::move(out)), fetch(std::move(lse))};
}

Tensor Layer::distribution(const Selection& selection, const Tensor& lse) {
  const SelectedQueries selected(*this, selection.positions);
  const Operand indices = place(selection.view());
  const Operand placed_lse = place(lse);
  Tensor attn_sum = output({selected.view.size(0), selection.topk}, DType::f32);
  note(sparse_mla::distribution({.q = selected.view,
                                 .kv = kv_.view,
                                 .indices = indices.view,
                                 .lse = placed_lse.view,
                                 .q_start = selected.q_start,
                                 .attn_sum = attn_sum},
                                placement_.options),
       "distribution");
  return fetch(std::move(attn_sum));
}

DenseAttention Layer::dense(std::span<const std::int64_t> positions) {
  // All earlier tokens, in order: entry j is token j.
  const Selection everything = choose_recent(positions, tokens());
  DenseAttention result{everything.positions, forward(everything), {}};
  result.attn_sum = distribution(everything, result.output.lse);
  return result;
}

double captured_share(const DenseAttention& dense, const Selection& selection) {
  double sum = 0;
  for (std::size_t i = 0; i < dense.positions.size(); ++i) {
    for (const std::int32_t token : selection.row(static_cast<std::int64_t>(i))) {
      if (token >= 0) sum += dense.share(static_cast<std::int64_t>(i), token);
    }
  }
  return sum / static_cast<double>(dense.positions.size());
}

double relative_error(const DenseAttention& dense, const Tensor& out) {
  const std::span<const float> wanted = dense.output.out.values<float>();
  const std::span<const float> got = out.values<float>();
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    difference += std::pow(double(got[i]) - double(wanted[i]), 2);
    size += std::pow(double(wanted[i]), 2);
  }
  return std::sqrt(difference / size);
}

}  // namespace winnow::demo
