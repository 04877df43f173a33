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
#include <memory>

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
inline float as_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
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

// tile[M][16 B] = x[M][K] times one panel, each sum in ascending order of k. `adds` continues the sums in tile.
template <int M, int B>
void multiply(const bf16* x, long stride, const bf16* panel, int pairs, float* tile, bool adds) {
  __m512 sums[M][B];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b)
      sums[m][b] = adds ? _mm512_load_ps(tile + (m * B + b) * kLanes) : _mm512_setzero_ps();
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

using Multiply = void (*)(const bf16*, long, const bf16*, int, float*, bool);
constexpr Multiply kMultiply2[] = {multiply<1, 2>, multiply<2, 2>, multiply<3, 2>,  multiply<4, 2>,
                                   multiply<5, 2>, multiply<6, 2>, multiply<7, 2>,  multiply<8, 2>,
                                   multiply<9, 2>, multiply<10, 2>, multiply<11, 2>, multiply<12, 2>};
constexpr Multiply kMultiply4[] = {multiply<1, 4>, multiply<2, 4>, multiply<3, 4>,
                                   multiply<4, 4>, multiply<5, 4>, multiply<6, 4>};

// Calls use(first, last, kernel) for groups of rows begin .. end - 1 that have a kernel for `blocks` column blocks.
template <class Use>
void each_group(int blocks, int begin, int end, const Use& use) {
  const int most = blocks == 4 ? 6 : 12, groups = (end - begin + most - 1) / most;
  for (int group = 0; group < groups; ++group) {
    const int first = begin + static_cast<int>(static_cast<long>(end - begin) * group / groups);
    const int last = begin + static_cast<int>(static_cast<long>(end - begin) * (group + 1) / groups);
    use(first, last, (blocks == 4 ? kMultiply4 : kMultiply2)[last - first - 1]);
  }
}

struct Matrix {
  uint8_t* panels = nullptr;
  size_t bytes = 0;
  int columns = 0, depth = 0, blocks = 0;  // outputs, inputs, column blocks per panel
  int bits = 16;  // 16: bfloat16; 4 or 8: codes, see packed.h, and then:
  int block = 0, offset = 0;
  bool is_half = false, has_minimum = false;
  int width() const { return blocks * kLanes; }
  int num_panels() const { return (columns + width() - 1) / width(); }
};

// Memory in large pages where the system has them, since every step reads all weights.
void* reserve(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  madvise(at, bytes, MADV_HUGEPAGE);
  return at;
}

// A matrix with its memory, whose panels of `panel_bytes` bytes are written by `write`; null where memory is short.
template <class Write>
Matrix* place(const Matrix& shape, size_t panel_bytes, const Write& write) {
  auto matrix = std::make_unique<Matrix>(shape);
  matrix->bytes = shape.num_panels() * panel_bytes;
  matrix->panels = static_cast<uint8_t*>(reserve(matrix->bytes));
  if (!matrix->panels) return nullptr;
  write(*matrix);
  return matrix.release();
}

void write_weights(Matrix& matrix, const bf16* weight) {
  const int width = matrix.width(), depth = matrix.depth;
  for (int column = 0; column < matrix.columns; ++column) {
    bf16* to = reinterpret_cast<bf16*>(matrix.panels) + static_cast<long>(column / width) * width * depth +
               column % width * 2;
    const bf16* from = weight + static_cast<long>(column) * depth;
    for (int k = 0; k < depth; k += 2) std::memcpy(to + static_cast<long>(k) * width, from + k, 4);
  }
}

// Calls use(first row, rows, tile) for each group of rows of x times panel number `panel` of bfloat16 weights.
template <class Use>
void multiply_plain(const Matrix& matrix, int panel, const bf16* x, int begin, int end, const Use& use) {
  alignas(64) float tile[24 * kLanes];
  const bf16* weights =
      reinterpret_cast<const bf16*>(matrix.panels) + static_cast<long>(panel) * matrix.width() * matrix.depth;
  each_group(matrix.blocks, begin, end, [&](int first, int last, Multiply kernel) {
    kernel(x + static_cast<long>(first) * matrix.depth, matrix.depth, weights, matrix.depth / 2, tile, false);
    use(first, last - first, tile);
  });
}

}  // namespace
