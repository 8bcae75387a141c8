// ldmatrix and stmatrix, .m8n8.x4.b16, and ldmatrix with .trans, on the addresses and registers of
// a warp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace winnow::simulator {

// Lane 8 m + r gives the address of row r of matrix m, 16 bytes of shared memory.
using MatrixRows = std::span<const std::uint32_t, 32>;

// Throws Misuse "ldmatrix" or "stmatrix", as `check` says, if one of them is not a multiple of 16.
void check_matrix_rows(MatrixRows rows, const char* check);

// Address of the word that register `matrix` (0 to 3) of a lane holds: of row lane / 4, the
// elements 2 (lane % 4) + {0, 1}.
constexpr std::uint32_t matrix_word(MatrixRows rows, int matrix, int lane) {
  return rows[static_cast<std::size_t>(8 * matrix + lane / 4)] +
         4 * static_cast<std::uint32_t>(lane % 4);
}

// Address of the half of that word, the lower one or the upper one, that the lane holds with
// .trans: of column lane / 4, row 2 (lane % 4) + `upper`.
constexpr std::uint32_t transposed_half(MatrixRows rows, int matrix, int lane, int upper) {
  return rows[static_cast<std::size_t>(8 * matrix + 2 * (lane % 4) + upper)] +
         2 * static_cast<std::uint32_t>(lane / 4);
}

// The same for a whole warp: registers [32 lanes][4]. Addresses count from the begin of `shared`;
// Misuse "shared memory" for those outside of it.
void ldmatrix_x4(std::span<const std::byte> shared, MatrixRows rows,
                 std::span<std::uint32_t[4], 32> registers);
void stmatrix_x4(std::span<std::byte> shared, MatrixRows rows,
                 std::span<const std::uint32_t[4], 32> registers);

}  // namespace winnow::simulator
