#include "winnow/simulator/instructions/matrix_fragments.h"

#include <cstring>

#include "winnow/simulator/instructions/misuse.h"

namespace winnow::simulator {
namespace {

// Calls move(address, register) for every word of the four matrices.
template <class Registers, class Move>
void for_words(std::size_t size, MatrixRows rows, Registers registers, const Move& move) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    for (int lane = 0; lane < 32; ++lane) {
      const std::uint32_t word = matrix_word(rows, matrix, lane);
      require_inside(word, 4, size, "shared memory");
      move(word, registers[static_cast<std::size_t>(lane)][matrix]);
    }
  }
}

}  // namespace

void check_matrix_rows(MatrixRows rows, const char* check) {
  for (const std::uint32_t row : rows) require_aligned(row, 16, check, "the row's address");
}

void ldmatrix_x4(std::span<const std::byte> shared, MatrixRows rows,
                 std::span<std::uint32_t[4], 32> registers) {
  check_matrix_rows(rows, "ldmatrix");
  for_words(shared.size(), rows, registers, [&](std::uint32_t from, std::uint32_t& to) {
    std::memcpy(&to, shared.data() + from, 4);
  });
}

void stmatrix_x4(std::span<std::byte> shared, MatrixRows rows,
                 std::span<const std::uint32_t[4], 32> registers) {
  check_matrix_rows(rows, "stmatrix");
  for_words(shared.size(), rows, registers, [&](std::uint32_t to, const std::uint32_t& from) {
    std::memcpy(shared.data() + to, &from, 4);
  });
}

}  // namespace winnow::simulator
