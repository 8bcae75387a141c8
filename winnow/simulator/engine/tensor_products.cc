// tcgen05.mma, cp and commit: what one thread issues and the tensor cores of a block or a pair do,
// in the order of issue.
//
// A product may read its operands and change its sums from its issue on, and does so when the
// scheduler lets it. Its stamp counts the operations that the block has issued; a commit tells of
// all before it, and of what the thread knew that issued it.
#include <cstring>
#include <memory>
#include <string>

#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/instructions/tcgen05.h"

namespace winnow::simulator {
namespace {

// What an operation reads in the shared memory of each block, and where the operands' rows begin.
using Units = std::vector<std::uint32_t>;

bool takes_part(const Block& each, int blocks) {
  return blocks == 1 ? &each == block : each.is_in_pair_with(*block);
}

Access issue(const char* what, int blocks, const Where& where) {
  if (cluster->tensor_group != blocks) {
    fail("tcgen05", std::string(what) + " without tensor memory of this cta_group", where);
  }
  if (blocks == 2 && block->rank % 2 != 0) {
    fail("tcgen05", std::string(what) + " of a pair in its odd block", where);
  }
  Access access = block->access(*current, what, where);
  access.async_proxy = true;
  access.stamp = Stamp::of(block->tensor_actor(), ++block->tensor_products);
  return access;
}

void read_units(Block& there, const Units& units, const Access& access) {
  const InBlock in(&there);
  reach({&there, 0}, access.stamp, access.what, access.where);
  for (const std::uint32_t unit : units) {
    block->shadow(unit, 16, access.what, access.where).read(unit, 16, access);
  }
}

void write_columns(Block& there, std::uint32_t column, std::uint32_t columns, Access access) {
  check_allocated(there, access.what, column, columns, access.where);
  access.async_proxy = false;
  access.tensor = &current->tensor;
  access.self = block->tensor_actor();
  for (std::uint32_t group = 0; group < 8; ++group) {
    there.tensor->shadow.write(tensor_word(group, column), 4 * columns, access);
  }
}

std::vector<float> read(const Block& from, const Units& units, const Tcgen05Product& product,
                        MatrixMajor major, int rows) {
  const std::span<const std::byte> shared(from.shared, kDynamicBase + from.dynamic_bytes);
  return read_operand(shared, units, product.element, major, rows);
}

struct Multiplication {
  Tcgen05Product product;
  int blocks;
  std::uint32_t column;
  bool accumulate;
  Units a, b;
  Where where;
};

void execute(const Multiplication& all) {
  const Tcgen05Product& product = all.product;
  const int n = product.n, rows = product.m / all.blocks, part = n / all.blocks;
  std::vector<float> a[2], b(static_cast<std::size_t>(16 * n));
  const auto of = [&](int rank) -> Block& {
    return all.blocks == 1 ? *block : *cluster->blocks[block->rank + static_cast<unsigned>(rank)];
  };
  checked(all.where, [&] {
    for (int rank = 0; rank < all.blocks; ++rank) {
      a[rank] = read(of(rank), all.a, product, product.major_a, rows);
      const auto some = read(of(rank), all.b, product, product.major_b, part);
      for (int k = 0; k < 16; ++k) {
        std::memcpy(&b[static_cast<std::size_t>(k * n + rank * part)],
                    &some[static_cast<std::size_t>(k * part)],
                    sizeof(float) * static_cast<std::size_t>(part));
      }
    }
  });
  std::vector<float> d(static_cast<std::size_t>(rows * n));
  for (int rank = 0; rank < all.blocks; ++rank) {
    // Rows of D are pieces of lanes: whole, or two halves.
    const auto move = [&](bool out) {
      const int piece = tcgen05_columns(product, all.blocks);
      for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < n; j += piece) {
          const TensorPlace place = tcgen05_place(product, all.blocks, rank * rows + i, j);
          std::uint32_t* const cells =
              &of(rank).tensor->cell(static_cast<std::uint32_t>(place.lane),
                                     all.column + static_cast<std::uint32_t>(place.column));
          float* const sums = &d[static_cast<std::size_t>(i * n + j)];
          const std::size_t bytes = 4 * static_cast<std::size_t>(piece);
          out ? std::memcpy(cells, sums, bytes) : std::memcpy(sums, cells, bytes);
        }
      }
    };
    if (all.accumulate) {
      move(false);
    } else {
      std::fill(d.begin(), d.end(), 0.0f);
    }
    multiply_tcgen05(rows, n, a[rank], b, d.data());
    move(true);
  }
}

}  // namespace

void tensor_multiply(int blocks, std::uint32_t d, std::uint64_t a, std::uint64_t b,
                     std::uint32_t instruction, bool accumulate, const Where& where) {
  if (is_dropped(where)) return;
  b = altered(b, where);
  const Access access = issue("tcgen05.mma", blocks, where);
  auto all = std::make_shared<Multiplication>();
  all->blocks = blocks;
  all->column = d;
  all->accumulate = accumulate;
  all->where = where;
  checked(where, [&] {
    const Tcgen05Product product = decode_instruction_descriptor(instruction, blocks);
    all->product = product;
    all->a = operand_units(decode_tcgen05_descriptor(a), product.major_a, product.m / blocks);
    all->b = operand_units(decode_tcgen05_descriptor(b), product.major_b, product.n / blocks);
  });
  const auto columns = static_cast<std::uint32_t>(tcgen05_columns(all->product, blocks));
  for (const auto& each : cluster->blocks) {
    if (!takes_part(*each, blocks)) continue;
    read_units(*each, all->a, access);
    read_units(*each, all->b, access);
    write_columns(*each, d, columns, access);
  }
  queue_operation(block->tensor_queue(), [all] { execute(*all); });
}

void tensor_copy_128x256b(int blocks, std::uint32_t to, std::uint64_t from, const Where& where) {
  if (is_dropped(where)) return;
  from = altered(from, where);
  const Access access = issue("tcgen05.cp", blocks, where);
  constexpr int kLanes = TensorMemory::kLanes;
  const Units units = checked(where, [&] {
    return operand_units(decode_tcgen05_descriptor(from), MatrixMajor::k, kLanes);
  });
  for (const auto& each : cluster->blocks) {
    if (!takes_part(*each, blocks)) continue;
    read_units(*each, units, access);
    write_columns(*each, to, 8, access);
  }
  queue_operation(block->tensor_queue(), [units, to, blocks] {
    for (const auto& each : cluster->blocks) {
      if (!takes_part(*each, blocks)) continue;
      for (std::uint32_t i = 0; i < units.size(); ++i) {
        std::memcpy(&each->tensor->cell(i / 2, to + i % 2 * 4), each->at(units[i]), 16);
      }
    }
  });
}

void tensor_commit(int blocks, std::uint32_t barrier, unsigned ranks, const Where& where) {
  if (is_dropped(where)) return;
  barrier = altered(barrier, where);
  if (cluster->tensor_group != blocks) {
    fail("tcgen05", "tcgen05.commit without tensor memory of this cta_group", where);
  }
  const ClusterPlace named = cluster_place(barrier, "tcgen05.commit", where);
  auto knowledge = std::make_shared<Knowledge>(current->knowledge);
  knowledge->generic.raise(block->tensor_actor(),
                           static_cast<std::int32_t>(block->tensor_products));
  for (const auto& each : cluster->blocks) {
    if (ranks == 0 ? each.get() != named.block : (ranks >> each->rank & 1) == 0) continue;
    const ClusterPlace place{each.get(), named.address};
    const std::uint64_t operation = record_operation("tcgen05.commit", where);
    reach(place, Stamp::of_operation(operation), "tcgen05.commit", where);
    {
      const InBlock there(place.block);
      use_barrier(barrier_at(place.address, where), where);
    }
    // It arrives behind all products before it, but nothing says that two commits arrive in order.
    queue_operation(block->tensor_queue(), [place, knowledge, operation, where] {
      queue_operation(-1, [place, knowledge, operation, where] {
        if (place.block->ended) {
          fail("cluster", "tcgen05.commit arrives in a block that has ended", where);
        }
        const InBlock there(place.block);
        const Barrier& told = barrier_at(place.address, where);
        cluster->operations[operation].stamp = Stamp::of(told.actor, told.phase + 1);
        arrive(place.address, 1, 0, knowledge.get(), where);
      });
    });
  }
}

}  // namespace winnow::simulator
