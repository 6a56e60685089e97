// The content digest of docs/digest.md, on raw pointers.
//
// The bytes of a tensor are cut into chunks of 8 at multiples of 8 of their
// offset in the whole row-major checkpoint tensor. A chunk is a Gaussian integer
// (low word + i * high word); the digest is the sum of its product with a key
// that depends on the chunk's number, plus a term for every byte's offset. Sums
// commute, so slices and buckets may be digested anywhere, in any order.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the digest is defined on little-endian bytes"
#endif

namespace inflight {

constexpr uint32_t kWeyl = 0x9E3779B9u;
constexpr uint32_t kMul1 = 0x21F0AAADu;
constexpr uint32_t kMul2 = 0xD35A2D97u;
constexpr uint64_t kCount = 0x9E3779B97F4A7C15u;
constexpr uint64_t kPlace = 0xD1B54A32D192ED03u;

struct Sums {
  uint64_t a = 0;
  uint64_t b = 0;
};

// The key of one 2^32-chunk page: a bijection of the page number, never zero.
inline uint32_t page_key(uint32_t page) {
  uint32_t x = page + 1;
  x = (x ^ (x >> 16)) * kMul1;
  x = (x ^ (x >> 15)) * kMul2;
  return x ^ (x >> 15);
}

// `num` whole chunks at `data`; the first has number `low` in the page of this key.
using ChunksFn = void (*)(const unsigned char* data, uint64_t num, uint32_t low,
                          uint32_t page, Sums& sums);

inline void chunks_plain(const unsigned char* data, uint64_t num, uint32_t low,
                         uint32_t page, Sums& sums) {
  uint32_t weyl = low * kWeyl + page;
  uint64_t a = 0, b = 0;
  for (uint64_t i = 0; i < num; ++i, weyl += kWeyl) {
    const uint32_t mixed = (weyl ^ (weyl >> 16)) * kMul1;
    const uint32_t g = mixed ^ (mixed >> 15);
    const uint32_t spread = g * kMul2;
    const uint32_t k = spread ^ (spread >> 15) ^ page;
    uint64_t chunk;
    std::memcpy(&chunk, data + 8 * i, 8);
    const uint64_t real = uint32_t(chunk), imaginary = chunk >> 32;
    a += real * g + imaginary * k;
    b += real * k - imaginary * g;
  }
  sums.a += a;
  sums.b += b;
}

}  // namespace inflight

#include "digest_x86.h"

namespace inflight {

struct Kernel {
  const char* name;
  ChunksFn chunks;
};

// The kernels this processor can run, fastest first.
inline std::vector<Kernel> kernels() {
  std::vector<Kernel> usable;
#ifdef INFLIGHT_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) usable.push_back({"avx512", chunks_avx512});
  if (__builtin_cpu_supports("avx2")) usable.push_back({"avx2", chunks_avx2});
#endif
  usable.push_back({"plain", chunks_plain});
  return usable;
}

inline std::atomic<ChunksFn> chunks_in_use{kernels().front().chunks};

// A part of one chunk: `length` bytes from byte `first`; the other bytes are zero.
inline void partial_chunk(const unsigned char* data, uint64_t first, uint64_t length,
                          uint64_t chunk, Sums& sums) {
  unsigned char whole[8] = {};
  std::memcpy(whole + first, data, length);
  chunks_plain(whole, 1, uint32_t(chunk), page_key(uint32_t(chunk >> 32)), sums);
}

// `length` bytes at `offset` of the whole tensor.
inline void digest_run(const unsigned char* data, uint64_t length, uint64_t offset,
                       Sums& sums) {
  const ChunksFn chunks = chunks_in_use.load(std::memory_order_relaxed);
  const uint64_t end = offset + length;
  sums.a += kCount * length;
  sums.b += kPlace * (end * end - offset * offset);
  if (const uint64_t first = offset % 8; first != 0 && length != 0) {
    const uint64_t head = length < 8 - first ? length : 8 - first;
    partial_chunk(data, first, head, offset / 8, sums);
    data += head;
    offset += head;
    length -= head;
  }
  uint64_t chunk = offset / 8;
  for (uint64_t left = length / 8; left != 0;) {
    const uint64_t page_left = (uint64_t(1) << 32) - uint32_t(chunk);
    const uint64_t num = left < page_left ? left : page_left;
    chunks(data, num, uint32_t(chunk), page_key(uint32_t(chunk >> 32)), sums);
    data += 8 * num;
    chunk += num;
    left -= num;
  }
  if (length % 8 != 0) partial_chunk(data, 0, length % 8, chunk, sums);
}

// What changed elements add to the digest: the terms of the new bits less the terms of
// the old ones. The terms of the offsets cancel. `places` are numbers of elements.
template <class T>
void digest_changes(const int64_t* places, const unsigned char* old_bits,
                    const unsigned char* new_bits, uint64_t num, Sums& sums) {
  uint64_t a = 0, b = 0;
  for (uint64_t i = 0; i < num; ++i) {
    const uint64_t offset = uint64_t(places[i]) * sizeof(T);
    const uint32_t page = page_key(uint32_t(offset >> 35));
    const uint32_t weyl = uint32_t(offset >> 3) * kWeyl + page;
    const uint32_t mixed = (weyl ^ (weyl >> 16)) * kMul1;
    const uint32_t g = mixed ^ (mixed >> 15);
    const uint32_t spread = g * kMul2;
    const uint32_t k = spread ^ (spread >> 15) ^ page;
    T before, now;
    std::memcpy(&before, old_bits + i * sizeof(T), sizeof(T));
    std::memcpy(&now, new_bits + i * sizeof(T), sizeof(T));
    uint64_t real, imaginary = 0;
    if (sizeof(T) == 8) {
      real = uint64_t(uint32_t(now)) - uint32_t(before);
      imaginary = (uint64_t(now) >> 32) - (uint64_t(before) >> 32);
    } else {
      real = (uint64_t(now) - uint64_t(before)) << 8 * (offset & 3);
      if (offset & 4) std::swap(real, imaginary);
    }
    a += real * g + imaginary * k;
    b += real * k - imaginary * g;
  }
  sums.a += a;
  sums.b += b;
}

}  // namespace inflight
