#include "winnow/core/contract.h"

#include <algorithm>

namespace winnow::contract {
namespace {

template <class T, std::size_t kSize>
std::span<const T> first(const std::array<T, kSize>& values, int count) {
  return {values.data(), static_cast<std::size_t>(count)};
}

}  // namespace

std::string in_words(const Extents& extents) {
  std::string text = "[";
  for (const Dimension& dim : extents.view()) {
    if (text.size() > 1) text += ", ";
    text += dim.number < 0 ? std::string(dim.text) : std::to_string(dim.number);
  }
  return text + "]";
}

void Checker::rank(std::size_t place, const ConstTensorView& view) {
  if (!device_) device_ = view.device();
  const Spec& spec = specs_[place];
  const Extents& extents = spec.shape(view.rank());
  if (!view.present() || view.rank() != extents.rank) {
    check.rank(spec.name, view, extents.rank,
               spec.rank_text.empty() ? in_words(extents) : spec.rank_text);
  }
  for (int d = 0; d < extents.rank; ++d) sizes_.take(extents.dims[d], view.size(d));
}

void Checker::tensor(std::size_t place, const ConstTensorView& view) {
  if (!device_) device_ = view.device();
  const Spec& spec = specs_[place];
  given_[place] = view.present();
  dtypes_[place] = view.dtype();
  if (spec.by_rule || spec.role == Role::scratch) return;
  if (spec.unless_place >= 0 && given_[spec.unless_place]) return;
  if (spec.optional && !view.present()) return;

  const Extents& extents = spec.shape(view.rank());
  const std::span<const Dimension> wanted = extents.view();
  const bool known = std::all_of(wanted.begin(), wanted.end(),
                                 [&](const Dimension& dim) { return sizes_.knows(dim); });
  if (!known || spec.other.rank >= 0) rank(place, view);
  const bool fits = std::equal(
      wanted.begin(), wanted.end(), view.shape().begin(), view.shape().end(),
      [&](const Dimension& dim, std::int64_t size) { return sizes_.of(dim).size == size; });
  if (!fits || !view.present()) {
    std::array<Dim, kMaxRank> dims{};
    std::ranges::transform(wanted, dims.begin(), [&](auto& dim) { return sizes_.of(dim); });
    check.shape(spec.name, view, first(dims, extents.rank));
  }

  const Dtypes& dtypes = spec.dtypes;
  std::array<DType, 2> followed{};
  std::span<const DType> allowed = first(dtypes.list, dtypes.count);
  if (spec.follows >= 0) {
    const DType leader = dtypes_[spec.follows];
    const bool both = dtypes.follows[1] != nullptr;
    followed = {dtypes.follows[0](leader), both ? dtypes.follows[1](leader) : DType{}};
    allowed = first(followed, both ? 2 : 1);
  }
  check.dtype(spec.name, view, allowed, first(dtypes.gpu, dtypes.gpu_count));
  check.device(spec.name, view, *device_);
  check.contiguous_rows(spec.name, view);
  check.aligned(spec.name, view, size_of(view.dtype()));
  if (spec.role == Role::output) check.distinct_elements(spec.name, view);
}

void refuse_overlaps(std::string_view operation, std::span<const Spec> specs,
                     std::span<const Named> tensors) {
  std::array<Range, kMostArguments> ranges;
  std::array<std::size_t, kMostArguments> outputs, inputs;
  std::size_t written = 0, read = 0;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const int unless = specs[i].unless_place;
    if (unless >= 0 && tensors[unless].layout != nullptr) continue;
    ranges[i] = range_of(tensors[i]);
    if (ranges[i].begin == ranges[i].end) continue;
    (specs[i].role == Role::input ? inputs[read++] : outputs[written++]) = i;
  }
  const auto apart = [&](std::size_t output, std::size_t other) {
    if (!ranges[output].meets(ranges[other])) return;
    Check(operation).apart(tensors.subspan(output, 1), tensors.subspan(other, 1));
  };
  for (std::size_t i = 0; i < written; ++i) {
    for (std::size_t j = 0; j < read; ++j) apart(outputs[i], inputs[j]);
    for (std::size_t j = 0; j < i; ++j) apart(outputs[i], outputs[j]);
  }
}

}  // namespace winnow::contract
