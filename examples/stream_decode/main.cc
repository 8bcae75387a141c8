// A streaming decoder: streams of different lengths arrive, grow a paged cache token by token, and
// leave their blocks to the next ones. Every step is compared with the computation over the whole
// history of its stream, which knows nothing of blocks.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <winnow/winnow.h>

namespace {

using winnow::Device;
using winnow::DType;
using winnow::Tensor;

constexpr std::int64_t kHeads = 8, kKvHeads = 2, kHeadSize = 64, kBlockSize = 16;
constexpr std::int64_t kBatch = 4;       // streams that decode together
constexpr std::int64_t kNumBlocks = 22;  // for all of them: fewer than all streams need
constexpr std::int64_t kMaxBlocks = 10;  // of one stream
constexpr std::int64_t kLongest = kMaxBlocks * kBlockSize;
constexpr std::int64_t kX = 16 / sizeof(float);  // floats of a key that lie side by side
constexpr double kTolerance = 1e-5;              // relative to the largest output of a step

std::int64_t blocks_for(std::int64_t tokens) { return (tokens + kBlockSize - 1) / kBlockSize; }

// Hands out blocks and takes them back; the one freed last is used first.
class BlockPool {
 public:
  BlockPool() {
    for (std::int32_t block = 0; block < kNumBlocks; ++block) free_.push_back(block);
  }
  // A stream starts only when all blocks that it may ever need can be had.
  bool reserve(std::int64_t blocks) {
    if (reserved_ + blocks > kNumBlocks) return false;
    reserved_ += blocks;
    return true;
  }
  std::int32_t take() {
    const std::int32_t block = free_.back();
    free_.pop_back();
    if (!ever_used_.insert(block).second) ++reused_;
    return block;
  }
  void give_back(const std::vector<std::int32_t>& blocks) {
    free_.insert(free_.end(), blocks.begin(), blocks.end());
    reserved_ -= static_cast<std::int64_t>(blocks.size());
  }
  std::int64_t reused() const { return reused_; }
  std::int64_t free() const { return static_cast<std::int64_t>(free_.size()); }

 private:
  std::vector<std::int32_t> free_;
  std::set<std::int32_t> ever_used_;
  std::int64_t reserved_ = 0, reused_ = 0;
};

// What the layer's projections would give for the tokens of one stream, and where they are cached.
struct Stream {
  int number = 0;
  Tensor query, key, value;          // [tokens, heads, kHeadSize]
  std::vector<std::int32_t> blocks;  // of the cache, in the order of the tokens
  std::int64_t done = 0;             // tokens decoded
  double worst = 0;
  std::int64_t tokens() const { return query.size(0); }
};

void fill_random(Tensor& tensor, std::mt19937& random, float scale = 1) {
  std::uniform_real_distribution<float> number(-scale, scale);
  for (float& value : tensor.values<float>()) value = number(random);
}

// The model's constants: biases u and v, and the projected embedding of every distance.
struct Model {
  Tensor u{DType::f32, {kHeads, kHeadSize}}, v{DType::f32, {kHeads, kHeadSize}};
  Tensor r{DType::f32, {kHeads, kLongest, kHeadSize}};
};

// The last row of full relative attention over the first `n` tokens of a stream, in double: token
// n - 1 attends to all up to itself, token j at the distance n - 1 - j.
std::vector<double> full_attention(const Stream& stream, const Model& model, std::int64_t n) {
  std::vector<double> result;
  for (std::int64_t h = 0; h < kHeads; ++h) {
    const std::int64_t kv = h / (kHeads / kKvHeads);
    std::vector<double> weight;
    for (std::int64_t j = 0; j < n; ++j) {
      double logit = 0;
      for (std::int64_t d = 0; d < kHeadSize; ++d) {
        const double q = stream.query.view().at<float>(n - 1, h, d);
        logit += (q + model.u.view().at<float>(h, d)) * stream.key.view().at<float>(j, kv, d);
        logit += (q + model.v.view().at<float>(h, d)) * model.r.view().at<float>(h, n - 1 - j, d);
      }
      weight.push_back(logit / std::sqrt(double(kHeadSize)));
    }
    const double largest = *std::max_element(weight.begin(), weight.end());
    double sum = 0;
    for (double& w : weight) sum += w = std::exp(w - largest);
    for (std::int64_t d = 0; d < kHeadSize; ++d) {
      double out = 0;
      for (std::int64_t j = 0; j < n; ++j) {
        out += weight[static_cast<std::size_t>(j)] / sum * stream.value.view().at<float>(j, kv, d);
      }
      result.push_back(out);
    }
  }
  return result;
}

// The decoder's memory: the cache, which lives where the operations run, and the tensors of one
// step for up to kBatch streams.
class Decoder {
 public:
  Decoder(Model model, Device device) : device_(device), model_(std::move(model)) {
    // Whatever is read without having been written shows as NaN.
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (float& number : key_cache_.values<float>()) number = nan;
    for (float& number : value_cache_.values<float>()) number = nan;
    key_cache_ = key_cache_.to(device_);
    value_cache_ = value_cache_.to(device_);
    model_there_ = {model_.u.to(device_), model_.v.to(device_), model_.r.to(device_)};
  }

  // Decodes the next token of every stream and returns false if one differs from the full result.
  bool step(std::deque<Stream>& active, BlockPool& pool) {
    const auto n = static_cast<std::int64_t>(active.size());
    for (std::int64_t s = 0; s < n; ++s) gather(active[static_cast<std::size_t>(s)], s, pool);
    // A model would leave query, key and value on the device; here they come from the host.
    const Tensor query = query_.to(device_), key = key_.to(device_), value = value_.to(device_);
    const Tensor slots = slots_.to(device_), context_lens = context_lens_.to(device_);
    const Tensor block_tables = block_tables_.to(device_);
    Tensor out = out_.to(device_);
    winnow::paged_xl::append({.key = key.view().slice(0, 0, n),
                              .value = value.view().slice(0, 0, n),
                              .slot_mapping = slots.view().slice(0, 0, n),
                              .key_cache = key_cache_,
                              .value_cache = value_cache_});
    winnow::paged_xl::attention({.query = query.view().slice(0, 0, n),
                                 .key_cache = key_cache_,
                                 .value_cache = value_cache_,
                                 .pos_bias_u = model_there_.u,
                                 .pos_bias_v = model_there_.v,
                                 .r = model_there_.r,
                                 .block_tables = block_tables.view().slice(0, 0, n),
                                 .context_lens = context_lens.view().slice(0, 0, n),
                                 .out = out.view().slice(0, 0, n)});
    out_ = out.to({});
    bool equal = true;
    for (std::int64_t s = 0; s < n; ++s) equal &= check(active[static_cast<std::size_t>(s)], s);
    return equal;
  }

 private:
  // Row s of the step's tensors: the stream's next token, a place for it, and its block table.
  void gather(Stream& stream, std::int64_t s, BlockPool& pool) {
    const std::int64_t t = stream.done++;
    if (t % kBlockSize == 0) stream.blocks.push_back(pool.take());
    slots_.view().at<std::int64_t>(s) = stream.blocks.back() * kBlockSize + t % kBlockSize;
    context_lens_.view().at<std::int32_t>(s) = static_cast<std::int32_t>(t + 1);
    for (std::size_t b = 0; b < stream.blocks.size(); ++b) {
      block_tables_.view().at<std::int32_t>(s, static_cast<std::int64_t>(b)) = stream.blocks[b];
    }
    for (std::int64_t d = 0; d < kHeadSize; ++d) {
      for (std::int64_t h = 0; h < kHeads; ++h) {
        query_.view().at<float>(s, h, d) = stream.query.view().at<float>(t, h, d);
      }
      for (std::int64_t h = 0; h < kKvHeads; ++h) {
        key_.view().at<float>(s, h, d) = stream.key.view().at<float>(t, h, d);
        value_.view().at<float>(s, h, d) = stream.value.view().at<float>(t, h, d);
      }
    }
  }

  bool check(Stream& stream, std::int64_t s) {
    const std::vector<double> expected = full_attention(stream, model_, stream.done);
    double largest = 0, difference = 0;
    bool finite = true;
    for (std::int64_t h = 0; h < kHeads; ++h) {
      for (std::int64_t d = 0; d < kHeadSize; ++d) {
        const double wanted = expected[static_cast<std::size_t>(h * kHeadSize + d)];
        const double got = out_.view().at<float>(s, h, d);
        finite = finite && std::isfinite(got);
        largest = std::max(largest, std::abs(wanted));
        difference = std::max(difference, std::abs(got - wanted));
      }
    }
    stream.worst = std::max(stream.worst, difference / largest);
    if (finite && difference <= kTolerance * largest) return true;
    std::fprintf(stderr, "stream %d, token %lld: differs by %g of the largest output\n",
                 stream.number, static_cast<long long>(stream.done - 1), difference / largest);
    return false;
  }

  Device device_;
  Model model_, model_there_;
  Tensor key_cache_{DType::f32, {kNumBlocks, kKvHeads, kHeadSize / kX, kBlockSize, kX}};
  Tensor value_cache_{DType::f32, {kNumBlocks, kKvHeads, kHeadSize, kBlockSize}};
  Tensor query_{DType::f32, {kBatch, kHeads, kHeadSize}};
  Tensor key_{DType::f32, {kBatch, kKvHeads, kHeadSize}};
  Tensor value_{DType::f32, {kBatch, kKvHeads, kHeadSize}};
  Tensor slots_{DType::i64, {kBatch}}, context_lens_{DType::i32, {kBatch}};
  Tensor block_tables_{DType::i32, {kBatch, kMaxBlocks}};
  Tensor out_{DType::f32, {kBatch, kHeads, kHeadSize}};
};

int run(Device device) {
  std::mt19937 random(1);
  Model model;
  for (Tensor* tensor : {&model.u, &model.v, &model.r}) fill_random(*tensor, random, 0.5f);
  std::deque<Stream> waiting, active;
  for (const std::int64_t tokens : {100, 17, 1, 60, 160, 32, 5, 90, 48, 33}) {
    Stream stream;
    stream.number = static_cast<int>(waiting.size());
    stream.query = Tensor(DType::f32, {tokens, kHeads, kHeadSize});
    stream.key = Tensor(DType::f32, {tokens, kKvHeads, kHeadSize});
    stream.value = Tensor(DType::f32, {tokens, kKvHeads, kHeadSize});
    for (Tensor* tensor : {&stream.query, &stream.key, &stream.value}) {
      fill_random(*tensor, random, 2);
    }
    waiting.push_back(std::move(stream));
  }

  Decoder decoder(std::move(model), device);
  BlockPool pool;
  bool equal = true;
  int steps = 0;
  std::printf("stream  tokens  blocks  left after step  largest error\n");
  while (!waiting.empty() || !active.empty()) {
    while (!waiting.empty() && std::int64_t(active.size()) < kBatch &&
           pool.reserve(blocks_for(waiting.front().tokens()))) {
      active.push_back(std::move(waiting.front()));
      waiting.pop_front();
    }
    equal = decoder.step(active, pool) && equal;
    ++steps;
    for (auto stream = active.begin(); stream != active.end();) {
      if (stream->done < stream->tokens()) {
        ++stream;
        continue;
      }
      std::printf("%6d  %6lld  %6zu  %15d  %13.1e\n", stream->number,
                  static_cast<long long>(stream->tokens()), stream->blocks.size(), steps,
                  stream->worst);
      pool.give_back(stream->blocks);
      stream = active.erase(stream);
    }
  }
  std::printf("%d steps, %lld blocks, %lld times a block was used again\n", steps,
              static_cast<long long>(kNumBlocks), static_cast<long long>(pool.reused()));
  if (pool.reused() == 0 || pool.free() != kNumBlocks) {
    std::fprintf(stderr, "blocks were not given back and used again\n");
    return 1;
  }
  std::printf(equal ? "every step equals the full computation\n"
                    : "some steps differ from the full computation\n");
  return equal ? 0 : 1;
}

}  // namespace

// stream_decode [--device cpu|cuda]
int main(int argc, char** argv) {
  const bool chosen = argc == 3 && std::strcmp(argv[1], "--device") == 0;
  const std::string device = chosen ? argv[2] : "cpu";
  if ((argc != 1 && !chosen) || (device != "cpu" && device != "cuda")) {
    std::fprintf(stderr, "usage: stream_decode [--device cpu|cuda]\n");
    return 2;
  }
  try {
    return run(device == "cuda" ? Device{winnow::DeviceType::cuda, 0} : Device{});
  } catch (const winnow::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
