// The chunk loop of digest.h with AVX2 and AVX-512, chosen at run time.
//
// A hash vector has 32-bit lanes, a product 64-bit lanes. So even lanes have the keys
// of the first data vector, and odd lanes those of the second. The multiplication reads
// even lanes directly, and odd lanes after one shift.
#pragma once

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define INFLIGHT_X86 1
#define INFLIGHT_FOR(isa) __attribute__((target(isa))) inline
#include <immintrin.h>

namespace inflight {

// The first Weyl values of `2 * half` chunks, in the lane order described above.
inline void weyl_lanes(uint32_t* lanes, int half, uint32_t low, uint32_t page) {
  for (int i = 0; i < half; ++i) {
    lanes[2 * i] = (low + i) * kWeyl + page;
    lanes[2 * i + 1] = (low + half + i) * kWeyl + page;
  }
}

INFLIGHT_FOR("avx512f")
void chunks_avx512(const unsigned char* data, uint64_t num, uint32_t low, uint32_t page,
                   Sums& sums) {
  const __m512i mul1 = _mm512_set1_epi32(int(kMul1));
  const __m512i mul2 = _mm512_set1_epi32(int(kMul2));
  const __m512i step = _mm512_set1_epi32(int(16 * kWeyl));
  const __m512i page_all = _mm512_set1_epi32(int(page));
  uint32_t lanes[16];
  weyl_lanes(lanes, 8, low, page);
  __m512i weyl = _mm512_loadu_si512(lanes);
  __m512i a0 = _mm512_setzero_si512(), a1 = a0, b0 = a0, b1 = a0;
  uint64_t i = 0;
  for (; i + 16 <= num; i += 16, data += 128) {
    __m512i mixed = _mm512_xor_si512(weyl, _mm512_srli_epi32(weyl, 16));
    mixed = _mm512_mullo_epi32(mixed, mul1);
    __m512i g = _mm512_xor_si512(mixed, _mm512_srli_epi32(mixed, 15));
    const __m512i spread = _mm512_mullo_epi32(g, mul2);
    __m512i k = _mm512_xor_si512(_mm512_xor_si512(spread, page_all),
                                 _mm512_srli_epi32(spread, 15));
    weyl = _mm512_add_epi32(weyl, step);
    for (int half = 0; half < 2; ++half) {
      const __m512i real = _mm512_loadu_si512(data + 64 * half);
      const __m512i imaginary = _mm512_srli_epi64(real, 32);
      a0 = _mm512_add_epi64(a0, _mm512_mul_epu32(real, g));
      a1 = _mm512_add_epi64(a1, _mm512_mul_epu32(imaginary, k));
      b0 = _mm512_add_epi64(b0, _mm512_mul_epu32(real, k));
      b1 = _mm512_sub_epi64(b1, _mm512_mul_epu32(imaginary, g));
      g = _mm512_srli_epi64(g, 32);
      k = _mm512_srli_epi64(k, 32);
    }
  }
  // Not _mm512_reduce_add_epi64, whose sums are signed and must not overflow.
  uint64_t a[8], b[8];
  _mm512_storeu_si512(a, _mm512_add_epi64(a0, a1));
  _mm512_storeu_si512(b, _mm512_add_epi64(b0, b1));
  for (int lane = 0; lane < 8; ++lane) sums.a += a[lane], sums.b += b[lane];
  chunks_plain(data, num - i, uint32_t(low + i), page, sums);
}

INFLIGHT_FOR("avx2")
void chunks_avx2(const unsigned char* data, uint64_t num, uint32_t low, uint32_t page,
                 Sums& sums) {
  const __m256i mul1 = _mm256_set1_epi32(int(kMul1));
  const __m256i mul2 = _mm256_set1_epi32(int(kMul2));
  const __m256i step = _mm256_set1_epi32(int(8 * kWeyl));
  const __m256i page_all = _mm256_set1_epi32(int(page));
  uint32_t lanes[8];
  weyl_lanes(lanes, 4, low, page);
  __m256i weyl = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes));
  __m256i a0 = _mm256_setzero_si256(), a1 = a0, b0 = a0, b1 = a0;
  uint64_t i = 0;
  for (; i + 8 <= num; i += 8, data += 64) {
    __m256i mixed = _mm256_xor_si256(weyl, _mm256_srli_epi32(weyl, 16));
    mixed = _mm256_mullo_epi32(mixed, mul1);
    __m256i g = _mm256_xor_si256(mixed, _mm256_srli_epi32(mixed, 15));
    const __m256i spread = _mm256_mullo_epi32(g, mul2);
    __m256i k = _mm256_xor_si256(_mm256_xor_si256(spread, page_all),
                                 _mm256_srli_epi32(spread, 15));
    weyl = _mm256_add_epi32(weyl, step);
    for (int half = 0; half < 2; ++half) {
      const __m256i real =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 32 * half));
      const __m256i imaginary = _mm256_srli_epi64(real, 32);
      a0 = _mm256_add_epi64(a0, _mm256_mul_epu32(real, g));
      a1 = _mm256_add_epi64(a1, _mm256_mul_epu32(imaginary, k));
      b0 = _mm256_add_epi64(b0, _mm256_mul_epu32(real, k));
      b1 = _mm256_sub_epi64(b1, _mm256_mul_epu32(imaginary, g));
      g = _mm256_srli_epi64(g, 32);
      k = _mm256_srli_epi64(k, 32);
    }
  }
  uint64_t a[4], b[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(a), _mm256_add_epi64(a0, a1));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(b), _mm256_add_epi64(b0, b1));
  sums.a += a[0] + a[1] + a[2] + a[3];
  sums.b += b[0] + b[1] + b[2] + b[3];
  chunks_plain(data, num - i, uint32_t(low + i), page, sums);
}

}  // namespace inflight
#endif
