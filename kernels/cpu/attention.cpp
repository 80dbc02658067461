// Paged attention by online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867), straight from
// the cache.
//
// A work item is some tokens of one row and one KV head: its query vectors (tokens x group) pass
// over the keys in tiles, so every K and V loaded serves all of them.
//
//     keys   0 ....... tile ....... tile ....... position of the last token
//                 |  blocks of the cache |
//     per tile:  scores (q . k)  ->  softmax (new maximum, old sums rescaled)  ->  weigh (p V)
//
// Tiles start at fixed positions, each sum runs in a fixed order, and a masked key adds an exact
// zero: so the result of a token is the same whatever stands in the batch or chunk around it.
#include <algorithm>
#include <vector>

#include "vec.h"

struct AttentionArgs {
  const void* q;  // [T, heads, head_dim], tokens q_stride elements apart
  const void* k_cache;  // [blocks, kv_heads, block_tokens, head_dim], blocks block_stride apart
  const void* v_cache;
  void* out;  // [T, heads, head_dim]
  const int32_t* query_start;
  const int32_t* context_tokens;
  const int32_t* block_table;
  int64_t rows, heads, kv_heads, head_dim, block_tokens, table_stride, q_stride;
  int64_t k_block_stride, v_block_stride, window;
  float scale, softcap;
};

namespace {

constexpr int64_t kQueryVectors = 32;  // of one item, unless one token has more
constexpr int64_t kTileTokens = 64;

struct Item {
  int32_t row, first, count;  // the row's tokens first .. first + count - 1
};

// DIM is head_dim where it is known when compiling, a multiple of 8; 0: any.
template <typename T, int DIM>
struct Attention {
  const AttentionArgs& a;
  const int64_t dim = DIM ? DIM : a.head_dim;
  const int64_t vectors = (dim + 7) / 8;
  const int64_t padded = vectors * 8;
  const int64_t group = a.heads / a.kv_heads;
  const int64_t tile = std::max<int64_t>(1, kTileTokens / a.block_tokens) * a.block_tokens;
  const int64_t score_stride = tile + 16;
  // Of the item:
  int64_t m_count = 0;  // query vectors, token-major
  int64_t position = 0;  // of the first token
  const int32_t* table = nullptr;
  int64_t kv_head = 0;
  std::vector<float> memory;
  float *query = nullptr, *acc = nullptr, *score = nullptr;
  float *top = nullptr, *sum = nullptr, *fade = nullptr;

  explicit Attention(const AttentionArgs& args) : a(args) {}

  void reserve(int64_t m) {
    memory.resize(m * (2 * padded + score_stride + 3));
    query = memory.data();
    acc = query + m * padded;
    score = acc + m * padded;
    top = score + m * score_stride;
    sum = top + m;
    fade = sum + m;
  }

  SWELL_INLINE v8 cached(const T* p, int64_t i) const {
    if (DIM || 8 * i + 8 <= dim) return load(p + 8 * i);
    return load_part(p + 8 * i, dim - 8 * i);
  }
  const T* block(const void* cache, int64_t stride, int64_t index) const {
    return static_cast<const T*>(cache) + table[index] * stride + kv_head * a.block_tokens * dim;
  }

  // MQ query vectors times NK keys, MQ * NK = 8.
  template <int MQ, int NK>
  SWELL_INLINE v8 dots(const float* q, const T* const* keys) const {
    v8 s[8] = {};
    for (int64_t i = 0; i < vectors; i++) {
      v8 k[NK];
      for (int n = 0; n < NK; n++) k[n] = cached(keys[n], i);
      for (int m = 0; m < MQ; m++) {
        v8 x = load(q + m * padded + 8 * i);
        for (int n = 0; n < NK; n++) s[m * NK + n] += x * k[n];
      }
    }
    return hsum8(s);
  }

  // score[m][j - base] = q[m] . k[j] for the keys j of [from, to), some more overwritten.
  void scores(int64_t base, int64_t from, int64_t to) {
    for (int64_t j = from; j < to;) {
      const int64_t end = std::min((j / a.block_tokens + 1) * a.block_tokens, to);
      const T* origin = block(a.k_cache, a.k_block_stride, j / a.block_tokens);
      for (; j < end; j += 8) {
        const T* keys[8];
        for (int64_t n = 0; n < 8; n++)
          keys[n] = origin + std::min(j + n, end - 1) % a.block_tokens * dim;
        float* to_score = score + (j - base);
        int64_t m = 0;
        for (; m + 4 <= m_count; m += 4)
          for (int n = 0; n < 8; n += 2) {
            v8 s = dots<4, 2>(query + m * padded, keys + n);
            for (int i = 0; i < 4; i++)
              std::memcpy(to_score + (m + i) * score_stride + n, (const float*)&s + 2 * i, 8);
          }
        for (; m < m_count; m++)
          store(to_score + m * score_stride, dots<1, 8>(query + m * padded, keys));
      }
      j = end;
    }
  }

  // Scores of the keys [from, to) become weights; top, sum and fade (the rescaling) follow.
  void softmax(int64_t base, int64_t from, int64_t to) {
    const int64_t begin = (from - base) & ~int64_t(7), end = to - base;
    const i8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    const v8 zero = {};
    for (int64_t m = 0; m < m_count; m++) {
      float* s = score + m * score_stride;
      const int64_t p = position + m / group;
      int64_t low = a.window > 0 ? std::max(from, p - a.window + 1) : from;
      low -= base;
      const int64_t high = std::min(to, p + 1) - base;
      fade[m] = 1.0f;
      if (low >= high) {
        for (int64_t j = begin; j < end; j += 8) store(s + j, zero);
        continue;
      }
      v8 largest = splat(kLowest);
      for (int64_t j = begin; j < end; j += 8) {
        const i8 index = lanes + int32_t(j);
        const i8 seen = (index >= int32_t(low)) & (index < int32_t(high));
        v8 x = load(s + j) * splat(a.scale);
        if (a.softcap > 0) x = splat(a.softcap) * vtanh(x / splat(a.softcap));
        x = seen ? x : splat(kLowest);
        store(s + j, x);
        largest = vmax(largest, x);
      }
      const float now = std::max(top[m], hmax(largest));
      v8 total = {};
      for (int64_t j = begin; j < end; j += 8) {
        const i8 index = lanes + int32_t(j);
        const i8 seen = (index >= int32_t(low)) & (index < int32_t(high));
        const v8 e = vexp(load(s + j) - splat(now));
        const v8 w = seen ? e : zero;
        store(s + j, w);
        total += w;
      }
      fade[m] = vexp(splat(top[m] - now))[0];
      sum[m] = sum[m] * fade[m] + hsum(total);
      top[m] = now;
    }
  }

  // acc[m] = fade[m] acc[m] + sum_j weight[m][j] v[j], for MQ query vectors and NV vectors of v.
  template <int MQ, int NV>
  SWELL_INLINE void weigh_some(int64_t m, int64_t i, int64_t base, int64_t from, int64_t to) {
    v8 o[MQ][NV];
    for (int x = 0; x < MQ; x++)
      for (int y = 0; y < NV; y++)
        o[x][y] = load(acc + (m + x) * padded + 8 * (i + y)) * splat(fade[m + x]);
    const float* w = score + m * score_stride - base;
    for (int64_t j = from; j < to;) {
      const int64_t end = std::min((j / a.block_tokens + 1) * a.block_tokens, to);
      const T* v = block(a.v_cache, a.v_block_stride, j / a.block_tokens);
      v += j % a.block_tokens * dim;
      for (; j < end; j++, v += dim) {
        v8 part[NV];
        for (int y = 0; y < NV; y++) part[y] = cached(v, i + y);
        for (int x = 0; x < MQ; x++) {
          const v8 weight = splat(w[x * score_stride + j]);
          for (int y = 0; y < NV; y++) o[x][y] += weight * part[y];
        }
      }
    }
    for (int x = 0; x < MQ; x++)
      for (int y = 0; y < NV; y++) store(acc + (m + x) * padded + 8 * (i + y), o[x][y]);
  }

  void weigh(int64_t base, int64_t from, int64_t to) {
    int64_t m = 0;
    for (; m + 4 <= m_count; m += 4) {
      int64_t i = 0;
      for (; i + 2 <= vectors; i += 2) weigh_some<4, 2>(m, i, base, from, to);
      for (; i < vectors; i++) weigh_some<4, 1>(m, i, base, from, to);
    }
    for (; m < m_count; m++) {
      int64_t i = 0;
      for (; i + 8 <= vectors; i += 8) weigh_some<1, 8>(m, i, base, from, to);
      for (; i + 4 <= vectors; i += 4) weigh_some<1, 4>(m, i, base, from, to);
      for (; i < vectors; i++) weigh_some<1, 1>(m, i, base, from, to);
    }
  }

  void start(const Item& item, int64_t head) {
    m_count = item.count * group;
    kv_head = head;
    table = a.block_table + item.row * a.table_stride;
    const int64_t begin = a.query_start[item.row];
    const int64_t tokens = a.query_start[item.row + 1] - begin;
    position = a.context_tokens[item.row] - tokens + item.first;
    const T* q = static_cast<const T*>(a.q) + (begin + item.first) * a.q_stride;
    for (int64_t m = 0; m < m_count; m++) {
      const T* from = q + m / group * a.q_stride + (kv_head * group + m % group) * dim;
      for (int64_t i = 0; i < vectors; i++) {
        store(query + m * padded + 8 * i, cached(from, i));
        store(acc + m * padded + 8 * i, v8{});
      }
      top[m] = kLowest;
      sum[m] = 0.0f;
    }
  }

  void finish(const Item& item) {
    const int64_t begin = a.query_start[item.row] + item.first;
    for (int64_t m = 0; m < m_count; m++) {
      T* out = static_cast<T*>(a.out) +
               ((begin + m / group) * a.heads + kv_head * group + m % group) * dim;
      const v8 total = splat(sum[m]);
      for (int64_t i = 0; i < vectors; i++) {
        const v8 x = load(acc + m * padded + 8 * i) / total;
        if (DIM || 8 * i + 8 <= dim) store(out + 8 * i, x);
        else store_part(out + 8 * i, x, dim - 8 * i);
      }
    }
  }

  void attend(const Item& item, int64_t head) {
    start(item, head);
    const int64_t end = position + item.count;
    const int64_t low = a.window > 0 ? std::max<int64_t>(0, position - a.window + 1) : 0;
    for (int64_t base = low / tile * tile; base < end; base += tile) {
      const int64_t from = std::max(base, low), to = std::min(base + tile, end);
      scores(base, from, to);
      softmax(base, from, to);
      weigh(base, from, to);
    }
    finish(item);
  }
};

template <typename T, int DIM>
void run(const AttentionArgs& a) {
  const int64_t group = a.heads / a.kv_heads;
  const int64_t step = std::max<int64_t>(1, kQueryVectors / group);
  std::vector<Item> items;
  int64_t work = 0;
  for (int64_t row = 0; row < a.rows; row++) {
    const int64_t tokens = a.query_start[row + 1] - a.query_start[row];
    work += tokens * a.context_tokens[row];
    for (int64_t first = 0; first < tokens; first += step)
      items.push_back({int32_t(row), int32_t(first), int32_t(std::min(step, tokens - first))});
  }
  const int64_t count = int64_t(items.size()) * a.kv_heads;
#pragma omp parallel if (work * a.heads * a.head_dim > kParallelWork)
  {
    Attention<T, DIM> attention(a);
    attention.reserve(step * group);
#pragma omp for schedule(dynamic)
    // The last tiles of a row see the most keys: start with them.
    for (int64_t i = count - 1; i >= 0; i--)
      attention.attend(items[i / a.kv_heads], i % a.kv_heads);
  }
}

template <typename T>
void run_dim(const AttentionArgs& a) {
  switch (a.head_dim) {
    case 32: return run<T, 32>(a);
    case 64: return run<T, 64>(a);
    case 128: return run<T, 128>(a);
    default: return run<T, 0>(a);
  }
}

}  // namespace

SWELL_API void swell_paged_attention(const AttentionArgs* a, int is_bf16) {
  if (is_bf16) run_dim<bf16>(*a);
  else run_dim<float>(*a);
}
