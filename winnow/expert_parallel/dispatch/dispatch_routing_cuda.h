// The routing of a dispatch that repeats no other, on a GPU: from this rank's expert indices to the
// tables of the descriptor. Only in builds with CUDA. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "winnow/expert_parallel/dispatch/dispatch_kernels_cuda.h"
#include "winnow/expert_parallel/dispatch/dispatch_request.h"
#include "winnow/expert_parallel/layer/layer_cuda.h"
#include "winnow/expert_parallel/memory/layouts.h"

namespace winnow::expert_parallel {

// Memory of a call or a descriptor that holds the tables which add(tables) adds, one after the
// other.
template <class Add>
std::shared_ptr<Region> keep_tables(CudaLayer& layer, const Add& add) {
  Tables measured;
  add(measured);
  std::shared_ptr<Region> memory = layer.keep(measured.bytes());
  Tables tables(memory->data());
  add(tables);
  return memory;
}

// The member functions are called in the order in which they stand here, make_row_tables() whenever
// the number is known. The request and the arguments must outlive the object.
class NewRouting {
 public:
  // Allocates all tables whose sizes do not depend on the counts. `number`: of the dispatch.
  NewRouting(CudaLayer& layer, const Request& request, const DispatchArgs& args,
             std::uint64_t number);

  const std::shared_ptr<Routing>& routing() const { return routing_; }
  // This rank's own pairs for its rail peers, see PairTable. count() fills it.
  const std::byte* table() const { return count_.table; }
  std::int64_t table_bytes() const { return table_bytes_; }
  // What the exchange posts, and count() fills.
  const std::int32_t* counts() const { return count_.counts; }
  // The memory of both, which a recorded graph uses again.
  const std::shared_ptr<Region>& scratch() const { return scratch_; }

  // Enqueues the kernel that counts this rank's pairs.
  void count();
  // After the exchange, enqueues the kernel that finds the rows of this rank's rail sources.
  // `reports`: the host waits for the counts, for read_counts().
  void place(bool reports);
  // After the layer's wait_report(): takes the counts of all ranks from the report. Throws, alike
  // on every rank, where a rank gets more rows than tables can count, or than its `out` has.
  void read_counts();
  // [W]: rows of every rank's scatter_indices, as read_counts() found them.
  std::span<const std::int64_t> scatter_rows() const { return scatter_rows_; }
  // Allocates the tables of the rows of this rank, of which there are so many at most.
  void make_row_tables(std::int64_t rows);

 private:
  void allocate_tables();
  void allocate_scratch();

  CudaLayer& layer_;
  const Request& request_;
  std::shared_ptr<Routing> routing_;
  CountParams count_;
  std::int64_t table_bytes_ = 0;
  std::shared_ptr<Region> scratch_;
  std::vector<std::int64_t> scatter_rows_;
};

}  // namespace winnow::expert_parallel
