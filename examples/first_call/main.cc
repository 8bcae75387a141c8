// The smallest program: sparse attention over rows that were chosen by hand.
#include <cstdio>

#include <winnow/winnow.h>

int main() {
  constexpr int s_q = 2, h_q = 4, s_kv = 8, topk = 3;
  winnow::Tensor q(winnow::DType::f32, {s_q, h_q, 576});
  winnow::Tensor kv(winnow::DType::f32, {s_kv, 1, 576});
  winnow::Tensor indices(winnow::DType::i32, {s_q, 1, topk});
  winnow::Tensor out(winnow::DType::f32, {s_q, h_q, 512});
  winnow::Tensor lse(winnow::DType::f32, {s_q, h_q});

  // Row t of the cache holds the number t; query 0 sees rows 1, 2, 3 and query 1 sees row 7 alone.
  for (int t = 0; t < s_kv; ++t) {
    for (int c = 0; c < 576; ++c) kv.view().at<float>(t, 0, c) = static_cast<float>(t);
  }
  const int chosen[s_q][topk] = {{1, 2, 3}, {7, -1, -1}};  // -1: no row
  for (int i = 0; i < s_q; ++i) {
    for (int j = 0; j < topk; ++j) indices.view().at<std::int32_t>(i, 0, j) = chosen[i][j];
  }

  try {
    // The queries are zero, so every visible row weighs the same.
    winnow::sparse_mla::forward({.q = q, .kv = kv, .indices = indices, .out = out, .lse = lse});
  } catch (const winnow::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());  // names the argument and what is wrong
    return 1;
  }
  std::printf("query 0: %.1f   query 1: %.1f\n", out.view().at<float>(0, 0, 0),
              out.view().at<float>(1, 0, 0));
  return 0;
}
