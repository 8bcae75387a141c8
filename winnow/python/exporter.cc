#include "winnow/python/exporter.h"

#include <algorithm>
#include <array>
#include <utility>

#include <nanobind/ndarray.h>

#include "winnow/python/framework.h"

namespace winnow::python {

Exporter::Exporter(const Framework& framework) {
  if (framework.kind == Framework::Kind::numpy) {
    import_ = nb::module_::import_("numpy").attr("asarray");  // by the buffer protocol
    has_read_only_ = true;
  } else {
    import_ = nb::module_::import_("torch").attr("from_dlpack");
    takes_capsule_ = true;  // of an object it asks for its device and for torch's stream first
  }
}

nb::object Exporter::operator()(Tensor&& tensor) const {
  const auto owner = std::make_shared<Tensor>(std::move(tensor));
  return (*this)(owner->view(), owner);
}

nb::object Exporter::operator()(const TensorView& view, std::shared_ptr<const void> owner) const {
  return make(view, std::move(owner), false);
}

nb::object Exporter::operator()(const ConstTensorView& view,
                                std::shared_ptr<const void> owner) const {
  return make(view, std::move(owner), has_read_only_);
}

nb::object Exporter::make(const ConstTensorView& view, std::shared_ptr<const void> owner,
                          bool read_only) const {
  using Owner = std::shared_ptr<const void>;
  if (!view.present() || !import_.is_valid()) return nb::none();
  const nb::capsule keeps(new Owner(std::move(owner)),
                          [](void* pointer) noexcept { delete static_cast<Owner*>(pointer); });
  std::array<std::size_t, kMaxRank> shape{};
  std::copy(view.shape().begin(), view.shape().end(), shape.begin());
  const bool on_cpu = view.device().type == DeviceType::cpu;
  const auto dims = static_cast<std::size_t>(view.rank());
  const int device = on_cpu ? dlpack::kCpu : dlpack::kCuda;
  const dlpack::dtype dtype = dlpack_dtype(static_cast<std::size_t>(view.dtype()));
  auto* data = const_cast<void*>(view.data());
  if (read_only) {
    return import_(nb::ndarray<nb::array_api, nb::ro>(data, dims, shape.data(), keeps,
                                                      view.strides().data(), dtype, device,
                                                      on_cpu ? 0 : view.device().index));
  }
  if (takes_capsule_) {
    return import_(nb::ndarray<>(data, dims, shape.data(), keeps, view.strides().data(), dtype,
                                 device, on_cpu ? 0 : view.device().index));
  }
  return import_(nb::ndarray<nb::array_api>(data, dims, shape.data(), keeps, view.strides().data(),
                                            dtype, device, on_cpu ? 0 : view.device().index));
}

}  // namespace winnow::python
