// The attention layer of the demo: the operations of the library on the document's queries and
// rows, and what they are compared with.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/winnow/demo/indexer.h"

#include "winnow/winnow.h"

namespace winnow::demo {

inline constexpr std::int64_t kNopeDim = 512;
inline constexpr std::int64_t kRopeDim = 64;
inline constexpr std::int64_t kRowDim = kNopeDim + kRopeDim;  // d_qk
inline constexpr std::int64_t kHeads = 16;
// How many bytes, itself and those just before, a row tells about.
inline constexpr int kContext = 4;

struct Embedding {
  Tensor q;   // [tokens, kHeads, kRowDim], f32
  Tensor kv;  // [tokens, 1, kRowDim], f32
};

// Every byte of `text` becomes a token. A row says which byte stands there and which ones stood 1,
// 2 and 3 places before (each a fixed random direction of the 512 columns), and where it is (rotary
// angles in the 64 columns). The heads ask four kinds of questions:
//   nearby     what stands just before me?
//   after      what followed earlier occurrences of my byte? (the key's previous byte is mine)
//   after two  the same for my last two bytes: an induction head
//   alike      which places look like mine, in their last three bytes?
// All of them prefer recent rows, more or less. The strengths are chosen so that the softmax is
// neither flat nor on a single row.
Embedding embed(std::string_view text);

// Where forward and distribution run, and on which numbers. On a GPU only bf16 works.
struct Placement {
  Device device{};
  DType dtype = DType::f32;  // f32 or bf16
  RunOptions options{};
  // For what the GPU has no kernels for: the CPU, named so that nothing else can run.
  RunOptions cpu_options() const {
    return device.type == DeviceType::cpu ? options : RunOptions{.backend = Backend::cpu};
  }
  // For what has portable kernels only on a GPU.
  RunOptions portable_options() const {
    return device.type == DeviceType::cpu ? options : RunOptions{.backend = Backend::cuda};
  }
};

// Results are f32 on the host whatever the operations work on.
struct LayerOutput {
  Tensor out;  // [queries, kHeads, 512]
  Tensor lse;  // [queries, kHeads]
};

// Attention of some queries over all earlier tokens: what the indexer should find.
struct DenseAttention {
  std::vector<std::int64_t> positions;
  LayerOutput output;
  Tensor attn_sum;  // [queries, tokens], 0 after the query's position
  // Share of all heads' attention that the query at positions[i] pays to `token`.
  double share(std::int64_t i, std::int64_t token) const {
    return double(attn_sum.view().at<float>(i, token)) / double(kHeads);
  }
};

// What ran on each backend, each named once.
using BackendsUsed = std::map<Backend, std::vector<std::string>>;

// "cpu", or "sm90 (forward, distribution), cpu (backward)" where there are several.
std::string to_string(const BackendsUsed& backends);

class Layer {
 public:
  // For bf16 q and kv are rounded here, once: what the host keeps are the same numbers as f32.
  Layer(Embedding embedding, const Placement& placement);

  std::int64_t tokens() const { return embedding_.kv.size(0); }
  const Tensor& q() const { return embedding_.q; }
  const Tensor& kv() const { return embedding_.kv; }
  // The operations, for the queries at the selection's positions. Outputs begin as NaN, so that a
  // value which an operation left out shows.
  LayerOutput forward(const Selection& selection);
  Tensor distribution(const Selection& selection, const Tensor& lse);
  DenseAttention dense(std::span<const std::int64_t> positions);

  // The backends that ran, as the operations reported; `what` is the part of the demo.
  const BackendsUsed& backends_used() const { return backends_used_; }
  void note(Backend backend, std::string_view what);
  const Placement& placement() const { return placement_; }

 private:
  // A tensor where the operations run; `memory` is empty where the host's own serves.
  struct Operand {
    Tensor memory;
    ConstTensorView view;
  };
  struct SelectedQueries;

  bool on_host() const { return placement_.device.type == DeviceType::cpu; }
  Operand place(const ConstTensorView& host) const;  // dense; keeps the dtype
  Operand place_values(const Tensor& host) const;    // f32; becomes the placement's dtype
  // Outputs for the operations, full of NaN, and what they hold then, as f32 on the host.
  Tensor output(std::initializer_list<std::int64_t> shape, DType dtype) const;
  Tensor fetch(Tensor result) const;

  Embedding embedding_;
  Placement placement_;
  Operand q_;  // of all tokens, as kv_: they go to the device once
  Operand kv_;
  BackendsUsed backends_used_;
};

// The rows of q at the positions, [positions, kHeads, kRowDim].
Tensor gather_queries(const Tensor& q, std::span<const std::int64_t> positions);

// A tensor of NaN.
Tensor unwritten(std::initializer_list<std::int64_t> shape, DType dtype = DType::f32);

// Mean over the queries of the dense attention's share that falls on the selected tokens.
double captured_share(const DenseAttention& dense, const Selection& selection);

// |out - dense| / |dense|, the norms being over all queries of `dense`, to which the rows of
// `out` belong one by one.
double relative_error(const DenseAttention& dense, const Tensor& out);

}  // namespace winnow::demo
