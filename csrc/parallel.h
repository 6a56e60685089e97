// Blocks of memory, cut into pieces and divided among threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace inflight {

// `rows` rows of `row_bytes`, as ops/digests.py packs them. `x` and `y` are the
// kernel's: the offset of the first row and the step between rows for the digest, mask
// and carry for nonfinite.h.
struct Block {
  uint64_t data, rows, row_bytes, row_stride, x, y, owner;
};

struct Piece {
  const Block* block;
  uint64_t row, num_rows, first_byte, num_bytes;
};

constexpr uint64_t kPieceBytes = uint64_t(1) << 20;

inline std::vector<Piece> cut(const Block* blocks, uint64_t num_blocks) {
  std::vector<Piece> pieces;
  for (const Block* block = blocks; block != blocks + num_blocks; ++block) {
    if (block->row_bytes == 0) continue;
    const uint64_t rows = std::max<uint64_t>(1, kPieceBytes / block->row_bytes);
    for (uint64_t row = 0; row < block->rows; row += rows) {
      const uint64_t num_rows = std::min(rows, block->rows - row);
      // A piece is several rows, or a part of one row.
      const uint64_t step = num_rows > 1 ? block->row_bytes : kPieceBytes;
      for (uint64_t byte = 0; byte < block->row_bytes; byte += step)
        pieces.push_back(
            {block, row, num_rows, byte, std::min(step, block->row_bytes - byte)});
    }
  }
  return pieces;
}

// Calls work(i) once for every i below `count`, on the calling thread and up to
// num_threads - 1 others.
template <class Work>
void share_out(uint64_t count, uint64_t num_threads, const Work& work) {
  std::atomic<uint64_t> next{0};
  const auto take = [&] {
    for (uint64_t i; (i = next.fetch_add(1)) < count;) work(i);
  };
  std::vector<std::thread> helpers;
  const uint64_t wanted = std::min<uint64_t>(num_threads, count);
  try {
    helpers.reserve(wanted);
    while (helpers.size() + 1 < wanted) helpers.emplace_back(take);
  } catch (const std::exception&) {
    // No thread could be started: fewer threads share the work.
  }
  take();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace inflight
