// Products of rows and a quantised weight, which stays quantised in memory. Knows nothing of layers or threads.
//
// A weight is bf16(scale * code + minimum), one rounding each, so it has the bits of the dequantised weight in matrix.h,
// and a product has the bits of the product with that one. Scale and minimum belong to a block of inputs of one column.
//
// Panel     [K / block][B] { scales [16], minimums [16] or nothing, [block / 16] tiles }, scales float16 or float32
// Tile      16 columns by 16 inputs, as vectors (p, h) of 16 codes: entry i is column 8 h + i / 2, input 2 p + i % 2.
//           8 bits: [p][h][16] int8.  4 bits: [h][16] uint32, four bits for each p, low bits first.

#pragma once

#include <algorithm>
#include <cmath>

#include "matrix.h"

namespace {

constexpr int kTile = 16;       // inputs of a tile
constexpr int kChunk = 320;     // inputs that are expanded at once for several rows; they stay in the L1 cache
constexpr int kRowChunk = 96;   // rows of one product; their inputs and one panel fit in the L2 cache
constexpr int kFewRows = 6;     // rows that use each weight as soon as it is expanded
constexpr int kBytesAhead = 4096;  // prefetch distance

struct Codes {
  const int8_t* codes;  // [columns][depth]
  const float *scales, *minimums;  // [columns][depth / block]; minimums may be null
  int32_t bits, block, offset, is_half;  // 4 bits: a code is within offset .. offset + 15
};

inline int tile_bytes(const Matrix& m) { return m.bits * kTile * kLanes / 8; }
inline int header_bytes(const Matrix& m) { return kLanes * (m.is_half ? 2 : 4) * (m.has_minimum ? 2 : 1); }
inline long block_bytes(const Matrix& m) { return header_bytes(m) + static_cast<long>(m.block / kTile) * tile_bytes(m); }
inline long panel_bytes(const Matrix& m) { return block_bytes(m) * (m.depth / m.block) * m.blocks; }

struct Header {  // scales and minimums of columns 0 .. 7 and 8 .. 15, each twice
  __m512 scale[2], minimum[2];
};

inline Header load_header(const Matrix& m, const uint8_t* at) {
  const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const auto load = [&](int index) {
    if (m.is_half) return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(at) + index));
    return _mm512_loadu_ps(reinterpret_cast<const float*>(at) + index * kLanes);
  };
  const __m512 scale = load(0), minimum = m.has_minimum ? load(1) : _mm512_setzero_ps();
  return {{_mm512_permutexvar_ps(low, scale), _mm512_permutexvar_ps(high, scale)},
          {_mm512_permutexvar_ps(low, minimum), _mm512_permutexvar_ps(high, minimum)}};
}

// Calls use(b, p, weights) for each pair of inputs p of the tiles of G column blocks, which are `apart` bytes apart;
// weights has the layout of a line of matrix.h.
template <int kBits, int G, class Use>
inline void expand_tiles(const Header* headers, const uint8_t* tiles, long apart, __m512 table, const Use& use) {
#pragma GCC unroll 8
  for (int p = 0; p < kTile / 2; ++p)
#pragma GCC unroll 2
    for (int b = 0; b < G; ++b) {
      const uint8_t* tile = tiles + b * apart;
      __m512 values[2];
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        __m512 code;
        if (kBits == 4) {
          const __m512i words = _mm512_loadu_si512(tile + h * 64);
          code = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * p), table);  // reads the lowest four bits
        } else {
          const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tile) + 2 * p + h);
          code = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
        }
        values[h] = _mm512_fmadd_ps(headers[b].scale[h], code, headers[b].minimum[h]);
      }
      use(b, p, _mm512_cvtne2ps_pbh(values[1], values[0]));
    }
}

inline float read_scale(const Matrix& m, const uint8_t* block, int index, int lane) {
  if (m.is_half) return _cvtsh_ss(reinterpret_cast<const uint16_t*>(block)[index * kLanes + lane]);
  return reinterpret_cast<const float*>(block)[index * kLanes + lane];
}

inline void write_scale(const Matrix& m, uint8_t* block, int index, int lane, float value) {
  if (m.is_half) {
    reinterpret_cast<uint16_t*>(block)[index * kLanes + lane] = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
  } else {
    reinterpret_cast<float*>(block)[index * kLanes + lane] = value;
  }
}

inline __m512 code_table(const Matrix& m) {
  const __m512 index = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_add_ps(index, _mm512_set1_ps(static_cast<float>(m.offset)));
}

// Calls use(b, p, weights) for all column blocks b and pairs of inputs p from input `begin` to `end`, ascending in p for
// each b. Both are multiples of kTile. G column blocks are expanded in turns.
template <int kBits, int B, int G, class Use>
inline void expand(const Matrix& m, const uint8_t* panel, int begin, int end, const Use& use) {
  constexpr int kStep = kBits * kTile * kLanes / 8;  // bytes of a tile
  const long size = block_bytes(m);
  const int head = header_bytes(m);
  const __m512 table = code_table(m);
  for (int from = begin; from < end;) {
    const int block = from / m.block, to = std::min(end, (block + 1) * m.block);
    const uint8_t* at = panel + size * block * B;
#pragma GCC unroll 4
    for (int first = 0; first < B; first += G, at += G * size) {
      Header headers[G];
#pragma GCC unroll 2
      for (int b = 0; b < G; ++b) headers[b] = load_header(m, at + b * size);
      const uint8_t* tiles = at + head + static_cast<long>((from - block * m.block) / kTile) * kStep;
      for (int k = from; k < to; k += kTile, tiles += kStep) {
#pragma GCC unroll 2
        for (int b = 0; b < G; ++b)
#pragma GCC unroll 4
          for (int line = 0; line < kStep; line += 64) _mm_prefetch(tiles + b * size + line + kBytesAhead, _MM_HINT_T1);
        expand_tiles<kBits, G>(headers, tiles, size, table,
                            [&](int b, int p, __m512bh weights) { use(first + b, k / 2 + p, weights); });
      }
    }
    from = to;
  }
}

// tile[M][16 B] = x[M][K] times one panel, each weight used at once.
template <int kBits, int M, int B>
void multiply_few(const Matrix& m, const bf16* x, const uint8_t* panel, float* tile) {
  __m512 sums[M][B];
#pragma GCC unroll 6
  for (int row = 0; row < M; ++row)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) sums[row][b] = _mm512_setzero_ps();
  // Two column blocks in turns have twice as many independent sums. More than 16 do not fit the registers with the scales.
  constexpr int G = M * B <= 16 ? 2 : 1;
  expand<kBits, B, G>(m, panel, 0, m.depth, [&](int b, int p, __m512bh weights) {
#pragma GCC unroll 6
    for (int row = 0; row < M; ++row)
      sums[row][b] = _mm512_dpbf16_ps(sums[row][b], weights, as_bf16(pair(x + static_cast<long>(row) * m.depth + 2 * p)));
  });
#pragma GCC unroll 6
  for (int row = 0; row < M; ++row)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) _mm512_store_ps(tile + (row * B + b) * kLanes, sums[row][b]);
}

// tiles[rows][16 B] = x[rows][K] times one panel, of which a chunk at a time is expanded for all rows.
template <int kBits, int B>
void multiply_chunks(const Matrix& m, const bf16* x, int rows, const uint8_t* panel, float* tiles) {
  alignas(64) bf16 lines[kChunk * B * kLanes];
  const int chunks = (m.depth + kChunk - 1) / kChunk;
  const int size = (m.depth / kTile + chunks - 1) / chunks * kTile;
  for (int begin = 0; begin < m.depth; begin += size) {
    const int end = std::min(m.depth, begin + size);
    expand<kBits, B, 1>(m, panel, begin, end, [&](int b, int p, __m512bh weights) {
      _mm512_store_si512(lines + static_cast<long>((p - begin / 2) * B + b) * 32, reinterpret_cast<__m512i>(weights));
    });
    each_group(B, 0, rows, [&](int first, int last, Multiply kernel) {
      kernel(x + static_cast<long>(first) * m.depth + begin, m.depth, lines, (end - begin) / 2,
             tiles + first * B * kLanes, begin > 0);
    });
  }
}

template <int kBits, int B>
void multiply_codes(const Matrix& m, const bf16* x, int rows, const uint8_t* panel, float* tiles) {
  using Few = void (*)(const Matrix&, const bf16*, const uint8_t*, float*);
  constexpr Few kFew[] = {multiply_few<kBits, 1, B>, multiply_few<kBits, 2, B>, multiply_few<kBits, 3, B>,
                          multiply_few<kBits, 4, B>, multiply_few<kBits, 5, B>, multiply_few<kBits, 6, B>};
  if (rows <= kFewRows) return kFew[rows - 1](m, x, panel, tiles);
  multiply_chunks<kBits, B>(m, x, rows, panel, tiles);
}

// Calls use(first row, rows, tile) for groups of rows of x times panel number `panel`; at most kRowChunk rows.
template <class Use>
void multiply_rows(const Matrix& m, int panel, const bf16* x, int begin, int end, const Use& use) {
  if (m.bits == 16) return multiply_plain(m, panel, x, begin, end, use);
  alignas(64) float tiles[kRowChunk * 4 * kLanes];
  const auto multiply = m.bits == 4 ? (m.blocks == 4 ? multiply_codes<4, 4> : multiply_codes<4, 2>)
                                    : (m.blocks == 4 ? multiply_codes<8, 4> : multiply_codes<8, 2>);
  multiply(m, x + static_cast<long>(begin) * m.depth, end - begin, m.panels + panel_bytes(m) * panel, tiles);
  use(begin, end - begin, tiles);
}

// One column as float32: to[depth].
void read_column(const Matrix& m, int column, float* to) {
  const int panel = column / m.width(), b = column % m.width() / kLanes, lane = column % kLanes;
  if (m.bits == 16) {
    const bf16* from = reinterpret_cast<const bf16*>(m.panels) + static_cast<long>(panel) * m.width() * m.depth;
    for (int k = 0; k < m.depth; ++k)
      to[k] = as_float(from[(static_cast<long>(k / 2) * m.blocks + b) * 32 + lane * 2 + k % 2]);
    return;
  }
  for (int k = 0; k < m.depth; ++k) {
    const uint8_t* block = m.panels + panel_bytes(m) * panel + block_bytes(m) * (k / m.block * m.blocks + b);
    const uint8_t* tile = block + header_bytes(m) + static_cast<long>(k % m.block / kTile) * tile_bytes(m);
    const float scale = read_scale(m, block, 0, lane), minimum = m.has_minimum ? read_scale(m, block, 1, lane) : 0;
    const int p = k % kTile / 2, h = lane / 8, entry = lane % 8 * 2 + k % 2;
    const int code = m.bits == 8 ? static_cast<int8_t>(tile[(2 * p + h) * 16 + entry])
                                 : (tile[h * 64 + entry * 4 + p / 2] >> (p % 2 * 4) & 15) + m.offset;
    to[k] = as_float(round_bf16(std::fma(scale, static_cast<float>(code), minimum)));
  }
}

// Writes the panels of a matrix from its codes.
void write_codes(Matrix& m, const Codes& from) {
  for (int column = 0; column < m.columns; ++column) {
    const int panel = column / m.width(), b = column % m.width() / kLanes, lane = column % kLanes;
    const int8_t* codes = from.codes + static_cast<long>(column) * m.depth;
    for (int number = 0; number < m.depth / m.block; ++number) {
      const long source = static_cast<long>(column) * (m.depth / m.block) + number;
      uint8_t* block = m.panels + panel_bytes(m) * panel + block_bytes(m) * (number * m.blocks + b);
      write_scale(m, block, 0, lane, from.scales[source]);
      if (m.has_minimum) write_scale(m, block, 1, lane, from.minimums[source]);
      for (int k = 0; k < m.block; ++k) {
        uint8_t* tile = block + header_bytes(m) + static_cast<long>(k / kTile) * tile_bytes(m);
        const int code = codes[number * m.block + k];
        const int p = k % kTile / 2, h = lane / 8, entry = lane % 8 * 2 + k % 2;
        if (m.bits == 8) {
          tile[(2 * p + h) * 16 + entry] = static_cast<uint8_t>(code);
        } else {
          tile[h * 64 + entry * 4 + p / 2] |= ((code - m.offset) & 15) << (p % 2 * 4);
        }
      }
    }
  }
}

}  // namespace
