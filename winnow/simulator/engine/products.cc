// wgmma: the products of a warpgroup, which run in order behind its threads.
//
// A product is issued when the last of the 128 threads has issued it. Each of the four warps must
// know of what it reads: its 16 rows of A and all of B. Who has waited for it in one warp knows
// that it reads nothing more for that warp: for the others it may still read. Kernels that count on
// more are named here, by the functions that then write (simulator.md, "Assumptions").
#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "winnow/simulator/engine/block.h"

namespace winnow::simulator {
namespace {

constexpr std::uint32_t kInFlight = 0xffffffffu;  // NaN

struct {
  const char *file, *function;
} constexpr kCountOnWholeProducts[] = {
    {"sparse_mla/attention_sm90.cuh", "store_probabilities("},  // P over a chunk of K
    {"sparse_mla/gather_sm90.cuh", "gather_chunk("},            // K of the next tile
};

bool counts_on_whole_products(const Where& where) {
  for (const auto& [file, function] : kCountOnWholeProducts) {
    if (std::strstr(where.function_name(), function) != nullptr &&
        std::strstr(where.file_name(), file) != nullptr) {
      return true;
    }
  }
  return false;
}

[[noreturn]] void disagree(const char* what, const Where& where) {
  fail("wgmma", std::string("the threads of a warpgroup disagree in ") + what, where);
}

bool same(const WgmmaCall& a, const WgmmaCall& b) {
  return a.a == b.a && a.b == b.b && a.wgmma.n == b.wgmma.n && a.wgmma.a == b.wgmma.a &&
         a.wgmma.b == b.wgmma.b && a.wgmma.major_a == b.wgmma.major_a &&
         a.wgmma.major_b == b.wgmma.major_b && a.wgmma.accumulate == b.wgmma.accumulate &&
         (a.a_registers[0] == nullptr) == (b.a_registers[0] == nullptr);
}

void read_units(const std::vector<std::uint32_t>& units, const Access& access) {
  for (const std::uint32_t unit : units) {
    block->shadow(unit, 16, access.what, access.where).read(unit, 16, access);
  }
}

// The warp has issued the product as a whole: from now on the product may read for it.
void begin_reads(const Product& product, unsigned warp, std::uint64_t number, const Where& where) {
  Access access = block->access(*current, "wgmma", where);
  access.async_proxy = true;
  access.stamp = Stamp::of(block->product_actor(warp), static_cast<std::uint32_t>(number + 1));
  read_units(product.b_units, access);
  if (product.a_units.empty()) return;
  const auto rows = static_cast<int>(16 * (warp % 4));
  std::vector<std::uint32_t> mine;
  for (std::size_t i = 0; i < product.a_units.size(); ++i) {
    const auto at = static_cast<int>(i);
    const int row = product.call.wgmma.major_a == MatrixMajor::k ? at / 2 : at % 8 * 8;
    if (row >= rows && row < rows + 16) mine.push_back(product.a_units[i]);
  }
  read_units(mine, access);
}

void execute(Warpgroup& group) {
  const Product product = std::move(group.pending.front());
  group.pending.pop_front();
  ++group.first;
  ++group.done;
  const Wgmma& wgmma = product.call.wgmma;
  const std::span<const std::byte> shared(block->shared, kDynamicBase + block->dynamic_bytes);
  checked(product.where, [&] {
    const auto a = product.a_registers
                       ? read_operand(std::span<const std::uint32_t[4], kWarpgroup>(
                                          product.a_registers.get(), kWarpgroup),
                                      wgmma.a)
                       : read_operand(shared, product.a_units, wgmma.a, wgmma.major_a, kWgmmaRows);
    const auto b = read_operand(shared, product.b_units, wgmma.b, wgmma.major_b, wgmma.n);
    multiply(wgmma, a, b, product.accumulator->values.data());
  });
}

OpenAccumulator* open_accumulator(float* registers) {
  for (auto& open : current->accumulators) {
    if (open.registers == registers) return &open;
  }
  return nullptr;
}

// Something that tells the values of registers from others.
std::uint64_t sum_of([[maybe_unused]] const float* registers, [[maybe_unused]] int count) {
  std::uint64_t sum = 0;
#ifndef __SANITIZE_ADDRESS__  // the registers may be out of scope
  for (int i = 0; i < count; ++i) sum = sum * 31 + std::bit_cast<std::uint32_t>(registers[i]);
#endif
  return sum;
}

// Accumulators that were written since the last wgmma.fence. Those of which nothing is known yet
// count from the next wait on.
void check_fenced(float* registers, int count, const Where& where) {
  for (const KnownRegisters& known : current->known) {
    if (known.registers != registers || known.count != count) continue;
    if (known.fenced == sum_of(registers, count)) return;
    fail("wgmma", "accumulator registers were written after the last wgmma.fence", where);
  }
  current->known.push_back({registers, count, 0});
}

std::size_t place_of(int thread, int i, int n) {
  const Place place = accumulator_place(thread, i);
  return static_cast<std::size_t>(place.row * n + place.column);
}

}  // namespace

Access writing_behind_products(const char* what, const Where& where) {
  Access access = block->access(*current, what, where);
  const unsigned warp = current->number / 32;
  const std::int32_t ended = access.knowledge->generic[block->product_actor(warp)];
  if (ended == 0 || !counts_on_whole_products(where)) return access;
  static Knowledge knowledge;
  knowledge = current->knowledge;
  for (unsigned each = warp / 4 * 4; each < std::min(warp / 4 * 4 + 4, cluster->warps()); ++each) {
    knowledge.generic.raise(block->product_actor(each), ended);
  }
  access.knowledge = &knowledge;
  return access;
}

void wgmma_issue(const WgmmaCall& given, float* accumulators, int count, const Where& where) {
  if (is_dropped(where)) return;
  WgmmaCall call = given;
  call.b = altered(call.b, where);
  const int thread = static_cast<int>(current->number % 128);
  const unsigned warp = current->number / 32;
  Warpgroup& group = block->warpgroups[warp / 4];
  const std::uint64_t number = current->products++;
  if (number - group.first == group.pending.size()) {
    Product product{.call = call, .where = where};
    checked(where, [&] {
      check_wgmma(call.wgmma);
      if (call.a_registers[0] == nullptr) {
        product.a_units = operand_units(decode_matrix_descriptor(call.a), call.wgmma.major_a, 64);
      }
      product.b_units =
          operand_units(decode_matrix_descriptor(call.b), call.wgmma.major_b, call.wgmma.n);
    });
    if (call.a_registers[0] != nullptr) {
      product.a_registers = std::make_shared<std::uint32_t[][4]>(kWarpgroup);
    }
    group.pending.push_back(std::move(product));
  }
  Product& product = group.pending[number - group.first];
  if (!same(product.call, call)) disagree("the operands or the kind of a product", where);

  OpenAccumulator* open = open_accumulator(accumulators);
  if ((open == nullptr || call.a_registers[0] != nullptr) && !current->products_fenced) {
    fail("wgmma", "registers are handed over to a product without wgmma.fence since the last wait",
         where);
  }
  if (open == nullptr) check_fenced(accumulators, count, where);
  const int n = call.wgmma.n;
  if (open == nullptr) {
    if (product.threads == 0) {
      product.accumulator = std::make_shared<Accumulator>();
      product.accumulator->n = n;
      product.accumulator->values.resize(static_cast<std::size_t>(64 * n));
    }
    current->accumulators.push_back({accumulators, count, product.accumulator, number});
    open = &current->accumulators.back();
    for (int i = 0; i < count; ++i) {
      product.accumulator->values[place_of(thread, i, n)] = accumulators[i];
      accumulators[i] = std::bit_cast<float>(kInFlight);
    }
  }
  if (product.threads == 0) product.accumulator = open->values;
  if (open->values != product.accumulator) disagree("their accumulators", where);
  open->last = number;
  if (call.a_registers[0] != nullptr) {
    HeldRegisters held{.product = number, .where = where};
    for (int i = 0; i < 4; ++i) {
      held.registers[i] = call.a_registers[i];
      held.values[i] = product.a_registers[static_cast<std::size_t>(thread)][i] =
          *call.a_registers[i];
    }
    current->held.push_back(held);
  }
  if (++product.lanes[warp % 4] == 32) begin_reads(product, warp, number, where);
  if (++product.threads == kWarpgroup) {
    queue_operation(block->group_queue(warp), [&group] { execute(group); });
  }
}

void wgmma_fence(const Where& where) {
  if (is_dropped(where)) return;
  current->products_fenced = true;
  for (KnownRegisters& known : current->known) known.fenced = sum_of(known.registers, known.count);
}

void wgmma_commit(const Where& where) {
  if (is_dropped(where)) return;
  current->product_groups.push_back(current->products);
}

void wgmma_wait(int pending, const Where& where) {
  if (is_dropped(where)) return;
  pending = altered(pending, where);
  current->products_fenced = false;
  auto& groups = current->product_groups;
  const auto count = static_cast<int>(groups.size());
  if (count <= pending) return;
  const std::uint64_t end = groups[static_cast<std::size_t>(count - 1 - pending)];
  block_until({.kind = Waiting::Kind::products,
               .object = &block->warpgroups[current->number / 128],
               .value = end,
               .role = "wgmma_wait",
               .what = pending,
               .where = where});
  groups.erase(groups.begin(), groups.begin() + (count - pending));
  current->knowledge.generic.raise(block->product_actor(current->number / 32),
                                   static_cast<std::int32_t>(end));
  const int thread = static_cast<int>(current->number % 128);
  std::erase_if(current->accumulators, [&](const OpenAccumulator& open) {
    if (open.last >= end) return false;
    for (int i = 0; i < open.count; ++i) {
      if (std::bit_cast<std::uint32_t>(open.registers[i]) != kInFlight) {
        fail("wgmma", "accumulator registers were written while a product used them", where);
      }
      open.registers[i] = open.values->values[place_of(thread, i, open.values->n)];
    }
    return true;
  });
  std::erase_if(current->held, [&](const HeldRegisters& held) {
    if (held.product >= end) return false;
    for (int i = 0; i < 4; ++i) {
      if (*held.registers[i] != held.values[i]) {
        fail("wgmma", "registers of A were written before the wait for the product", held.where);
      }
    }
    return true;
  });
}

}  // namespace winnow::simulator
