// Step 10: the last tokens once more, one at a time, as a program that writes text meets them: over
// a paged cache and with relative positions.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <utility>

#include "tools/winnow/demo/comparison.h"
#include "tools/winnow/demo/indexer.h"
#include "tools/winnow/demo/state.h"
#include "tools/winnow/demo/text_format.h"

#include "winnow/core/device_memory.h"

namespace winnow::demo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kReplayed = 64;  // tokens
constexpr std::int64_t kStreamHeads = 8;
constexpr std::int64_t kHeadSize = 64;
constexpr std::int64_t kWidth = kStreamHeads * kHeadSize;
constexpr std::int64_t kBlockSize = 16;
constexpr std::int64_t kSpareBlocks = 7;         // never used
constexpr std::int64_t kX = 16 / sizeof(float);  // floats of a key that lie side by side
constexpr double kWavelengths = 10000.0;         // of the sinusoids: from 2 pi to 2 pi times this
constexpr double kDecodeTolerance = 1e-5;        // relative to the largest |out| of a token
static_assert(kWidth == kNopeDim, "the heads share out what a row tells of its bytes");

// What a layer with relative positions makes of the document. In its rows the place is left out:
// that is what the distances are for.
struct StreamLayer {
  Tensor query;       // [kReplayed, kStreamHeads, kHeadSize], of the last tokens
  Tensor key, value;  // [tokens, kStreamHeads, kHeadSize]
  Tensor u, v;        // [kStreamHeads, kHeadSize]
  Tensor r;           // [kStreamHeads, tokens, kHeadSize], of every distance
  std::int64_t tokens() const { return key.size(0); }
  StreamLayer to(Device device) const {
    return {query.to(device), key.to(device), value.to(device),
            u.to(device),     v.to(device),   r.to(device)};
  }
};

// Keeps inner products approximately.
Matrix random_map(std::int64_t rows, std::int64_t columns, Random& random) {
  return random_matrix(rows, columns, 1 / std::sqrt(double(kHeadSize)), random);
}

// Unit rows; the inner product of two falls with their distance.
Matrix sinusoids(std::int64_t distances) {
  Matrix result(distances, kHeadSize);
  constexpr std::int64_t kPairs = kHeadSize / 2;
  for (std::int64_t distance = 0; distance < distances; ++distance) {
    for (std::int64_t pair = 0; pair < kPairs; ++pair) {
      const double angle =
          double(distance) * std::pow(kWavelengths, -double(pair) / double(kPairs));
      const double length = 1 / std::sqrt(double(kPairs));
      result(distance, pair) = static_cast<float>(length * std::sin(angle));
      result(distance, pair + kPairs) = static_cast<float>(length * std::cos(angle));
    }
  }
  return result;
}

Eigen::Map<Matrix> matrix(Tensor& tensor, std::int64_t columns) {
  return {tensor.values<float>().data(), tensor.numel() / columns, columns};
}

// Heads look for rows like the query's own, and for near ones, each in a different mixture.
StreamLayer make_stream_layer(const Layer& layer, Random& random) {
  const std::int64_t tokens = layer.tokens();
  StreamLayer stream{Tensor(DType::f32, {kReplayed, kStreamHeads, kHeadSize}),
                     Tensor(DType::f32, {tokens, kStreamHeads, kHeadSize}),
                     Tensor(DType::f32, {tokens, kStreamHeads, kHeadSize}),
                     Tensor(DType::f32, {kStreamHeads, kHeadSize}),
                     Tensor(DType::f32, {kStreamHeads, kHeadSize}),
                     Tensor(DType::f32, {kStreamHeads, tokens, kHeadSize})};
  const auto content = rows_of(layer.kv()).leftCols(kNopeDim);
  Eigen::Map<Matrix> key = matrix(stream.key, kWidth), query = matrix(stream.query, kWidth);
  key.noalias() = content * random_map(kNopeDim, kWidth, random);
  matrix(stream.value, kWidth) = content;
  matrix(stream.u, kHeadSize) = random_map(kStreamHeads, kHeadSize, random);
  Eigen::Map<Matrix> v = matrix(stream.v, kHeadSize), r = matrix(stream.r, kHeadSize);
  const Matrix places = sinusoids(tokens);
  const float undo_scale = std::sqrt(float(kHeadSize));
  for (std::int64_t h = 0; h < kStreamHeads; ++h) {
    const float variant = float(h) / float(kStreamHeads);
    query.middleCols(h * kHeadSize, kHeadSize) =
        undo_scale * (1 + 2 * variant) *
        key.block(tokens - kReplayed, h * kHeadSize, kReplayed, kHeadSize);
    r.middleRows(h * tokens, tokens).noalias() = places * random_map(kHeadSize, kHeadSize, random);
    v.row(h) = undo_scale * (4 - 3 * variant) * r.row(h * tokens);
  }
  return stream;
}

// Rows of one head, of a tensor [rows, heads, kHeadSize].
std::vector<double> head_rows(const ConstTensorView& tensor, std::int64_t h) {
  std::vector<double> rows;
  for (std::int64_t i = 0; i < tensor.size(0); ++i) {
    const float* row = &tensor.at<float>(i, h, 0);
    rows.insert(rows.end(), row, row + kHeadSize);
  }
  return rows;
}

double biased_dot(const double* query, const double* bias, const double* with) {
  double sum = 0;
  for (std::int64_t d = 0; d < kHeadSize; ++d) sum += (query[d] + bias[d]) * with[d];
  return sum;
}

struct FullAttention {
  std::vector<double> out = std::vector<double>(kReplayed * kWidth);
  std::vector<double> lse = std::vector<double>(kReplayed * kStreamHeads);
};

// All replayed tokens at once, as Dai et al. 2019 (section 3.3, appendix B) compute a segment: the
// tokens before it are its memory, and the position terms of the whole matrix are shifted so that
// each row begins at its own farthest distance.
void add_full_head(const StreamLayer& stream, std::int64_t h, FullAttention& full) {
  const std::int64_t tokens = stream.tokens(), memory = tokens - kReplayed;
  const std::vector<double> q = head_rows(stream.query, h), k = head_rows(stream.key, h);
  const std::vector<double> values = head_rows(stream.value, h);
  const std::vector<double> r = head_rows(stream.r.view().transpose(0, 1), h);
  const std::vector<double> u =
      to_double(stream.u.values<float>().subspan(h * kHeadSize, kHeadSize));
  const std::vector<double> v =
      to_double(stream.v.values<float>().subspan(h * kHeadSize, kHeadSize));

  // Column p belongs to the distance tokens - 1 - p. A column of zeros stands before them; the same
  // memory, seen as rows of kReplayed entries without the first of them, is the shifted matrix.
  std::vector<double> padded;
  for (std::int64_t i = 0; i < kReplayed; ++i) {
    padded.push_back(0);
    for (std::int64_t p = 0; p < tokens; ++p) {
      padded.push_back(biased_dot(&q[i * kHeadSize], v.data(), &r[(tokens - 1 - p) * kHeadSize]));
    }
  }
  const std::span<const double> shifted = std::span(padded).subspan(kReplayed);

  for (std::int64_t i = 0; i < kReplayed; ++i) {
    std::vector<double> weights;
    for (std::int64_t j = 0; j <= memory + i; ++j) {
      const double dot = biased_dot(&q[i * kHeadSize], u.data(), &k[j * kHeadSize]);
      weights.push_back((dot + shifted[i * tokens + j]) / std::sqrt(double(kHeadSize)));
    }
    const double largest = *std::max_element(weights.begin(), weights.end());
    double sum = 0;
    for (double& weight : weights) sum += weight = std::exp(weight - largest);
    full.lse[i * kStreamHeads + h] = largest + std::log(sum);
    double* out = &full.out[i * kWidth + h * kHeadSize];
    for (std::int64_t j = 0; j <= memory + i; ++j) {
      for (std::int64_t d = 0; d < kHeadSize; ++d) {
        out[d] += weights[j] / sum * values[j * kHeadSize + d];
      }
    }
  }
}

FullAttention full_attention(const StreamLayer& stream) {
  FullAttention full;
  for (std::int64_t h = 0; h < kStreamHeads; ++h) add_full_head(stream, h, full);
  return full;
}

// One sequence and its cache, where the demo's layer runs. Blocks come from a shuffled list when
// they are needed; what nobody has written is NaN, and no block at all in the table.
class Decoder {
 public:
  Decoder(const StreamLayer& stream, Layer& layer, Random& random)
      : layer_(layer), stream_(stream.to(device())), free_(num_blocks()) {
    std::iota(free_.begin(), free_.end(), 0);
    testing::shuffle(std::span(free_), random);
    std::ranges::fill(table_.values<std::int32_t>(), -1);
  }

  // Caches the tokens up to `end`.
  void append_to(std::int64_t end) {
    const std::int64_t begin = length();
    Tensor slots(DType::i64, {end - begin});
    std::span<std::int32_t> table = table_.values<std::int32_t>();
    for (std::int64_t t = begin; t < end; ++t) {
      if (t % kBlockSize == 0) {
        table[t / kBlockSize] = free_.back();
        free_.pop_back();
      }
      slots.values<std::int64_t>()[t - begin] = table[t / kBlockSize] * kBlockSize + t % kBlockSize;
    }
    context_.values<std::int32_t>()[0] = static_cast<std::int32_t>(end);
    slots = slots.to(device());
    table_there_ = table_.to(device());
    context_there_ = context_.to(device());
    layer_.note(paged_xl::append({.key = std::as_const(stream_).key.view().slice(0, begin, end),
                                  .value = std::as_const(stream_).value.view().slice(0, begin, end),
                                  .slot_mapping = slots,
                                  .key_cache = key_cache_,
                                  .value_cache = value_cache_},
                                 layer_.placement().portable_options()),
                "decode");
    synchronize(device());
  }

  // The attention of replayed token i, which must be the last one in the cache.
  LayerOutput fused(std::int64_t i) {
    paged_xl::AttentionArgs args = attention_args(i);
    args.pos_bias_v = stream_.v;
    args.r = stream_.r;
    return run(args);
  }
  LayerOutput plain(std::int64_t i) {
    paged_xl::AttentionArgs args = attention_args(i);
    Tensor matrix_bd(DType::f32, {1, kStreamHeads, stream_.tokens()}, device());
    layer_.note(paged_xl::position_term({.query = args.query,
                                         .pos_bias_v = stream_.v,
                                         .r = stream_.r,
                                         .context_lens = context_there_,
                                         .matrix_bd = matrix_bd},
                                        layer_.placement().portable_options()),
                "decode");
    args.matrix_bd = matrix_bd;
    return run(args);
  }

  std::int64_t length() const { return context_.values<std::int32_t>()[0]; }
  std::int64_t blocks() const { return (length() + kBlockSize - 1) / kBlockSize; }
  bool out_of_order() const {
    const std::span<const std::int32_t> used = table_.values<std::int32_t>().first(blocks());
    return !std::ranges::is_sorted(used);
  }
  // The slots of the tokens hold numbers, and no other slot does.
  bool unused_untouched() const {
    const auto written = [](const Tensor& cache) {
      const Tensor host = cache.to({});
      return std::ranges::count_if(host.values<float>(), [](float v) { return !std::isnan(v); });
    };
    return written(key_cache_) == length() * kWidth && written(value_cache_) == length() * kWidth;
  }

 private:
  std::int64_t num_blocks() const { return max_blocks() + kSpareBlocks; }
  std::int64_t max_blocks() const { return (stream_.tokens() + kBlockSize - 1) / kBlockSize; }

  paged_xl::AttentionArgs attention_args(std::int64_t i) const {
    paged_xl::AttentionArgs args;
    args.query = stream_.query.view().slice(0, i, i + 1);
    args.key_cache = key_cache_;
    args.value_cache = value_cache_;
    args.pos_bias_u = stream_.u;
    args.block_tables = table_there_;
    args.context_lens = context_there_;
    return args;
  }
  LayerOutput run(paged_xl::AttentionArgs& args) {
    Tensor out = unwritten({1, kStreamHeads, kHeadSize}).to(device());
    Tensor lse = unwritten({1, kStreamHeads}).to(device());
    args.out = out;
    args.lse = lse;
    layer_.note(paged_xl::attention(args, layer_.placement().portable_options()), "decode");
    return {out.to({}), lse.to({})};
  }

  Device device() const { return layer_.placement().device; }

  Layer& layer_;
  StreamLayer stream_;
  std::vector<std::int32_t> free_;
  Tensor key_cache_ =
      unwritten({num_blocks(), kStreamHeads, kHeadSize / kX, kBlockSize, kX}).to(device());
  Tensor value_cache_ = unwritten({num_blocks(), kStreamHeads, kHeadSize, kBlockSize}).to(device());
  Tensor table_{DType::i32, {1, max_blocks()}}, context_{DType::i32, {1}};  // on the host
  Tensor table_there_, context_there_;
};

// The largest errors over the replayed tokens.
struct Errors {
  double out = 0, lse = 0;
  void add(const LayerOutput& got, std::span<const double> out_wanted,
           std::span<const double> lse_wanted) {
    out = larger(out, largest_difference(got.out.values<float>(), out_wanted) /
                          largest_magnitude(out_wanted));
    lse = larger(lse, largest_difference(got.lse.values<float>(), lse_wanted));
  }
};

double milliseconds(Clock::duration time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

}  // namespace

void run_decode_step(DemoState& state, StepReport& report) {
  Layer& layer = *state.layer;
  Random random(23);
  const StreamLayer stream = make_stream_layer(layer, random);
  const FullAttention full = full_attention(stream);
  Decoder decoder(stream, layer, random);
  const std::int64_t tokens = stream.tokens();
  decoder.append_to(tokens - kReplayed);

  Errors fused_errors, plain_errors, between;
  Clock::duration append_time{}, fused_time{}, plain_time{};
  double bytes = 0;
  for (std::int64_t i = 0; i < kReplayed; ++i) {
    const auto start = Clock::now();
    decoder.append_to(tokens - kReplayed + i + 1);
    const auto appended = Clock::now();
    const LayerOutput fused = decoder.fused(i);
    const auto attended = Clock::now();
    const LayerOutput plain = decoder.plain(i);
    plain_time += Clock::now() - attended;
    append_time += appended - start;
    fused_time += attended - appended;
    bytes += 2.0 * double(decoder.length()) * double(kWidth) * sizeof(float);

    const auto out = std::span(full.out).subspan(i * kWidth, kWidth);
    const auto lse = std::span(full.lse).subspan(i * kStreamHeads, kStreamHeads);
    fused_errors.add(fused, out, lse);
    plain_errors.add(plain, out, lse);
    between.add(fused, to_double(plain.out.values<float>()), to_double(plain.lse.values<float>()));
  }
  const double append_ms = milliseconds(append_time) / double(kReplayed);
  const double fused_ms = milliseconds(fused_time) / double(kReplayed);
  const double plain_ms = milliseconds(plain_time) / double(kReplayed);
  bytes /= double(kReplayed);

  report.size = format_text("%ld of %ld tokens, %ld heads x %ld, %ld blocks of %ld", kReplayed,
                            tokens, kStreamHeads, kHeadSize, decoder.blocks(), kBlockSize);
  report.done.push_back(
      "the last tokens again, one at a time: each goes into a paged cache, whose");
  report.done.push_back("blocks lie out of order, and attends to all in it at relative distances;");
  report.done.push_back(format_text("per token %.1f MB of K and V; append %.3f ms, attention",
                                    bytes / 1e6, append_ms));
  report.done.push_back(
      format_text("%.3f ms fused, %.3f ms plain with its position_term", fused_ms, plain_ms));
  if (layer.placement().device.type != DeviceType::cpu) {
    report.done.push_back("in f32; the times include copies between host and GPU");
  }
  const std::string against_full = format_text(" of %ld tokens against full attention", kReplayed);
  report.at_most("fused out" + against_full, fused_errors.out, kDecodeTolerance);
  report.at_most("plain out" + against_full, plain_errors.out, kDecodeTolerance);
  report.at_most("lse" + against_full, larger(fused_errors.lse, plain_errors.lse),
                 kF32Tolerances.lse);
  report.at_most("fused out against plain out", between.out, kDecodeTolerance);
  report.require("blocks are out of order, and unused slots were left alone",
                 decoder.out_of_order() && decoder.unused_untouched());
  report.numbers = {{"replayed", kReplayed},          {"blocks", decoder.blocks()},
                    {"kv_bytes_per_token", bytes},    {"append_ms_per_token", append_ms},
                    {"fused_ms_per_token", fused_ms}, {"plain_ms_per_token", plain_ms}};
}

}  // namespace winnow::demo
