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

}  // namespace

void stmatrix_x4(std::uint32_t address, const std::uint32_t (&registers)[4], const Where& where) {
  if (is_dropped(where)) return;
  for_words("stmatrix", altered(address, where), where, [&](int matrix, std::uint32_t word) {
    block->shadow(word, 4, "stmatrix", where)
        .write(word, 4, writing_behind_products("stmatrix", where));
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
