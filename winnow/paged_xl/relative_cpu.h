// What the CPU kernels on a paged cache share: contexts cut into splits, and the position term of
// one split. Internal; compiled once per instruction set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "winnow/core/read_once.h"
#include "winnow/cpu/convert.h"
#include "winnow/paged_xl/lanes_cpu.h"
#include "winnow/paged_xl/problem.h"

namespace winnow::paged_xl {

// Tokens of one split: few enough that a work item's logits stay in the cache beside its queries,
// and enough that partial results are at most a few per cent of the keys and values. A multiple of
// every block size, and fixed, so that results depend neither on the number of threads nor on the
// rest of the batch.
inline constexpr std::int64_t kSplit = 512;

// All splits of all sequences, in order.
struct Splits {
  struct Split {
    std::int64_t sequence, begin, end;  // tokens [begin, end)
    std::int64_t context_len;           // of the sequence
  };
  std::vector<Split> all;
  std::vector<std::int64_t> first;  // [num_seqs + 1]: where a sequence's splits start in `all`

  // Reads each length once and clamps it to [0, max_context]: another thread may have changed it
  // since it was checked.
  Splits(const std::int32_t* context_lens, std::int64_t num_seqs, std::int64_t max_context) {
    first.push_back(0);
    for (std::int64_t s = 0; s < num_seqs; ++s) {
      const std::int64_t length =
          std::clamp<std::int64_t>(read_once(context_lens + s), 0, max_context);
      for (std::int64_t begin = 0; begin < length; begin += kSplit) {
        all.push_back({s, begin, std::min(begin + kSplit, length), length});
      }
      first.push_back(static_cast<std::int64_t>(all.size()));
    }
  }
  std::int64_t count() const { return static_cast<std::int64_t>(all.size()); }
};

// to = query[s, h] + bias[s, h] in Real: double where dtype is f64, else float. `scratch` has room
// for head_size of them.
template <class Real>
void biased_query(DType dtype, const Rows<const void*>& query, const Rows<const void*>& bias,
                  std::int64_t s, std::int64_t h, std::int64_t head_size, Real* scratch, Real* to) {
  load_real(dtype, query.data, query.offset(s, h), head_size, to);
  load_real(dtype, bias.data, bias.offset(s, h), head_size, scratch);
  for (std::int64_t d = 0; d < head_size; ++d) to[d] += scratch[d];
}

// to[j - begin] = dot(q_v, r[h, context_len - 1 - j]) for j in [begin, end); `scratch` has
// room for 8 * head_size numbers and `to` for a multiple of 8 results.
template <class Real>
void relative_logits(DType dtype, const Rows<const void*>& r, std::int64_t h,
                     std::int64_t context_len, std::int64_t begin, std::int64_t end,
                     const Real* q_v, std::int64_t head_size, Real* scratch, Real* to) {
  using Eight = typename LanesOf<Real>::Type;
  for (std::int64_t j = begin; j < end; j += 8) {
    const Real* rows[8];
    const int count = static_cast<int>(std::min<std::int64_t>(8, end - j));
    for (int i = 0; i < 8; ++i) {
      // Past the end the last row is taken again: its result is not used.
      const std::int64_t distance = context_len - 1 - j - std::min(i, count - 1);
      const std::int64_t offset = r.offset(h, distance);
      if (dtype == dtype_of<Real>) {
        rows[i] = static_cast<const Real*>(r.data) + offset;
      } else {
        load_real(dtype, r.data, offset, head_size, scratch + i * head_size);
        rows[i] = scratch + i * head_size;
      }
    }
    Eight sums[8] = {};
    for (std::int64_t d = 0; d < head_size; d += kLanes) {
      Eight q;
      load(q, q_v + d);
      for (int i = 0; i < 8; ++i) multiply_add(sums[i], q, rows[i] + d);
    }
    sum_eight(sums, to + (j - begin));
  }
}

}  // namespace winnow::paged_xl
