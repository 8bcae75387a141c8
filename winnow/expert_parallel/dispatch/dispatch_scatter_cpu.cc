#include <algorithm>
#include <atomic>
#include <numeric>
#include <string>
#include <vector>

#include "winnow/core/read_once.h"
#include "winnow/expert_parallel/dispatch/dispatch_scatter.h"
#include "winnow/expert_parallel/routing/rail_sources.h"

namespace winnow::expert_parallel {
namespace {

class Scatter {
 public:
  Scatter(Layer& layer, const ConstTensorView& table, const RowWriter& writer, Routing& routing)
      : layer_(layer),
        table_(table),
        writer_(writer),
        routing_(routing),
        sources_(layer.map, routing, layer.communicator.local()) {
    for (const std::int64_t rows : routing.wanted_rows) starts_.push_back(starts_.back() + rows);
  }

  void run() {
    std::vector<std::int64_t> table_rows;
    for (int rank = 0; rank < layer_.map.topology.world_size; ++rank) {
      table_rows.push_back(layer_.exchange.header(rank).scatter_rows);
    }
    check_table_sizes(routing_.tokens_per_rank, table_rows);
    clear_owners();
    Header header;
    header.options.call = Call::scatter_rows;
    const std::vector<std::int32_t> rows = translate(header);
    layer_.meet(kDispatch, "the scattered rows", header, nullptr, std::as_bytes(std::span(rows)));
    layer_.exchange.throw_refusals(kDispatch);
    take_rows(rows);

    Header verdict;
    verdict.options.call = Call::scatter_check;
    claim(verdict);
    layer_.meet(kDispatch, "the check of the scattered rows", verdict);
    layer_.exchange.throw_refusals(kDispatch);
  }

 private:
  std::int64_t tokens_before(int rank) const {
    const auto& tokens = routing_.tokens_per_rank;
    return std::accumulate(tokens.begin(), tokens.begin() + rank, std::int64_t{0});
  }

  // The words of this rank's rows hold arbitrary values; none is claimed before the next exchange.
  void clear_owners() const {
    const std::int64_t rows = routing_.rows_of(layer_.rank);
    std::uint64_t* owners = writer_.rank(layer_.communicator.local()).owners;
    std::fill_n(owners, rows, std::uint64_t{0});
  }

  // This rank's pairs, as rows of their ranks; -1 for dropped ones.
  std::vector<std::int32_t> translate(Header& header) const {
    const int topk = layer_.map.topk;
    const std::int64_t pairs = routing_.tokens * topk;
    const std::int64_t first_row =
        table_.size(0) == routing_.tokens ? 0 : tokens_before(layer_.rank);
    std::vector<std::int32_t> rows(static_cast<std::size_t>(pairs), -1);
    const std::int32_t* experts = routing_.indices.data() + routing_.table_offset(layer_.node());
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
      const int rank = layer_.map.rank_of(experts[pair]);
      if (rank < 0) continue;
      const std::int64_t value =
          read_once(&table_.at<std::int32_t>(first_row + pair / topk, pair % topk));
      const std::int64_t begin = starts_[static_cast<std::size_t>(rank)],
                         end = starts_[static_cast<std::size_t>(rank) + 1];
      if (value < begin || value >= end) {
        header.refuse(bad_row(std::to_string(begin) + " to " + std::to_string(end - 1),
                              std::to_string(value), pair, topk));
        break;
      }
      rows[static_cast<std::size_t>(pair)] = static_cast<std::int32_t>(value - begin);
    }
    return rows;
  }

  // Keeps the rows of the rail sources that lie on this node.
  void take_rows(const std::vector<std::int32_t>& own) {
    std::vector<std::int32_t> from;
    for (int node = 0; node < layer_.nodes(); ++node) {
      const std::size_t offset = routing_.table_offset(node);
      const std::size_t pairs = sources_.indices(node).size();
      if (node == layer_.node()) {
        from = own;
      } else {
        from.resize(pairs);
        layer_.exchange.copy_table(node, 0, from.data(), pairs * sizeof(std::int32_t));
      }
      for (std::size_t pair = 0; pair < pairs; ++pair) {
        const std::size_t at = offset + pair;
        if (layer_.map.node_of(routing_.indices[at]) != layer_.node()) continue;
        const int rank = layer_.map.rank_of(routing_.indices[at]);
        check_bounds(from[pair], layer_.exchange.sender(sources_.rank(node)), "a scattered row", 0,
                     routing_.wanted_rows[static_cast<std::size_t>(rank)] - 1);
        routing_.rows[at] = from[pair];
      }
    }
  }

  // As many pairs as there are rows, all in range: each row is named once if none is named twice.
  void claim(Header& verdict) const {
    const Topology& topology = layer_.map.topology;
    const int topk = layer_.map.topk;
    for (int node = 0; node < layer_.nodes(); ++node) {
      const auto pairs = static_cast<std::int64_t>(sources_.indices(node).size());
      for (std::int64_t pair = 0; pair < pairs; ++pair) {
        const std::size_t at = routing_.table_offset(node) + static_cast<std::size_t>(pair);
        const std::int32_t row = routing_.rows[at];
        if (row < 0) continue;
        const int rank = layer_.map.rank_of(routing_.indices[at]);
        std::uint64_t* owners = writer_.rank(topology.local(rank)).owners;
        if (std::atomic_ref<std::uint64_t>(owners[row]).exchange(1) == 0) continue;
        verdict.refuse(bad_row(
            "every row once",
            "row " + std::to_string(starts_[static_cast<std::size_t>(rank)] + row) + " again", pair,
            topk));
        verdict.subject = sources_.rank(node);
        return;
      }
    }
  }

  Layer& layer_;
  const ConstTensorView& table_;
  const RowWriter& writer_;
  Routing& routing_;
  RailSources sources_;
  std::vector<std::int64_t> starts_ = {0};  // of each rank's rows among all
};

}  // namespace

Error bad_row(const std::string& wanted, std::string got, std::int64_t pair, int topk) {
  got += " for token " + std::to_string(pair / topk) + ", k " + std::to_string(pair % topk);
  return {ErrorCode::invalid_argument, std::string(kDispatch), "scatter_indices", wanted, got};
}

// Everybody knows every n and the size of every table by now.
void check_table_sizes(std::span<const std::int32_t> tokens, std::span<const std::int64_t> rows) {
  const std::int64_t all = std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0});
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    if (rows[rank] == tokens[rank] || rows[rank] == all) continue;
    std::string wanted = std::to_string(tokens[rank]);
    if (all != tokens[rank]) wanted += " or " + std::to_string(all);
    throw error_from_message(ErrorCode::invalid_argument, std::string(kDispatch),
                             "rank " + std::to_string(rank) + ": scatter_indices: want " + wanted +
                                 " rows, got " + std::to_string(rows[rank]));
  }
}

void scatter_rows(Layer& layer, const ConstTensorView& table, const RowWriter& writer,
                  Routing& routing) {
  Scatter(layer, table, writer, routing).run();
}

}  // namespace winnow::expert_parallel
