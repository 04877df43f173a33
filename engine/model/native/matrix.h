// bfloat16 arithmetic with AVX512-BF16, and products of rows and a packed weight. Knows nothing of layers or threads.
//
// Weights   [N / (16 B)][K / 2][16 B][2] bfloat16, B column blocks of 16 per panel. A 64-byte load covers 16 columns.
//
// The order of summation of a dot product is the same for any number of rows.

#pragma once

#include <immintrin.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

using bf16 = uint16_t;
constexpr int kLanes = 16;
constexpr int kAhead = 8192;  // prefetch distance in weights; panels are contiguous

inline __m512bh as_bf16(__m512i x) { return reinterpret_cast<__m512bh>(x); }
inline __m512 load_bf16(const bf16* x) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))), 16));
}
inline void store_bf16(bf16* to, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}
inline bf16 round_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline __m512i pair(const bf16* x) {
  int32_t both;
  std::memcpy(&both, x, 4);
  return _mm512_set1_epi32(both);
}

// e^x within 2 units in the last place, as 2^(n + f) with f in [-0.5, 0.5] and a polynomial for 2^f.
inline __m512 exp16(__m512 x) {
  const __m512 y = _mm512_mul_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.0f)), _mm512_set1_ps(1.44269504f));
  const __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_mul_ps(_mm512_sub_ps(y, n), _mm512_set1_ps(0.693147181f));
  __m512 p = _mm512_set1_ps(1.0f / 720);
  for (const float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}

// tile[M][16 B] = x[M][K] times one panel, each sum in ascending order of k.
template <int M, int B>
void multiply(const bf16* x, long stride, const bf16* panel, int pairs, float* tile) {
  __m512 sums[M][B];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) sums[m][b] = _mm512_setzero_ps();
  for (int k = 0; k < pairs; ++k) {
    const bf16* line = panel + static_cast<long>(k) * B * 32;
    __m512bh w[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      w[b] = as_bf16(_mm512_load_si512(line + b * 32));
      _mm_prefetch(line + b * 32 + kAhead, _MM_HINT_T1);
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const __m512bh both = as_bf16(pair(x + m * stride + 2 * k));
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) sums[m][b] = _mm512_dpbf16_ps(sums[m][b], w[b], both);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) _mm512_store_ps(tile + (m * B + b) * kLanes, sums[m][b]);
}

using Multiply = void (*)(const bf16*, long, const bf16*, int, float*);
constexpr Multiply kMultiply2[] = {multiply<1, 2>, multiply<2, 2>, multiply<3, 2>,  multiply<4, 2>,
                                   multiply<5, 2>, multiply<6, 2>, multiply<7, 2>,  multiply<8, 2>,
                                   multiply<9, 2>, multiply<10, 2>, multiply<11, 2>, multiply<12, 2>};
constexpr Multiply kMultiply4[] = {multiply<1, 4>, multiply<2, 4>, multiply<3, 4>,
                                   multiply<4, 4>, multiply<5, 4>, multiply<6, 4>};

struct Matrix {
  bf16* panels = nullptr;
  int columns = 0, depth = 0, blocks = 0;  // outputs, inputs, column blocks per panel
  int width() const { return blocks * kLanes; }
  int num_panels() const { return (columns + width() - 1) / width(); }
  size_t bytes() const { return static_cast<size_t>(num_panels()) * width() * depth * sizeof(bf16); }
};

// Memory in large pages where the system has them, since every step reads all weights.
void* reserve(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  madvise(at, bytes, MADV_HUGEPAGE);
  return at;
}

// Calls use(first row, rows, tile) for each group of rows of x times panel number `panel`.
template <class Use>
void multiply_rows(const Matrix& matrix, int panel, const bf16* x, int begin, int end, const Use& use) {
  alignas(64) float tile[24 * kLanes];
  const bf16* weights = matrix.panels + static_cast<long>(panel) * matrix.width() * matrix.depth;
  const int most = matrix.blocks == 4 ? 6 : 12;
  const int groups = (end - begin + most - 1) / most;
  for (int group = 0; group < groups; ++group) {
    const int first = begin + static_cast<int>(static_cast<long>(end - begin) * group / groups);
    const int last = begin + static_cast<int>(static_cast<long>(end - begin) * (group + 1) / groups);
    const auto kernel = (matrix.blocks == 4 ? kMultiply4 : kMultiply2)[last - first - 1];
    kernel(x + static_cast<long>(first) * matrix.depth, matrix.depth, weights, matrix.depth / 2, tile);
    use(first, last - first, tile);
  }
}

}  // namespace
