// ldmatrix and stmatrix.
#include <cstring>

#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/instructions/matrix_fragments.h"

namespace winnow::simulator {
namespace {

// Calls move(register number, address) for the four words of the lane.
template <class Move>
void for_words(const char* what, std::uint32_t address, const Where& where, const Move& move) {
  std::uint32_t rows[32];
  const auto given = warp_meeting(what, 0xffffffffu, address, false, where);
  for (std::size_t i = 0; i < 32; ++i) {
    rows[i] = own_place(static_cast<std::uint32_t>(given[i]), what, where);
  }
  checked(where, [&] { check_matrix_rows(rows, what); });
  for (int matrix = 0; matrix < 4; ++matrix) {
    move(matrix, matrix_word(rows, matrix, static_cast<int>(lane())));
  }
}

// sparse_mla::forward stores P over a chunk of K that a product of all four warps has read, with a
// wait of each warp alone before it (simulator.md, "Assumptions").
bool trusts_whole_products(const Where& where) {
  return std::strstr(where.function_name(), "store_probabilities(") != nullptr &&
         std::strstr(where.file_name(), "sparse_mla/attention_sm90.cuh") != nullptr;
}

// What the thread knows if the products that it has waited for have ended for its whole warpgroup.
const Knowledge& whole_products() {
  static Knowledge knowledge;
  knowledge = current->knowledge;
  const unsigned warp = current->number / 32;
  const std::int32_t ended = knowledge.generic[block->product_actor(warp)];
  for (unsigned each = warp / 4 * 4; each < warp / 4 * 4 + 4; ++each) {
    knowledge.generic.raise(block->product_actor(each), ended);
  }
  return knowledge;
}

}  // namespace

void stmatrix_x4(std::uint32_t address, const std::uint32_t (&registers)[4], const Where& where) {
  if (is_dropped(where)) return;
  for_words("stmatrix", altered(address, where), where, [&](int matrix, std::uint32_t word) {
    Access access = block->access(*current, "stmatrix", where);
    if (trusts_whole_products(where)) access.knowledge = &whole_products();
    block->shadow(word, 4, "stmatrix", where).write(word, 4, access);
    std::memcpy(block->at(word), &registers[matrix], 4);
  });
}

void ldmatrix_x4(std::uint32_t address, std::uint32_t (&registers)[4], const Where& where) {
  for_words("ldmatrix", altered(address, where), where, [&](int matrix, std::uint32_t word) {
    block->shadow(word, 4, "ldmatrix", where)
        .read(word, 4, block->access(*current, "ldmatrix", where));
    std::memcpy(&registers[matrix], block->at(word), 4);
  });
}

}  // namespace winnow::simulator
