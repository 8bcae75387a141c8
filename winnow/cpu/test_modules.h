// The CPU modules as tests go through them.
#pragma once

#include <cmath>

#include <gtest/gtest.h>

#include "winnow/core/tensor.h"
#include "winnow/cpu/kernels.h"
#include "winnow/paged_xl/attention/attention.h"
#include "winnow/paged_xl/attention/attention_impl.h"

namespace winnow {

// Calls body(kernels) for every module that runs here.
template <class Body>
void for_each_module(const Body& body) {
  for (const CpuModule& module : cpu_modules()) {
    if (!module.runs_here) continue;
    SCOPED_TRACE(module.kernels->name);
    body(*module.kernels);
  }
}

// What attention() would give its kernel, with matrix_bd.
inline paged_xl::AttentionParams attention_params(const paged_xl::AttentionArgs& args,
                                                  Tensor& out) {
  const DType dtype = args.query.dtype();
  paged_xl::AttentionParams params;
  params.cache = {dtype, args.value_cache.size(0), args.value_cache.size(1),
                  args.value_cache.size(2), args.value_cache.size(3)};
  params.num_seqs = args.query.size(0);
  params.num_heads = args.query.size(1);
  params.scale = round_to_accumulator(dtype, 1 / std::sqrt(double(params.cache.head_size)));
  params.query = rows_of<const void*>(args.query, 0, 1);
  params.key = rows_of<const void*>(args.key_cache, 0, 1);
  params.value = rows_of<const void*>(args.value_cache, 0, 1);
  params.pos_bias_u = {args.pos_bias_u.data(), 0, args.pos_bias_u.stride(0)};
  params.matrix_bd = rows_of<const void*>(args.matrix_bd, 0, 1);
  params.matrix_bd_dtype = args.matrix_bd.dtype();
  params.block_tables = rows_of<const std::int32_t*>(args.block_tables, 0);
  params.context_lens = static_cast<const std::int32_t*>(args.context_lens.data());
  params.max_context = args.matrix_bd.size(2);
  params.out = rows_of<void*>(out.view(), 0, 1);
  return params;
}

}  // namespace winnow
