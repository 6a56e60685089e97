// Counts the elements whose magnitude, read as an integer, is at least a limit. With
// the smallest non-finite magnitude as limit, these are the infinities and NaNs of any
// float format. A smaller limit adds numbers that a shorter format turns into infinity.
//
// With `mask` selecting all bits but the sign of every element in 8 bytes, and `carry`
// the sign bit minus the limit, (x & mask) + carry reaches an element's sign bit
// exactly when the magnitude is at least the limit, and never leaves the element.
#pragma once

#include <cstdint>
#include <cstring>

namespace inflight {

// The number of bytes with a set top bit; no other bit may be set.
inline uint64_t count_signs(uint64_t hits) {
  return (hits >> 7) * 0x0101010101010101u >> 56;
}

inline uint64_t nonfinite_run(const unsigned char* data, uint64_t length, uint64_t mask,
                              uint64_t carry) {
  const uint64_t signs = ~mask;
  const auto hits = [=](const unsigned char* at, uint64_t num_bytes) {
    uint64_t word = 0;  // zeros are finite
    std::memcpy(&word, at, num_bytes);
    return ((word & mask) + carry) & signs;
  };
  uint64_t count = 0;
  for (; length >= 512; data += 512, length -= 512) {
    // Most steps count nothing. The test for that vectorises: one OR, one branch.
    uint64_t any = 0;
    for (uint64_t i = 0; i < 512; i += 8) any |= hits(data + i, 8);
    if (any == 0) continue;
    for (uint64_t i = 0; i < 512; i += 8) count += count_signs(hits(data + i, 8));
  }
  for (; length >= 8; data += 8, length -= 8) count += count_signs(hits(data, 8));
  if (length != 0) count += count_signs(hits(data, length));
  return count;
}

}  // namespace inflight
