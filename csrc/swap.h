// The swap of delta staging: logged elements and served ones are exchanged.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "digest.h"

namespace inflight {

// Logged elements of one parameter: their int32 offsets in it, and their bits.
struct Stretch {
  uint64_t offsets, bits, live, num, reach, first, width;
};

// Throws if an offset is beyond the parameter, which has `reach` elements.
inline void check_offsets(const Stretch& stretch) {
  const int32_t* offsets = reinterpret_cast<const int32_t*>(uintptr_t(stretch.offsets));
  uint64_t last = 0;  // a negative offset counts as a large one
  for (uint64_t i = 0; i < stretch.num; ++i)
    last = std::max(last, uint64_t(int64_t(offsets[i])));
  if (stretch.num != 0 && last >= stretch.reach)
    throw std::invalid_argument("a logged offset is beyond its parameter");
}

// Exchanges the elements, and adds what they change of the digest of the log: the
// terms of the bits that are put in less those of the bits that are taken out, each at
// its number in the log. No offset may occur twice.
template <class T>
void swap_stretch(const Stretch& stretch, Sums& sums) {
  constexpr uint64_t kAtOnce = 256;
  const int32_t* offsets = reinterpret_cast<const int32_t*>(uintptr_t(stretch.offsets));
  T* bits = reinterpret_cast<T*>(uintptr_t(stretch.bits));
  T* live = reinterpret_cast<T*>(uintptr_t(stretch.live));
  int64_t places[kAtOnce];
  T taken[kAtOnce];
  for (uint64_t start = 0; start < stretch.num; start += kAtOnce) {
    const uint64_t num = std::min(kAtOnce, stretch.num - start);
    for (uint64_t i = 0; i < num; ++i) {
      places[i] = int64_t(stretch.first + start + i);
      taken[i] = live[offsets[start + i]];
    }
    for (uint64_t i = 0; i < num; ++i) live[offsets[start + i]] = bits[start + i];
    digest_changes<T>(places, reinterpret_cast<const unsigned char*>(taken),
                      reinterpret_cast<const unsigned char*>(bits + start), num, sums);
    std::memcpy(bits + start, taken, num * sizeof(T));
  }
}

}  // namespace inflight
