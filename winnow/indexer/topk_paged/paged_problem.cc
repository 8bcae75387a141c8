#include "winnow/indexer/topk_paged/paged_problem.h"

#include <string>

#include "winnow/core/check.h"
#include "winnow/indexer/quantize/quantize.h"

namespace winnow::indexer {

void check_pages(const Check& check, const ConstTensorView& q, const ConstTensorView& pages) {
  const Dim num_pages{"num_pages", pages.size(0)};
  check.input("pages", pages, {num_pages, {"64 * (d + 4)", page_bytes(q.size(3))}}, {DType::u8},
              q.device());
}

void check_context_lens(const Check& check, const ConstTensorView& q, const ConstTensorView& pages,
                        const ConstTensorView& block_tables, const ConstTensorView& context_lens) {
  const Dim b{"b", q.size(0)}, s_q{"s_q", q.size(1)};
  if (context_lens.rank() > 1) {
    check.rank("context_lens", context_lens, 2, "[b, s_q], or one, [b]");
    check.input("context_lens", context_lens, {b, s_q}, {DType::i32}, q.device());
  } else {
    check.input("context_lens", context_lens, {b}, {DType::i32}, q.device());
  }
  const std::int64_t count = pages.size(0), table = block_tables.size(1);
  check.that(count <= kMostPages, "pages", "at most 2^31 - 128 rows, the range of the indices",
             std::to_string(count) + " pages of 64");
  check.that(table <= kMostPages, "block_tables",
             "at most 2^31 - 128 rows, the range of the positions",
             std::to_string(table) + " pages of 64");
}

void check_paged_for_gpu(const Check& check, Backend backend, const ConstTensorView& q,
                         const ConstTensorView& pages) {
  constexpr std::int64_t kAlignment = 16;  // of the kernels' copies
  check.aligned("q", q, kAlignment);
  check.aligned("pages", pages, kAlignment);
  constexpr std::int64_t kLimit = std::int64_t{1} << 30;
  if (q.size(1) > kLimit) {
    check.unsupported(std::string(to_string(backend)) + ": want s_q up to 2^30, got " +
                      std::to_string(q.size(1)));
  }
}

}  // namespace winnow::indexer
