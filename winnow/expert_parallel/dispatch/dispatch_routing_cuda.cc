#include "winnow/expert_parallel/dispatch/dispatch_routing_cuda.h"

#include <algorithm>

#include "winnow/expert_parallel/exchange/exchange_cuda.h"

namespace winnow::expert_parallel {

NewRouting::NewRouting(CudaLayer& layer, const Request& request, const DispatchArgs& args,
                       std::uint64_t number)
    : layer_(layer),
      request_(request),
      routing_(make_routing(request, layer.place().config, layer.place().map, number)) {
  routing_->device = layer.place().device();
  allocate_tables();

  const Config& config = layer.place().config;
  count_.view = layer.view();
  count_.token_major = request.order == RowOrder::token_major;
  count_.tokens = request.tokens;
  count_.indices = args.expert_indices.data();
  count_.index_stride = args.expert_indices.stride(0);
  count_.wide = args.expert_indices.dtype() == DType::i64;
  if (request.weights && layer.place().nodes() > 1) {  // the table takes weights to other nodes
    count_.weights = static_cast<const std::byte*>(args.weights.data());
    count_.weight_stride = row_stride(args.weights);
    count_.weight_bytes = static_cast<int>(size_of(config.weight_dtype));
  }
  count_.placed = routing_->tables.placed;
  const std::int64_t pairs = request.tokens * config.topk;
  table_bytes_ = PairTable::weights(pairs) + pairs * count_.weight_bytes;
  allocate_scratch();
}

void NewRouting::allocate_tables() {
  const CudaTopology& topology = layer_.view().topology;
  const Config& config = layer_.place().config;
  const std::int64_t all_pairs = layer_.place().nodes() * config.max_tokens * config.topk;
  RoutingTables& tables = routing_->tables;
  routing_->memory.push_back(keep_tables(layer_, [&](Tables& add) {
    add.add(tables.placed, 1);
    add.add(tables.wanted, topology.world);
    add.add(tables.tokens, topology.world);
    add.add(tables.expert_counts, topology.per_rank());
    add.add(tables.expert_offsets, topology.per_rank() + 1);
    add.add(tables.indices, all_pairs);
    add.add(tables.rows, all_pairs);
    if (layer_.place().nodes() > 1)
      add.add(tables.send_reqs, 2 * layer_.place().nodes() * config.max_tokens);
    if (request_.order == RowOrder::expert_major) {
      add.add(tables.firsts, topology.world * config.max_tokens);
    } else {
      add.add(tables.source_begins, topology.world + 1);
      add.add(tables.rail_begins, topology.nodes * topology.locals);
    }
  }));
}

void NewRouting::allocate_scratch() {
  const CudaTopology& topology = layer_.view().topology;
  scratch_ = keep_tables(layer_, [&](Tables& add) {
    const std::int64_t findings = sizeof(Findings) / sizeof(std::int32_t);
    add.add(count_.counts, topology.experts + topology.world + findings);
    add.add(count_.table, table_bytes_);
    // First the kernel of count() uses it, then that of place().
    add.add(count_.scratch, std::max(count_scratch_bytes(topology, layer_.blocks()),
                                     place_scratch_bytes(topology, layer_.blocks())));
  });
}

void NewRouting::count() {
  layer_.calls().check(launch_count(count_, layer_.blocks(), layer_.calls().stream()), "count");
}

// All ranks have the counts of all ranks now, so they compute the same rows.
void NewRouting::place(bool reports) {
  PlaceParams params;
  params.view = layer_.view();
  params.token_major = count_.token_major;
  params.reports = reports;
  params.expert_alignment = request_.expert_alignment;
  params.worst_case_rows = request_.worst_case_rows;
  params.max_tokens = layer_.place().config.max_tokens;
  params.table = count_.table;
  params.tables = routing_->tables;
  params.scratch = count_.scratch;
  layer_.calls().check(launch_place(params, layer_.blocks(), layer_.calls().stream()), "place");
}

void NewRouting::read_counts() {
  const int world = layer_.place().world(), per_rank = layer_.place().map.per_rank();
  const std::int32_t* words = layer_.handshake().report_words().data();
  const auto* wanted = reinterpret_cast<const std::int64_t*>(words);
  routing_->wanted_rows.assign(wanted, wanted + world);
  const std::int32_t* counts = words + PlaceReport::counts(world);
  const std::int32_t* offsets = words + PlaceReport::offsets(world, per_rank);
  routing_->expert_counts.assign(counts, counts + per_rank);
  routing_->expert_offsets.assign(offsets, offsets + per_rank + 1);
  for (int rank = 0; rank < world; ++rank) {
    const Header& header = layer_.handshake().received()[rank];
    routing_->tokens_per_rank.push_back(static_cast<std::int32_t>(header.tokens));
    scatter_rows_.push_back(header.scatter_rows);
  }
  check_row_counts(routing_->wanted_rows, request_.order, layer_.place().config.topk);
  check_room(routing_->wanted_rows,
             [&](int rank) -> const Header& { return layer_.handshake().received()[rank]; });
}

void NewRouting::make_row_tables(std::int64_t rows) {
  RoutingTables& tables = routing_->tables;
  routing_->memory.push_back(keep_tables(layer_, [&](Tables& add) {
    add.add(tables.first_copies, rows);
    add.add(tables.copies, rows * layer_.place().config.topk);
  }));
}

}  // namespace winnow::expert_parallel
