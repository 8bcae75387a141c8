// Decode attention on the CPU. A work item is one split of one sequence's context for a few cached
// heads and all query heads that share them: logits from K, softmax, weighted values from V, so K
// and V are read once each, block by block. A second loop merges the splits of each sequence.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>

#include <Eigen/Core>

#include "winnow/cpu/exp.h"
#include "winnow/paged_xl/attention/attention_impl.h"
#include "winnow/paged_xl/relative_cpu.h"

namespace winnow::paged_xl {
namespace {

template <class Real>
constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

// Query heads of one item: enough neighbouring bytes of each block for the hardware to prefetch,
// few enough that their state stays in the cache. Fixed like kSplit.
constexpr std::int64_t kHeads = 8;

// One worker's memory for one item. Eigen aligns the arrays.
template <class Real>
struct Scratch {
  using Array = Eigen::Array<Real, Eigen::Dynamic, Eigen::Dynamic>;
  static constexpr std::int64_t kLeastX = 16 / sizeof(Real);
  Array q_u;      // per head: query + u, each chunk of x elements of it repeated to fill 8 lanes
  Array q_v;      // per head: query + v
  Array weights;  // per head: logits of the split, then exp(logit - maximum)
  Array sums;     // per head: 8 partial sums for each column of the value
  Array bd;       // the position term of one head
  Array tile;     // one block of one head
  Array rows;     // rows of r, and other vectors of head_size

  Scratch(std::int64_t head_size, std::int64_t block_size, std::int64_t heads)
      : q_u(kLanes / kLeastX * head_size, heads),
        q_v(head_size, heads),
        weights(kSplit, heads),
        sums(kLanes * head_size, heads),
        bd(kSplit, 1),
        tile(head_size * block_size, 1),
        rows(8 * head_size, 1) {}
};

// The result of one split for one head: maximum and sum of the weights, then their values' sum.
template <class Real>
struct Partial {
  Real* data;
  static std::int64_t size(std::int64_t head_size) { return head_size + 2; }
  Real& maximum() const { return data[0]; }
  Real& denominator() const { return data[1]; }
  Real* sum() const { return data + 2; }
};

// logits[t] = dot(q, key of slot t) over a tile [head_size/X, block_size, X].
template <int X, class T, class Real>
void key_logits(const T* tile, std::int64_t head_size, std::int64_t block_size, const Real* q,
                Real* logits) {
  using Eight = typename LanesOf<Real>::Type;
  for (std::int64_t slot = 0; slot < block_size; slot += 8) {
    Eight sums[X] = {};  // 8 slots
    for (std::int64_t c = 0; c < head_size / X; ++c) {
      const T* keys = tile + (c * block_size + slot) * X;
      Eight chunk;
      load(chunk, q + c * kLanes);
      for (int i = 0; i < X; ++i) multiply_add(sums[i], chunk, keys + i * kLanes);
    }
    sum_eight(sums, logits + slot);
  }
}

// sums[d, slot % 8] += weights[slot] * value of slot in column d, for `Strip` slots of a tile
// [head_size, block_size].
template <int Strip, class T, class Real>
void add_strip(const T* tile, std::int64_t head_size, std::int64_t block_size, const Real* weights,
               Real* sums) {
  using Eight = typename LanesOf<Real>::Type;
  Eight weight[Strip / kLanes];
  for (int i = 0; i < Strip / kLanes; ++i) load(weight[i], weights + i * kLanes);
  for (std::int64_t d = 0; d < head_size; ++d) {
    Eight sum;
    load(sum, sums + d * kLanes);
    for (int i = 0; i < Strip / kLanes; ++i) {
      multiply_add(sum, weight[i], tile + d * block_size + i * kLanes);
    }
    store(sums + d * kLanes, sum);
  }
}

template <class T, class Real>
void add_values(const T* tile, std::int64_t head_size, std::int64_t block_size, const Real* weights,
                Real* sums) {
  if (block_size == 8) return add_strip<8>(tile, head_size, block_size, weights, sums);
  if (block_size == 16) return add_strip<16>(tile, head_size, block_size, weights, sums);
  for (std::int64_t slot = 0; slot < block_size; slot += 32) {
    add_strip<32>(tile + slot, head_size, block_size, weights + slot, sums);
  }
}

// One block of one head.
struct Tile {
  const void* data;
  DType dtype;
};

// The block at `offset` of a cache: `rows` rows of `length` elements, of which the first `used` are
// read. Points into the cache where it can; a copy in the type computed in serves several heads,
// and has 0 for slots that are not in use.
template <class Real>
Tile load_tile(DType dtype, const void* cache, std::int64_t offset, std::int64_t rows,
               std::int64_t length, std::int64_t used, std::int64_t heads, Real* copy) {
  if (used == length) {
    if (dtype == dtype_of<Real> || heads == 1) {
      return {static_cast<const char*>(cache) + offset * size_of(dtype), dtype};
    }
    load_real(dtype, cache, offset, rows * length, copy);
    return {copy, dtype_of<Real>};
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    load_real(dtype, cache, offset + row * length, used, copy + row * length);
    std::fill(copy + row * length + used, copy + (row + 1) * length, Real(0));
  }
  return {copy, dtype_of<Real>};
}

// Calls body with a pointer to the elements of the tile.
template <class Real, class Body>
void with_type(const Tile& tile, const Body& body) {
  if constexpr (std::is_same_v<Real, float>) {
    if (tile.dtype == DType::f16) return body(static_cast<const Half*>(tile.data));
    if (tile.dtype == DType::bf16) return body(static_cast<const BFloat16*>(tile.data));
  }
  body(static_cast<const Real*>(tile.data));
}

// Heads of the cache that one item covers, and the query heads that read them.
struct HeadRange {
  std::int64_t kv_first, kv_count, group;  // group: query heads per cached head
  std::int64_t first() const { return kv_first * group; }
  std::int64_t count() const { return kv_count * group; }
};

template <class Real>
class Item {
 public:
  Item(const AttentionParams& params, const Splits::Split& split, const HeadRange& heads,
       Scratch<Real>& s)
      : params_(params),
        cache_(params.cache),
        split_(split),
        heads_(heads),
        count_(split.end - split.begin),
        blocks_(params.block_tables.data + params.block_tables.offset(split.sequence) +
                split.begin / params.cache.block_size),
        s_(s) {}

  // Partial results of the item's heads, `partials` that of the first.
  void run(Real* partials) const {
    load_queries();
    logits();
    for (std::int64_t g = 0; g < heads_.count(); ++g) softmax(g, partial(partials, g));
    values();
    for (std::int64_t g = 0; g < heads_.count(); ++g) {
      const Real* sums = s_.sums.col(g).data();
      for (std::int64_t d = 0; d < cache_.head_size; d += 8) {
        typename LanesOf<Real>::Type eight[8];
        for (int i = 0; i < 8; ++i) load(eight[i], sums + (d + i) * kLanes);
        sum_eight(eight, partial(partials, g).sum() + d);
      }
    }
  }

 private:
  std::int64_t head(std::int64_t g) const { return heads_.first() + g; }
  Partial<Real> partial(Real* partials, std::int64_t g) const {
    return {partials + g * Partial<Real>::size(cache_.head_size)};
  }

  void load_queries() const {
    const std::int64_t x = cache_.x();
    Real* sum = s_.rows.data();
    for (std::int64_t g = 0; g < heads_.count(); ++g) {
      biased_query(cache_.dtype, params_.query, params_.pos_bias_u, split_.sequence, head(g),
                   cache_.head_size, sum + cache_.head_size, sum);
      Real* q_u = s_.q_u.col(g).data();
      for (std::int64_t c = 0; c < cache_.head_size / x; ++c) {
        for (std::int64_t i = 0; i < kLanes; ++i) q_u[c * kLanes + i] = sum[c * x + i % x];
      }
      if (!params_.r.present()) continue;
      biased_query(cache_.dtype, params_.query, params_.pos_bias_v, split_.sequence, head(g),
                   cache_.head_size, sum, s_.q_v.col(g).data());
    }
  }

  // Calls body(tile, g, offset of its first token in the split) for every block and head; a tile
  // has `rows` rows. Heads innermost: those of a block lie side by side.
  template <class Body>
  void for_each_tile(const Rows<const void*>& where, std::int64_t rows, const Body& body) const {
    const std::int64_t per_slot = cache_.head_size / rows;
    for (std::int64_t first = 0; first < count_; first += cache_.block_size) {
      const std::int64_t block = read_once(blocks_ + first / cache_.block_size);
      // Another thread may have changed the table since it was checked: nothing to read then.
      if (block < 0 || block >= cache_.num_blocks) continue;
      const std::int64_t used = std::min(cache_.block_size, count_ - first);
      for (std::int64_t kv = 0; kv < heads_.kv_count; ++kv) {
        const Tile tile =
            load_tile(cache_.dtype, where.data, where.offset(block, heads_.kv_first + kv), rows,
                      cache_.block_size * per_slot, used * per_slot, heads_.group, s_.tile.data());
        with_type<Real>(tile, [&](const auto* data) {
          for (std::int64_t i = 0; i < heads_.group; ++i) body(data, kv * heads_.group + i, first);
        });
      }
    }
  }

  void logits() const {
    const std::int64_t x = cache_.x();
    s_.weights.leftCols(heads_.count()).topRows(count_).setConstant(-kInfinity<Real>);
    for_each_tile(params_.key, cache_.head_size / x,
                  [&](const auto* keys, std::int64_t g, std::int64_t first) {
                    const Real* q = s_.q_u.col(g).data();
                    Real* to = s_.weights.col(g).data() + first;
                    if constexpr (std::is_same_v<Real, double>) {
                      key_logits<2>(keys, cache_.head_size, cache_.block_size, q, to);
                    } else if (x == 4) {
                      key_logits<4>(keys, cache_.head_size, cache_.block_size, q, to);
                    } else {
                      key_logits<8>(keys, cache_.head_size, cache_.block_size, q, to);
                    }
                  });
  }

  void position_term(std::int64_t g) const {
    Real* bd = s_.bd.data();
    if (!params_.r.present()) {
      load_real(params_.matrix_bd_dtype, params_.matrix_bd.data,
                params_.matrix_bd.offset(split_.sequence, head(g)) + split_.begin, count_, bd);
    } else {
      relative_logits(cache_.dtype, params_.r, head(g), split_.context_len, split_.begin,
                      split_.end, s_.q_v.col(g).data(), cache_.head_size, s_.rows.data(), bd);
    }
  }

  void softmax(std::int64_t g, Partial<Real> result) const {
    position_term(g);
    // To whole blocks: a fixed length keeps the sums the same whatever the alignment.
    const std::int64_t padded = cache_.blocks_for(count_) * cache_.block_size;
    auto weights = s_.weights.col(g).head(padded);
    weights.head(count_) =
        static_cast<Real>(params_.scale) * (weights.head(count_) + s_.bd.col(0).head(count_));
    weights.tail(padded - count_).setConstant(-kInfinity<Real>);
    const Real maximum = weights.head(count_).template maxCoeff<Eigen::PropagateNaN>();
    // All logits -inf: shifting by 0 keeps their weights at 0 instead of NaN.
    const Real shift = maximum == -kInfinity<Real> ? Real(0) : maximum;
    weights = exp_of(weights - shift);
    result.maximum() = maximum;
    result.denominator() = weights.sum();
  }

  void values() const {
    s_.sums.leftCols(heads_.count()).setZero();
    for_each_tile(params_.value, cache_.head_size,
                  [&](const auto* values, std::int64_t g, std::int64_t first) {
                    add_values(values, cache_.head_size, cache_.block_size,
                               s_.weights.col(g).data() + first, s_.sums.col(g).data());
                  });
  }

  const AttentionParams& params_;
  const CacheShape& cache_;
  const Splits::Split& split_;
  const HeadRange heads_;
  const std::int64_t count_;
  const std::int32_t* blocks_;
  Scratch<Real>& s_;
};

// Merges the splits of a sequence for one head by log-sum-exp and stores the result; sum is
// scratch.
template <class Real>
void merge(const AttentionParams& params, std::int64_t s, std::int64_t h, Real* partials,
           std::int64_t splits, Real* sum) {
  const std::int64_t head_size = params.cache.head_size;
  const auto split = [&](std::int64_t i) {
    return Partial<Real>{partials + (i * params.num_heads + h) * Partial<Real>::size(head_size)};
  };
  Real maximum = -kInfinity<Real>;
  for (std::int64_t i = 0; i < splits; ++i) {
    const Real other = split(i).maximum();
    if (!(maximum >= other)) maximum = std::isnan(maximum) ? maximum : other;  // NaN stays
  }
  const Real shift = maximum == -kInfinity<Real> ? Real(0) : maximum;
  Real denominator = 0;
  std::fill(sum, sum + head_size, Real(0));
  for (std::int64_t i = 0; i < splits; ++i) {
    const Real weight = std::exp(split(i).maximum() - shift);
    denominator += weight * split(i).denominator();
    for (std::int64_t d = 0; d < head_size; ++d) sum[d] += weight * split(i).sum()[d];
  }
  const Real lse = std::isinf(maximum) ? maximum : maximum + std::log(denominator);
  if (maximum == -kInfinity<Real>) {  // no token has weight, whatever its value holds
    std::fill(sum, sum + head_size, Real(0));
  } else {
    const Real inverse = Real(1) / denominator;
    for (std::int64_t d = 0; d < head_size; ++d) sum[d] *= inverse;
  }
  store_real(params.cache.dtype, sum, head_size, params.out.data, params.out.offset(s, h));
  if (params.lse.present()) params.lse.as<Real>().data[params.lse.offset(s) + h] = lse;
}

template <class Real>
void attention_all(const AttentionParams& params, const Executor& executor) {
  const CacheShape& cache = params.cache;
  const std::int64_t group = params.num_heads / cache.num_kv_heads;
  const std::int64_t kv_per_item = std::clamp<std::int64_t>(kHeads / group, 1, cache.num_kv_heads);
  const std::int64_t ranges = (cache.num_kv_heads + kv_per_item - 1) / kv_per_item;
  const std::int64_t partial_size = Partial<Real>::size(cache.head_size);
  const Splits splits(params.context_lens, params.num_seqs, params.max_context);
  // Not cleared: it may be gigabytes, which each worker touches first where it writes.
  const auto partials = std::make_unique_for_overwrite<Real[]>(
      static_cast<std::size_t>(splits.count() * params.num_heads * partial_size));
  auto scratch = scratch_of_workers<Scratch<Real>>(
      executor, std::max(splits.count() * ranges, params.num_seqs * params.num_heads),
      cache.head_size, cache.block_size, kv_per_item * group);

  executor.for_each_range(
      splits.count() * ranges, 1, [&](std::int64_t item, std::int64_t, int worker) {
        const std::int64_t split = item / ranges, kv_first = item % ranges * kv_per_item;
        const HeadRange heads = {kv_first, std::min(kv_per_item, cache.num_kv_heads - kv_first),
                                 group};
        Item<Real>(params, splits.all[static_cast<std::size_t>(split)], heads,
                   scratch[static_cast<std::size_t>(worker)])
            .run(partials.get() + (split * params.num_heads + heads.first()) * partial_size);
      });
  executor.for_each_range(
      params.num_seqs * params.num_heads, 1, [&](std::int64_t item, std::int64_t, int worker) {
        const std::int64_t s = item / params.num_heads, h = item % params.num_heads;
        const std::int64_t first = splits.first[static_cast<std::size_t>(s)];
        const std::int64_t end = splits.first[static_cast<std::size_t>(s) + 1];
        merge(params, s, h, partials.get() + first * params.num_heads * partial_size, end - first,
              scratch[static_cast<std::size_t>(worker)].rows.data());
      });
}

}  // namespace

void attention_cpu(const AttentionParams& params, const Executor& executor) {
  const bool f64 = params.cache.dtype == DType::f64;
  (f64 ? attention_all<double> : attention_all<float>)(params, executor);
}

}  // namespace winnow::paged_xl
