// The decoder of Llama, Mistral, Qwen2 and Qwen3 models on a CPU with AVX512-BF16: a whole forward in one call.
//
// Owns the order of operations, which is that of its slow twin engine/model/decoder.py, and the layout inside the KV
// cache. The residual stream is float32. The result of a row depends only on that row and its context, never on other
// rows of the forward. Weights are in matrix.h and packed.h, threads in
// pool.h.
//
// A row of a draft tree whose ancestors are not the slots right before it attends to copies of them in the order of its
// path. So it has the bits that it would have as a row of a chain, and masks cost nothing elsewhere.
//
// K cache   [tokens / 16][G][D / 2][16][2] bfloat16: one load holds two dimensions of 16 tokens.
// V cache   [tokens / 16][G][8][D][2] bfloat16: one load holds two tokens of 16 dimensions.
// As int8, a tile of 16 tokens of a KV head has codes in the same order and then the float32 scales of its tokens. Codes
// are exact in bfloat16. Scales of K are multiplied with scores, and those of V with probabilities.

#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "packed.h"
#include "pool.h"

namespace {

constexpr int kQueries = 6;     // query vectors attended together
constexpr int kTilesAhead = 4;  // prefetch distance in tiles of the KV cache
constexpr int kSlice = 4;       // 16-wide registers of a head's dimensions summed at once

}  // namespace

extern "C" {

struct Shape {
  int32_t num_layers, hidden, heads, kv_heads, head_dim, inner, vocab, num_threads;
  float eps;
};

struct LayerWeights {
  Matrix *qkv, *o, *gate_up, *down;  // a panel of gate_up has two blocks of gate, then the same two of up
  const float *qkv_bias, *o_bias, *gate_bias, *up_bias, *down_bias;      // null where absent
  const float *input_norm, *q_norm, *k_norm, *mlp_norm;                  // q_norm and k_norm null where absent
};

struct LowRank {  // the part of an adapter in one matrix: B A x is added to its product with x
  const float *a, *b;  // [rank][inputs], [rank][outputs]
  int32_t rank;        // 0: none
};

struct LayerAdapter {
  LowRank q, k, v, o, gate, up, down;
};

struct NativeForward {
  int32_t num_rows, num_spans, table_width, num_logits, block_size, num_features;
  int32_t is_int8;  // whether the KV cache is int8 instead of bfloat16
  const int32_t *token_ids, *slots, *q_lens, *kv_lens, *block_tables, *logit_rows, *feature_layers;
  const int32_t* tree_slots;  // [num_spans] last KV slots of a span that are its tree; null without trees
  const uint64_t* ancestors;  // [num_rows] bits of a row's ancestors in the tree and of itself; null without trees
  const LayerAdapter* const* adapters;  // [num_rows] all layers of the row's adapter, or null; null without adapters
  const float *cos, *sin;  // [num_rows, head_dim / 2]
  void *const *keys, *const *values;  // one of each per layer
  const bf16* embedded;  // [num_rows, hidden] input of the first layer; null takes the embeddings of token_ids
  float* logits;  // [num_logits, vocab]
  bf16* features;  // [num_rows, num_features * hidden], or null
};

}  // extern "C"

namespace {

struct AttentionItem {
  int span, kv_head, first, count;  // query vectors first .. first + count - 1 of the span, row-major
  uint64_t path;  // ancestors in the tree of the one row of all vectors, where these are not consecutive; else 0
};

template <class T>  // bf16 or int8_t: elements of the KV cache
struct Tail {  // K and V of one KV head that replace the cache from a tile of the span on
  int first_tile, seen;
  const T *keys, *values;
};

// Elements of 16 tokens of one KV head, of K or of V.
template <class T>
constexpr long tile_size(int dim) {
  return static_cast<long>(dim) * kLanes + (sizeof(T) == 1 ? kLanes * sizeof(float) : 0);
}

// The scales of a tile of int8.
template <class T>
inline auto* scales_of(T* tile, int dim) {
  using Float = std::conditional_t<std::is_const_v<T>, const float, float>;
  return reinterpret_cast<Float*>(tile + dim * kLanes);
}

inline __m512bh load_pairs(const bf16* at) { return as_bf16(_mm512_loadu_si512(at)); }
inline __m512bh load_pairs(const int8_t* at) {
  const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)));
  const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1)));
  return _mm512_cvtne2ps_pbh(high, low);
}

// Writes the K or V of one token: element i goes to tile[place(i)].
template <class Place>
void store_token(const float* x, int dim, bf16* tile, int, const Place& place) {
  for (int i = 0; i < dim; ++i) tile[place(i)] = round_bf16(x[i]);
}
template <class Place>
void store_token(const float* x, int dim, int8_t* tile, int lane, const Place& place) {
  float largest = 0;
  for (int i = 0; i < dim; ++i) largest = std::max(largest, std::fabs(x[i]));
  const float scale = largest / 127, inverse = largest > 0 ? 127 / largest : 0;
  for (int i = 0; i < dim; ++i) tile[place(i)] = static_cast<int8_t>(std::lrint(x[i] * inverse));
  scales_of(tile, dim)[lane] = scale;
}

template <class T>
struct Buffer {  // grows and never shrinks; its contents are lost when it grows
  T* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }
  T* get(size_t wanted) {
    if (wanted > size) {
      std::free(data);
      size = (wanted + 4095) / 4096 * 4096;
      data = static_cast<T*>(std::aligned_alloc(64, size * sizeof(T)));
    }
    return data;
  }
};

// Copies one token of one KV head between lanes of two tiles.
template <class T>
void copy_token(const T* from_keys, const T* from_values, int from, T* to_keys, T* to_values, int to, int dim) {
  for (int i = 0; i < dim; i += 2)
    std::memcpy(to_keys + i * kLanes + to * 2, from_keys + i * kLanes + from * 2, 2 * sizeof(T));
  const T* source = from_values + (from / 2) * dim * 2 + from % 2;
  T* target = to_values + (to / 2) * dim * 2 + to % 2;
  for (int i = 0; i < dim; ++i) target[2 * i] = source[2 * i];
  if (sizeof(T) > 1) return;
  scales_of(to_keys, dim)[to] = scales_of(from_keys, dim)[from];
  scales_of(to_values, dim)[to] = scales_of(from_values, dim)[from];
}

struct Scratch {  // of one thread
  Buffer<float> scores;
  Buffer<bf16> probs;
  Buffer<uint8_t> tail;
};

class Model {
 public:
  Model(const Shape& shape, const LayerWeights* layers, const bf16* embedding, const Matrix* embedding_rows,
        const float* final_norm, const Matrix* head)
      : shape_(shape),
        layers_(layers, layers + shape.num_layers),
        embedding_(embedding),
        embedding_rows_(embedding_rows),
        final_norm_(final_norm),
        head_(*head),
        pool_(shape.num_threads),
        scratch_(std::max(1, shape.num_threads)) {}

  // Moves KV slots in order: moves[m] = from, to.
  template <class T>
  void move(const int32_t* moves, int count, void* const* all_keys, void* const* all_values) const {
    const long size = tile_size<T>(shape_.head_dim);
    T *const *keys = reinterpret_cast<T* const*>(all_keys), *const *values = reinterpret_cast<T* const*>(all_values);
    for (int layer = 0; layer < shape_.num_layers; ++layer)
      for (int m = 0; m < count; ++m) {
        const int from = moves[2 * m], to = moves[2 * m + 1];
        for (int head = 0; head < shape_.kv_heads; ++head) {
          const long source = (static_cast<long>(from / kLanes) * shape_.kv_heads + head) * size;
          const long target = (static_cast<long>(to / kLanes) * shape_.kv_heads + head) * size;
          copy_token(keys[layer] + source, values[layer] + source, from % kLanes, keys[layer] + target,
                     values[layer] + target, to % kLanes, shape_.head_dim);
        }
      }
  }

  void forward(const NativeForward& input) {
    pool_.wake();
    const long rows = input.num_rows;
    residual_.get(rows * shape_.hidden);
    normed_.get(rows * shape_.hidden);
    projected_.get(rows * (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim);
    query_.get(rows * shape_.heads * shape_.head_dim);
    context_.get(rows * shape_.heads * shape_.head_dim);
    inner_.get(rows * shape_.inner);
    split_attention(input);
    loop_rows(input.num_rows, [&](int row, int) { embed(input, row); });
    int feature = 0;
    for (int layer = 0; layer < shape_.num_layers; ++layer) {
      if (input.is_int8) {
        attend(input, layer, static_cast<int8_t*>(input.keys[layer]), static_cast<int8_t*>(input.values[layer]));
      } else {
        attend(input, layer, static_cast<bf16*>(input.keys[layer]), static_cast<bf16*>(input.values[layer]));
      }
      feed_forward(input, layer);
      if (feature < input.num_features && input.feature_layers[feature] == layer) keep_features(input, feature++);
    }
    logits(input);
  }

 private:
  void embed(const NativeForward& input, long row) {
    float* to = residual_.data + row * shape_.hidden;
    if (!input.embedded && !embedding_) return read_column(*embedding_rows_, input.token_ids[row], to);
    const bf16* from = input.embedded ? input.embedded + row * shape_.hidden
                                     : embedding_ + static_cast<long>(input.token_ids[row]) * shape_.hidden;
    for (int i = 0; i < shape_.hidden; i += kLanes) _mm512_store_ps(to + i, load_bf16(from + i));
  }

  // normed[i] = norm(residual[rows[i]]); rows = null takes all rows in order.
  void normalise(const float* weight, const int32_t* rows, int count) {
    const int hidden = shape_.hidden;
    const auto body = [&](int item, int) {
      const float* x = residual_.data + static_cast<long>(rows ? rows[item] : item) * hidden;
      bf16* to = normed_.data + static_cast<long>(item) * hidden;
      __m512 squares = _mm512_setzero_ps();
      for (int i = 0; i < hidden; i += kLanes) {
        const __m512 part = _mm512_load_ps(x + i);
        squares = _mm512_fmadd_ps(part, part, squares);
      }
      const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / hidden + shape_.eps));
      for (int i = 0; i < hidden; i += kLanes)
        store_bf16(to + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_load_ps(x + i), scale), _mm512_loadu_ps(weight + i)));
    };
    loop_rows(count, body);
  }

  // A few cheap rows are faster on one thread.
  template <class Body>
  void loop_rows(int count, const Body& body) {
    constexpr int kFew = 4, kPerItem = 4;
    if (count <= kFew) {
      for (int row = 0; row < count; ++row) body(row, 0);
      return;
    }
    pool_.loop((count + kPerItem - 1) / kPerItem, [&](int item, int thread) {
      for (int row = item * kPerItem; row < std::min(count, (item + 1) * kPerItem); ++row) body(row, thread);
    });
  }

  // Calls use(panel, first row, rows, tile) for each tile of x[count][depth] times the matrix.
  template <class Use>
  void project(const Matrix& matrix, const bf16* x, int count, const Use& use) {
    const int panels = matrix.num_panels();
    const int chunks = (count + kRowChunk - 1) / kRowChunk;
    pool_.loop(panels * chunks, [&](int item, int) {
      const int chunk = item / panels, panel = item % panels;
      const auto then = [&](int first, int rows, const float* tile) { use(panel, first, rows, tile); };
      multiply_rows(matrix, panel, x, chunk * kRowChunk, std::min(count, (chunk + 1) * kRowChunk), then);
    });
  }

  // to[row][columns] (+)= x times the matrix + bias.
  template <bool kAdd>
  void project_to(const Matrix& matrix, const bf16* x, int count, const float* bias, float* to) {
    project(matrix, x, count, [&](int panel, int first, int rows, const float* tile) {
      const int width = matrix.width();
      const int begin = panel * width, count = std::min(width, matrix.columns - begin);
      for (int row = 0; row < rows; ++row)
        for (int column = 0; column < count; column += kLanes) {
          const __mmask16 mask = count - column >= kLanes ? 0xffff : (1u << (count - column)) - 1;
          float* at = to + static_cast<long>(first + row) * matrix.columns + begin + column;
          __m512 sum = _mm512_load_ps(tile + row * width + column);
          if (bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, bias + begin + column));
          if (kAdd) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, at));
          _mm512_mask_storeu_ps(at, mask, sum);
        }
    });
  }

  template <class T>
  void attend(const NativeForward& input, int number, T* keys, T* values) {
    const LayerWeights& layer = layers_[number];
    normalise(layer.input_norm, nullptr, input.num_rows);
    project_to<false>(*layer.qkv, normed_.data, input.num_rows, layer.qkv_bias, projected_.data);
    const int heads = shape_.heads * shape_.head_dim, groups = shape_.kv_heads * shape_.head_dim, width = heads + 2 * groups;
    float* projected = projected_.data;
    add_adapters(input, number, &LayerAdapter::q, normed_.data, shape_.hidden, projected, width, heads);
    add_adapters(input, number, &LayerAdapter::k, normed_.data, shape_.hidden, projected + heads, width, groups);
    add_adapters(input, number, &LayerAdapter::v, normed_.data, shape_.hidden, projected + heads + groups, width, groups);
    loop_rows(input.num_rows, [&](int row, int) { place(input, layer, row, keys, values); });
    pool_.loop(static_cast<int>(items_.size()), [&](int item, int thread) {
      attend_item(input, items_[item], keys, values, scratch_[thread]);
    });
    project_to<true>(*layer.o, context_.data, input.num_rows, layer.o_bias, residual_.data);
    add_adapters(input, number, &LayerAdapter::o, context_.data, heads, residual_.data, shape_.hidden, shape_.hidden);
  }

  // Adds B A x to the rows of `to` that have an adapter. Rows of x have `depth` elements, those of `to` are `stride` apart.
  void add_adapters(const NativeForward& input, int layer, LowRank LayerAdapter::*part, const bf16* x, int depth,
                    float* to, long stride, int columns) {
    if (!input.adapters) return;
    loop_rows(input.num_rows, [&](int row, int) {
      if (!input.adapters[row]) return;
      const LowRank& low_rank = input.adapters[row][layer].*part;
      const bf16* from = x + static_cast<long>(row) * depth;
      float* sums = to + row * stride;
      for (long r = 0; r < low_rank.rank; ++r) {
        __m512 product = _mm512_setzero_ps();
        for (int i = 0; i < depth; i += kLanes)
          product = _mm512_fmadd_ps(load_bf16(from + i), _mm512_loadu_ps(low_rank.a + r * depth + i), product);
        const __m512 inner = _mm512_set1_ps(_mm512_reduce_add_ps(product));
        for (int i = 0; i < columns; i += kLanes)
          _mm512_storeu_ps(sums + i, _mm512_fmadd_ps(inner, _mm512_loadu_ps(low_rank.b + r * columns + i), _mm512_loadu_ps(sums + i)));
      }
    });
  }

  void feed_forward(const NativeForward& input, int number) {
    const LayerWeights& layer = layers_[number];
    normalise(layer.mlp_norm, nullptr, input.num_rows);
    constexpr int kUnits = 2 * kLanes;  // inner units of a panel
    const long inner = shape_.inner;
    if (input.adapters) {
      std::fill_n(adapted_.get(input.num_rows * 2 * inner), input.num_rows * 2 * inner, 0.0f);
      add_adapters(input, number, &LayerAdapter::gate, normed_.data, shape_.hidden, adapted_.data, 2 * inner, shape_.inner);
      add_adapters(input, number, &LayerAdapter::up, normed_.data, shape_.hidden, adapted_.data + inner, 2 * inner, shape_.inner);
    }
    project(*layer.gate_up, normed_.data, input.num_rows, [&](int panel, int first, int rows, const float* tile) {
      for (int row = 0; row < rows; ++row)
        for (int block = 0; block < 2; ++block) {
          const int unit = panel * kUnits + block * kLanes;
          __m512 gate = _mm512_load_ps(tile + row * 2 * kUnits + block * kLanes);
          __m512 up = _mm512_load_ps(tile + row * 2 * kUnits + kUnits + block * kLanes);
          if (layer.gate_bias) gate = _mm512_add_ps(gate, _mm512_loadu_ps(layer.gate_bias + unit));
          if (layer.up_bias) up = _mm512_add_ps(up, _mm512_loadu_ps(layer.up_bias + unit));
          if (input.adapters && input.adapters[first + row]) {
            const float* added = adapted_.data + (first + row) * 2 * inner + unit;
            gate = _mm512_add_ps(gate, _mm512_loadu_ps(added));
            up = _mm512_add_ps(up, _mm512_loadu_ps(added + inner));
          }
          const __m512 one = _mm512_set1_ps(1.0f);
          const __m512 fall = exp16(_mm512_sub_ps(_mm512_setzero_ps(), gate));
          const __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(one, fall));
          store_bf16(inner_.data + static_cast<long>(first + row) * shape_.inner + unit, _mm512_mul_ps(silu, up));
        }
    });
    project_to<true>(*layer.down, inner_.data, input.num_rows, layer.down_bias, residual_.data);
    add_adapters(input, number, &LayerAdapter::down, inner_.data, shape_.inner, residual_.data, shape_.hidden, shape_.hidden);
  }

  // Applies q/k norm and RoPE to a row. Writes q to its buffer, and k and v to their KV slot.
  template <class T>
  void place(const NativeForward& input, const LayerWeights& layer, int row, T* keys, T* values) {
    const int dim = shape_.head_dim, heads = shape_.heads, groups = shape_.kv_heads;
    float* from = projected_.data + static_cast<long>(row) * (heads + 2 * groups) * dim;
    const float *cos = input.cos + static_cast<long>(row) * dim / 2, *sin = input.sin + static_cast<long>(row) * dim / 2;
    const long tile = input.slots[row] / kLanes;
    const int lane = input.slots[row] % kLanes;
    for (int head = 0; head < heads + groups; ++head) {
      float* x = from + head * dim;
      const float* norm = head < heads ? layer.q_norm : layer.k_norm;
      if (norm) normalise_head(x, norm);
      turn(x, cos, sin);
      if (head < heads) {
        bf16* to = query_.data + (static_cast<long>(row) * heads + head) * dim;
        for (int i = 0; i < dim; i += kLanes) store_bf16(to + i, _mm512_loadu_ps(x + i));
      } else {
        T* to = keys + (tile * groups + head - heads) * tile_size<T>(dim);
        store_token(x, dim, to, lane, [&](int i) { return (i & ~1) * kLanes + lane * 2 + (i & 1); });
      }
    }
    for (int group = 0; group < groups; ++group) {
      const float* x = from + (heads + groups + group) * dim;
      T* to = values + (tile * groups + group) * tile_size<T>(dim);
      store_token(x, dim, to, lane, [&](int i) { return (lane / 2) * dim * 2 + lane % 2 + 2 * i; });
    }
  }

  void normalise_head(float* x, const float* weight) {
    float squares = 0;
    for (int i = 0; i < shape_.head_dim; ++i) squares += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(squares / shape_.head_dim + shape_.eps);
    for (int i = 0; i < shape_.head_dim; ++i) x[i] *= scale * weight[i];
  }

  void turn(float* x, const float* cos, const float* sin) {
    const int half = shape_.head_dim / 2;
    for (int i = 0; i < half; i += kLanes) {
      const __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + half + i);
      const __m512 c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
      _mm512_storeu_ps(x + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
      _mm512_storeu_ps(x + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
    }
  }

  // Splits attention into items of query vectors, once per forward for all layers.
  void split_attention(const NativeForward& input) {
    items_.clear();
    starts_.resize(input.num_spans);
    int row = 0;
    for (int span = 0; span < input.num_spans; ++span) {
      starts_[span] = row;
      row += input.q_lens[span];
      if (!input.tree_slots || input.tree_slots[span] == 0) {
        add_items(span, 0, input.q_lens[span], 0);
        continue;
      }
      int first = 0;  // first row that has no item yet
      for (int at = 0; at < input.q_lens[span]; ++at) {
        const uint64_t path = input.ancestors[starts_[span] + at];
        if ((path & (path + 1)) == 0) continue;  // the row sees the slots up to its own
        add_items(span, first, at, 0);
        add_items(span, at, at + 1, path);
        first = at + 1;
      }
      add_items(span, first, input.q_lens[span], 0);
    }
  }

  void add_items(int span, int first_row, int end_row, uint64_t path) {
    const int fold = shape_.heads / shape_.kv_heads, end = end_row * fold;
    for (int first = first_row * fold; first < end; first += kQueries)
      for (int head = 0; head < shape_.kv_heads; ++head)
        items_.push_back({span, head, first, std::min(kQueries, end - first), path});
  }

  template <class T>
  long cache_offset(const NativeForward& input, const AttentionItem& item, int tile) const {
    const int32_t* table = input.block_tables + static_cast<long>(item.span) * input.table_width;
    const int tiles_per_block = input.block_size / kLanes;
    const long where = static_cast<long>(table[tile / tiles_per_block]) * tiles_per_block + tile % tiles_per_block;
    return (where * shape_.kv_heads + item.kv_head) * tile_size<T>(shape_.head_dim);
  }

  // Copies the K and V that a path sees from the first tile of the tree on, in the order of the path.
  template <class T>
  Tail<T> copy_path(const NativeForward& input, const AttentionItem& item, const T* keys, const T* values, Scratch& scratch) {
    const int dim = shape_.head_dim, root = input.kv_lens[item.span] - input.tree_slots[item.span];
    const int first = root / kLanes, seen = root + __builtin_popcountll(item.path);
    const long size = tile_size<T>(dim), tiles = (seen + kLanes - 1) / kLanes - first;
    T* to_keys = reinterpret_cast<T*>(scratch.tail.get(2 * tiles * size * sizeof(T)));
    T* to_values = to_keys + tiles * size;
    std::memset(to_keys, 0, 2 * tiles * size * sizeof(T));
    if (root % kLanes) {
      std::memcpy(to_keys, keys + cache_offset<T>(input, item, first), size * sizeof(T));
      std::memcpy(to_values, values + cache_offset<T>(input, item, first), size * sizeof(T));
    }
    int place = root - first * kLanes;
    for (uint64_t left = item.path; left; left &= left - 1, ++place) {
      const int slot = root + __builtin_ctzll(left);
      const long from = cache_offset<T>(input, item, slot / kLanes), to = place / kLanes * size;
      copy_token(keys + from, values + from, slot % kLanes, to_keys + to, to_values + to, place % kLanes, dim);
    }
    return {first, seen, to_keys, to_values};
  }

  template <class T>
  void attend_item(const NativeForward& input, const AttentionItem& item, const T* keys, const T* values, Scratch& scratch) {
    switch (item.count) {
      case 1: return attend_queries<1>(input, item, keys, values, scratch);
      case 2: return attend_queries<2>(input, item, keys, values, scratch);
      case 3: return attend_queries<3>(input, item, keys, values, scratch);
      case 4: return attend_queries<4>(input, item, keys, values, scratch);
      case 5: return attend_queries<5>(input, item, keys, values, scratch);
      default: return attend_queries<6>(input, item, keys, values, scratch);
    }
  }

  template <int Q, class T>
  void attend_queries(const NativeForward& input, const AttentionItem& item, const T* keys, const T* values, Scratch& scratch) {
    const int dim = shape_.head_dim, fold = shape_.heads / shape_.kv_heads;
    Tail<T> tail{INT32_MAX, 0, nullptr, nullptr};
    if (item.path) tail = copy_path(input, item, keys, values, scratch);
    const bf16* query[Q];
    long target[Q];
    int seen[Q], most = 0;
    for (int q = 0; q < Q; ++q) {
      const int row = (item.first + q) / fold, head = item.kv_head * fold + (item.first + q) % fold;
      target[q] = (static_cast<long>(starts_[item.span] + row) * shape_.heads + head) * dim;
      query[q] = query_.data + target[q];
      seen[q] = item.path ? tail.seen : input.kv_lens[item.span] - input.q_lens[item.span] + row + 1;
      most = std::max(most, seen[q]);
    }
    const int num_tiles = (most + kLanes - 1) / kLanes, padded = num_tiles * kLanes;
    float* scores = scratch.scores.get(static_cast<size_t>(Q) * padded);
    bf16* probs = scratch.probs.get(static_cast<size_t>(Q) * padded);
    const auto tile_of = [&](const T* cache, const T* copies, int tile) {
      if (tile < tail.first_tile) return cache + cache_offset<T>(input, item, tile);
      return copies + (tile - tail.first_tile) * tile_size<T>(dim);
    };
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(static_cast<float>(dim)));
    for (int tile = 0; tile < num_tiles; ++tile) {
      const T* at = tile_of(keys, tail.keys, tile);
      const T* later = tile_of(keys, tail.keys, std::min(tile + kTilesAhead, num_tiles - 1));
      const __m512 factor = sizeof(T) == 1 ? _mm512_mul_ps(scale, _mm512_loadu_ps(scales_of(at, dim))) : scale;
      __m512 sums[2][Q];  // even and odd pairs of dimensions: two short chains of additions instead of a long one
#pragma GCC unroll 6
      for (int q = 0; q < Q; ++q) sums[0][q] = sums[1][q] = _mm512_setzero_ps();
      for (int i = 0; i < dim; i += 4)
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; ++odd) {
          const int at_pair = i + 2 * odd;
          _mm_prefetch(later + at_pair * kLanes, _MM_HINT_T0);
          const __m512bh k = load_pairs(at + at_pair * kLanes);
#pragma GCC unroll 6
          for (int q = 0; q < Q; ++q)
            sums[odd][q] = _mm512_dpbf16_ps(sums[odd][q], k, as_bf16(pair(query[q] + at_pair)));
        }
#pragma GCC unroll 6
      for (int q = 0; q < Q; ++q)
        _mm512_store_ps(scores + static_cast<long>(q) * padded + tile * kLanes,
                        _mm512_mul_ps(_mm512_add_ps(sums[0][q], sums[1][q]), factor));
    }
    float inverse[Q];
    const auto weighted = [&](__m512 p, int first) {
      if (sizeof(T) > 1) return p;
      return _mm512_mul_ps(p, _mm512_loadu_ps(scales_of(tile_of(values, tail.values, first / kLanes), dim)));
    };
    for (int q = 0; q < Q; ++q) {
      const long first = static_cast<long>(q) * padded;
      inverse[q] = softmax(scores + first, probs + first, seen[q], padded, weighted);
    }
    for (int slice = 0; slice < dim; slice += kSlice * kLanes) {
      __m512 sums[Q][kSlice];
#pragma GCC unroll 6
      for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
        for (int b = 0; b < kSlice; ++b) sums[q][b] = _mm512_setzero_ps();
      for (int tile = 0; tile < num_tiles; ++tile) {
        const T* at = tile_of(values, tail.values, tile) + slice * 2;
        const T* later = tile_of(values, tail.values, std::min(tile + kTilesAhead, num_tiles - 1)) + slice * 2;
        for (int two = 0; two < kLanes / 2; ++two) {
          __m512bh v[kSlice];
#pragma GCC unroll 4
          for (int b = 0; b < kSlice; ++b) {
            _mm_prefetch(later + two * dim * 2 + b * 32, _MM_HINT_T0);
            v[b] = load_pairs(at + two * dim * 2 + b * 32);
          }
#pragma GCC unroll 6
          for (int q = 0; q < Q; ++q) {
            const __m512bh p = as_bf16(pair(probs + static_cast<long>(q) * padded + tile * kLanes + two * 2));
#pragma GCC unroll 4
            for (int b = 0; b < kSlice; ++b) sums[q][b] = _mm512_dpbf16_ps(sums[q][b], v[b], p);
          }
        }
      }
#pragma GCC unroll 6
      for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
        for (int b = 0; b < kSlice; ++b)
          store_bf16(context_.data + target[q] + slice + b * kLanes, _mm512_mul_ps(sums[q][b], _mm512_set1_ps(inverse[q])));
    }
  }

  // probs = weighted(e^(scores - max), first of 16 tokens) for the first `seen`, 0 to `padded`; returns 1 / the sum of
  // the exponentials.
  template <class Weighted>
  static float softmax(float* scores, bf16* probs, int seen, int padded, const Weighted& weighted) {
    const int whole = seen / kLanes * kLanes;
    const __mmask16 rest = static_cast<__mmask16>((1u << (seen - whole)) - 1);
    const __m512 lowest = _mm512_set1_ps(-INFINITY);
    __m512 highest = lowest;
    for (int t = 0; t < whole; t += kLanes) highest = _mm512_max_ps(highest, _mm512_load_ps(scores + t));
    if (rest) highest = _mm512_max_ps(highest, _mm512_mask_load_ps(lowest, rest, scores + whole));
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(highest));
    __m512 sum = _mm512_setzero_ps();
    for (int t = 0; t < padded; t += kLanes) {
      const __mmask16 mask = t < whole ? 0xffff : t == whole ? rest : 0;
      const __m512 p = _mm512_maskz_mov_ps(mask, exp16(_mm512_sub_ps(_mm512_load_ps(scores + t), top)));
      sum = _mm512_add_ps(sum, p);
      store_bf16(probs + t, weighted(p, t));
    }
    return 1.0f / _mm512_reduce_add_ps(sum);
  }

  void keep_features(const NativeForward& input, int feature) {
    const int hidden = shape_.hidden;
    for (long row = 0; row < input.num_rows; ++row)
      for (int i = 0; i < hidden; i += kLanes)
        store_bf16(input.features + (row * input.num_features + feature) * hidden + i,
                   _mm512_load_ps(residual_.data + row * hidden + i));
  }

  void logits(const NativeForward& input) {
    if (input.num_logits == 0) return;
    normalise(final_norm_, input.logit_rows, input.num_logits);
    project_to<false>(head_, normed_.data, input.num_logits, nullptr, input.logits);
  }

  const Shape shape_;
  const std::vector<LayerWeights> layers_;
  const bf16* const embedding_;
  const Matrix* const embedding_rows_;  // with a token per column, where embedding_ is null
  const float* const final_norm_;
  const Matrix head_;
  Pool pool_;
  std::vector<Scratch> scratch_;
  std::vector<AttentionItem> items_;
  std::vector<int> starts_;
  Buffer<float> residual_, projected_;
  Buffer<float> adapted_;  // what adapters add to gate and up: [rows][2][inner]
  Buffer<bf16> normed_, query_, context_, inner_;
};

}  // namespace

extern "C" {

// A matrix of a row-major weight [columns][depth]; null where memory is short. columns is padded to whole panels.
Matrix* matrix_pack(const bf16* weight, int columns, int depth, int blocks) {
  Matrix matrix;
  matrix.columns = columns;
  matrix.depth = depth;
  matrix.blocks = blocks;
  return place(matrix, sizeof(bf16) * matrix.width() * depth, [&](Matrix& to) { write_weights(to, weight); });
}

// A matrix of quantised weights; null where memory is short. The block divides the depth.
Matrix* matrix_pack_codes(const Codes* codes, int columns, int depth, int blocks) {
  Matrix matrix;
  matrix.columns = columns;
  matrix.depth = depth;
  matrix.blocks = blocks;
  matrix.bits = codes->bits;
  matrix.block = codes->block;
  matrix.offset = codes->offset;
  matrix.is_half = codes->is_half;
  matrix.has_minimum = codes->minimums;
  return place(matrix, panel_bytes(matrix), [&](Matrix& to) { write_codes(to, *codes); });
}

void matrix_free(Matrix* matrix) {
  munmap(matrix->panels, matrix->bytes);
  delete matrix;
}

// to[rows][columns] = x[rows][depth] times the matrix.
void matrix_multiply(const Matrix* matrix, const bf16* x, int rows, float* to) {
  const int width = matrix->width();
  for (int chunk = 0; chunk < rows; chunk += kRowChunk)
    for (int panel = 0; panel < matrix->num_panels(); ++panel)
      multiply_rows(*matrix, panel, x, chunk, std::min(rows, chunk + kRowChunk), [&](int first, int count, const float* tile) {
        const int begin = panel * width, columns = std::min(width, matrix->columns - begin);
        for (int row = 0; row < count; ++row)
          std::memcpy(to + static_cast<long>(first + row) * matrix->columns + begin, tile + row * width, columns * sizeof(float));
      });
}

// to[columns][depth] = the weight of the matrix.
void matrix_read(const Matrix* matrix, float* to) {
  for (int column = 0; column < matrix->columns; ++column) read_column(*matrix, column, to + static_cast<long>(column) * matrix->depth);
}

size_t matrix_bytes(const Matrix* matrix) { return matrix->bytes; }

// embedding or embedding_rows is null.
Model* model_new(const Shape* shape, const LayerWeights* layers, const bf16* embedding, const Matrix* embedding_rows,
                 const float* final_norm, const Matrix* head) {
  return new Model(*shape, layers, embedding, embedding_rows, final_norm, head);
}

void model_forward(Model* model, const NativeForward* input) { model->forward(*input); }

void model_move(Model* model, const int32_t* moves, int count, int is_int8, void* const* keys, void* const* values) {
  is_int8 ? model->move<int8_t>(moves, count, keys, values) : model->move<bf16>(moves, count, keys, values);
}

void model_free(Model* model) { delete model; }

}  // extern "C"
