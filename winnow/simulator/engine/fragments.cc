// ldmatrix, stmatrix, movmatrix and mma.sync.
#include <cstring>

#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/instructions/matrix_fragments.h"

namespace winnow::simulator {
namespace {

// Calls move(matrix, rows) for the four registers of the lane.
template <class Move>
void for_matrices(const char* what, std::uint32_t address, const Where& where, const Move& move) {
  std::uint32_t rows[32];
  const auto given = warp_meeting(what, 0xffffffffu, address, false, where);
  for (std::size_t i = 0; i < 32; ++i) {
    rows[i] = own_place(static_cast<std::uint32_t>(given[i]), what, where);
  }
  checked(where, [&] { check_matrix_rows(rows, what); });
  for (int matrix = 0; matrix < 4; ++matrix) move(matrix, MatrixRows(rows));
}

}  // namespace

void stmatrix_x4(std::uint32_t address, const std::uint32_t (&registers)[4], const Where& where) {
  if (is_dropped(where)) return;
  for_matrices("stmatrix", altered(address, where), where, [&](int matrix, MatrixRows rows) {
    const std::uint32_t word = matrix_word(rows, matrix, static_cast<int>(lane()));
    block->shadow(word, 4, "stmatrix", where)
        .write(word, 4, writing_behind_products("stmatrix", where));
    std::memcpy(block->at(word), &registers[matrix], 4);
  });
}

void ldmatrix_x4(std::uint32_t address, std::uint32_t (&registers)[4], bool transposed,
                 const Where& where) {
  const char* const what = transposed ? "ldmatrix.trans" : "ldmatrix";
  for_matrices(what, altered(address, where), where, [&](int matrix, MatrixRows rows) {
    const auto read = [&](std::uint32_t from, void* to, std::size_t bytes) {
      block->shadow(from, bytes, what, where)
          .read(from, bytes, block->access(*current, what, where));
      std::memcpy(to, block->at(from), bytes);
    };
    const auto number = static_cast<int>(lane());
    if (!transposed) return read(matrix_word(rows, matrix, number), &registers[matrix], 4);
    std::uint16_t halves[2];
    for (int upper = 0; upper < 2; ++upper) {
      read(transposed_half(rows, matrix, number, upper), &halves[upper], 2);
    }
    std::memcpy(&registers[matrix], halves, 4);
  });
}

std::uint32_t movmatrix_trans(std::uint32_t of_row, const Where& where) {
  const auto rows = warp_meeting("movmatrix", 0xffffffffu, altered(of_row, where), false, where);
  // Lane 4 r + c / 2 has of row r the elements c.
  const std::uint32_t column = lane() / 4, first_row = lane() % 4 * 2;
  std::uint32_t of_column = 0;
  for (std::uint32_t i = 0; i < 2; ++i) {
    const auto element =
        static_cast<std::uint32_t>(rows[4 * (first_row + i) + column / 2] >> 16 * (column % 2));
    of_column |= (element & 0xffffu) << 16 * i;
  }
  return of_column;
}

void mma_m16n8k16(DType type, float (&d)[4], const std::uint32_t (&a)[4],
                  std::array<std::uint32_t, 2> b, const Where& where) {
  if (is_dropped(where)) return;
  // No lane is two meetings ahead, so two places suffice.
  const char* const kind = type == DType::f16 ? "mma of f16" : "mma of bf16";
  WarpMeeting& meeting = meeting_of(block->warps[warp_number()], kind, 0xffffffffu, where);
  auto& operands = meeting.operands[meeting.generation & 1];
  operands[lane()] = {{a[0], a[1], a[2], a[3]}, b};
  warp_meeting(kind, 0xffffffffu, 0, false, where);
  mma_m16n8k16(type, operands, static_cast<int>(lane()), d);
}

}  // namespace winnow::simulator
