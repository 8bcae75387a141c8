// Backward of top-k sparse MLA attention on sm90: a call with ranges of rows or with two sources,
// as its designs take it.
//
// They know one cache. So the rows of two sources are copied side by side into the workspace, those
// of extra_kv after those of kv (a thousandth of the call's time, and no instruction in kernels
// that have no register left), and the sums of dkv and dextra_kv stand side by side, too. A range
// is not written down as a list: of a query's entries, the rows of its ranges come first, are
// computed where they are wanted, and take no memory however long they are. Internal.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "winnow/sparse_mla/backward/backward_impl.h"

namespace winnow::sparse_mla {

// An output with a row for each of those from `first` on.
struct RowOutput {
  Rows<void*> to;
  DType dtype;
  std::int64_t first, rows;
};

// `problem` has all rows as those of one cache, and topk counts the entries of lists alone.
struct JointParams : BackwardParams {
  Problem sources;  // what the caller gave

  bool ranges() const { return sources.dense || sources.extra.dense; }
  bool joint() const { return ranges() || sources.extra.kv.present(); }
  // Whether dkv itself is what f32 sums can be added to.
  bool sums_in_dkv() const { return dkv_dtype == DType::f32 && !sources.extra.kv.present(); }
  std::array<RowOutput, 2> outputs() const {
    return {RowOutput{dkv, dkv_dtype, 0, sources.s_kv},
            {dextra_kv, dextra_kv_dtype, sources.s_kv, sources.extra.s_kv}};
  }
};

inline std::int64_t joint_rows_bytes(const Problem& problem) {
  return problem.extra.kv.present() ? problem.all_rows() * problem.d_qk * 2 : 0;
}

// `rows` has joint_rows_bytes() bytes for the rows of two sources.
inline JointParams joint_params(const BackwardParams& params, void* rows) {
  JointParams joint{params, params.problem};
  if (!joint.joint()) return joint;
  const Problem& given = joint.sources;
  Problem& problem = joint.problem;
  static_cast<Source&>(problem) = {};
  problem.extra = {};
  problem.s_kv = given.all_rows();
  problem.topk = (given.dense ? 0 : given.topk) + (given.extra.dense ? 0 : given.extra.topk);
  problem.kv = given.kv;
  if (given.extra.kv.present()) problem.kv = {rows, problem.d_qk};
  return joint;
}

}  // namespace winnow::sparse_mla
