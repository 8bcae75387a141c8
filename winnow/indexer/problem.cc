#include "winnow/indexer/problem.h"

#include <limits>
#include <string>

#include "winnow/core/check.h"

namespace winnow::indexer {

void check_heads(const Check& check, const ConstTensorView& q) {
  const std::int64_t h = q.size(q.rank() - 2), d = q.size(q.rank() - 1);
  check.that(d == 128 || d == 64, "q", "d = 128 or 64", "d = " + std::to_string(d));
  check.that(h >= 1 && h <= 128, "q", "1 to 128 heads", std::to_string(h));
}

void check_keys(const Check& check, const ConstTensorView& k) {
  check.that(k.size(0) <= std::numeric_limits<std::int32_t>::max(), "k",
             "at most 2^31 - 1 rows, the range of the indices", std::to_string(k.size(0)));
}

void check_scaled(const Check& check, const ConstTensorView& q, const ConstTensorView& k_scale) {
  const bool scaled = q.dtype() == DType::f8_e4m3;
  check.that(
      k_scale.present() == scaled, "k_scale",
      scaled ? "a tensor [s_k], which f8_e4m3 keys need" : "none, for keys that are not f8_e4m3",
      k_scale.present() ? "a tensor" : "none");
}

void check_topk(const Check& check, const TensorView& indices) {
  const std::int64_t topk = indices.size(indices.rank() - 1);
  check.that(topk >= 1 && topk <= std::numeric_limits<std::int32_t>::max(), "indices",
             "topk from 1 to 2^31 - 1", std::to_string(topk));
}

void check_for_gpu(const Check& check, Backend backend, const ConstTensorView& q,
                   const ConstTensorView& k) {
  constexpr std::int64_t kAlignment = 16;  // of the kernels' copies
  for (const auto& [name, view] : {std::pair{"q", q}, std::pair{"k", k}}) {
    check.aligned(name, view, kAlignment);
    // The tensor memory accelerator's strides.
    for (int dim = 0; backend == Backend::sm90 && dim + 1 < view.rank(); ++dim) {
      if (view.size(dim) > 1 && view.stride(dim) < 1) {
        check.unsupported(std::string("sm90: ") + name + ": want strides above 0, got " +
                          std::to_string(view.stride(dim)));
      }
    }
  }
  constexpr std::int64_t kLimit = std::int64_t{1} << 30;
  const std::int64_t s_q = q.size(0), s_k = k.size(0);
  if (s_q > kLimit || s_k > kLimit) {
    check.unsupported(std::string(to_string(backend)) + ": want s_q and s_k up to 2^30, got s_q " +
                      std::to_string(s_q) + ", s_k " + std::to_string(s_k));
  }
}

void check_topk_for_gpu(const Check& check, Backend backend, std::int64_t topk, const char* name) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 30;
  if (topk <= kLimit) return;
  check.unsupported(std::string(to_string(backend)) + ": want " + name + " up to 2^30, got " +
                    std::to_string(topk));
}

}  // namespace winnow::indexer
