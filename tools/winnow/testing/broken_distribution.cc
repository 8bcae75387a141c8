// A distribution that spreads its weight evenly over all entries, loaded before the library's own:
// a program that checks its steps must notice.
#include "winnow/sparse_mla/distribution/distribution.h"

namespace winnow::sparse_mla {
namespace {

template <class Real>
void spread(const DistributionArgs& args) {
  for (std::int64_t i = 0; i < args.attn_sum.size(0); ++i) {
    for (std::int64_t j = 0; j < args.attn_sum.size(1); ++j) {
      args.attn_sum.at<Real>(i, j) = Real(args.q.size(1)) / Real(args.attn_sum.size(1));
    }
  }
}

}  // namespace

Backend distribution(const DistributionArgs& args, const RunOptions&) {
  args.attn_sum.dtype() == DType::f64 ? spread<double>(args) : spread<float>(args);
  return Backend::cpu;
}

}  // namespace winnow::sparse_mla
