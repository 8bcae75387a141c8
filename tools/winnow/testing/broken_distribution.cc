// A distribution that spreads its weight evenly over all entries, loaded before the library's own:
// a program that checks its steps must notice.
#include "winnow/sparse_mla/distribution/distribution.h"

namespace winnow::sparse_mla {

Backend distribution(const DistributionArgs& args, const RunOptions&) {
  for (std::int64_t i = 0; i < args.attn_sum.size(0); ++i) {
    for (std::int64_t j = 0; j < args.attn_sum.size(1); ++j) {
      args.attn_sum.at<float>(i, j) =
          static_cast<float>(args.q.size(1)) / static_cast<float>(args.attn_sum.size(1));
    }
  }
  return Backend::cpu;
}

}  // namespace winnow::sparse_mla
