// Paged attention with online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867), which reads
// K and V directly from the cache.
//
// A work item is some tokens of one row and one KV head. Its query vectors (tokens x group) process
// the keys in tiles, so each K and V is loaded once for all of them.
//
//     keys   0 ....... tile ....... tile ....... position of the last token
//                 |  blocks of the cache |
//     per tile:  scores (q . k)  ->  softmax (new maximum, old sums rescaled)  ->  weighted values (p V)
//
// Tiles start at fixed positions, each sum runs in a fixed order, and a masked key adds an exact
// zero. So the result of a token does not depend on the batch or chunk in which it is computed.
//
// Quantized keys and values are widened in registers. The scales of the keys are applied to the scores,
// and those of the values to the weights.
#include <type_traits>
#include <vector>

#include "attention.h"
#include "thread_pool.h"

namespace {

constexpr int64_t kQueryVectors = 32;  // the most of one item, unless one token has more

// Each loop below is a separate function with arguments by value, which leaves the compiler enough
// registers. DIM is head_dim if it is known at compile time, a multiple of 16; 0: any. A vector of q,
// K or V is read in parts of this type:
template <int DIM>
using Part = std::conditional_t<(DIM > 0), lanes, v8>;
template <int DIM>
constexpr int64_t kPart = sizeof(Part<DIM>) / sizeof(float);

template <typename T, int DIM>
SWELL_INLINE v8 part_8(const T* p, int64_t at, int64_t dim) {
  return DIM || at + 8 <= dim ? load(p + at) : load_part(p + at, dim - at);
}

template <typename T, int DIM>
SWELL_INLINE Part<DIM> part_of(const T* p, int64_t i, int64_t dim) {
  if constexpr (DIM) return wide(p + kLanes * i);
  else return part_8<T, DIM>(p, 8 * i, dim);
}

// A score has 16 sums with a known DIM, and 8 otherwise, on all processors, so that its bits do not
// depend on the width of their vectors. Narrow vectors hold the 16 in two halves:
//
//     sums of parts 0, 2, 4, ...  |  sums of parts 1, 3, 5, ...
template <int DIM>
constexpr int kHalves = DIM > 0 && kLanes == 8 ? 2 : 1;

SWELL_INLINE v8 fold(const v8 (&halves)[1]) { return halves[0]; }
SWELL_INLINE v8 fold(const v8 (&halves)[2]) { return halves[0] + halves[1]; }
#ifdef __AVX512F__
SWELL_INLINE v8 fold(const lanes (&whole)[1]) {
  const lanes v = whole[0];
  return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
         __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
}
#endif

// score[m][j] = q[m] . k[j] for MQ query vectors and `count` neighbouring keys; up to 7 more scores
// are overwritten.
template <typename T, int DIM, int MQ>
__attribute__((noinline)) void score_keys(const float* q, const T* k, const T* later,
                                          int64_t any_dim, int64_t count, float* score,
                                          int64_t score_stride) {
  constexpr int NK = 8 / MQ;
  constexpr int64_t W = kPart<DIM>;
  const int64_t dim = DIM ? DIM : any_dim, parts = (dim + W - 1) / W, padded = parts * W;
  for (int64_t j = 0; j < count; j += NK) {
    prefetch(later ? later + j * dim : nullptr, NK * dim);
    const T* keys[NK];
    for (int n = 0; n < NK; n++) keys[n] = k + std::min(j + n, count - 1) * dim;
    Part<DIM> halves[8][kHalves<DIM>];
    for (int half = 0; half < kHalves<DIM>; half++) {
      Part<DIM> s[8] = {};
      for (int64_t i = half; i < parts; i += kHalves<DIM>) {
        Part<DIM> part[NK];
        for (int n = 0; n < NK; n++) part[n] = part_of<T, DIM>(keys[n], i, dim);
        for (int m = 0; m < MQ; m++) {
          const Part<DIM> x = load_as<Part<DIM>>(q + m * padded + W * i);
          for (int n = 0; n < NK; n++) s[m * NK + n] += x * part[n];
        }
      }
      for (int n = 0; n < 8; n++) halves[n][half] = s[n];
    }
    v8 folded[8];
    for (int n = 0; n < 8; n++) folded[n] = fold(halves[n]);
    float sums[8];
    store(sums, hsum8(folded));
    for (int m = 0; m < MQ; m++) std::memcpy(score + m * score_stride + j, sums + m * NK, NK * 4);
  }
}

// acc[m] += sum_j weight[m][j] v[j] for MQ query vectors, NV parts of v and `count` keys.
template <typename T, int DIM, int MQ, int NV>
__attribute__((noinline)) void accumulate_values(const float* weight, int64_t weight_stride, const T* v,
                                          const T* later, int64_t first, int64_t any_dim,
                                          int64_t count, float* acc) {
  constexpr int64_t W = kPart<DIM>;
  const int64_t dim = DIM ? DIM : any_dim, padded = (dim + W - 1) / W * W;
  Part<DIM> o[MQ][NV];
  for (int m = 0; m < MQ; m++)
    for (int i = 0; i < NV; i++) o[m][i] = load_as<Part<DIM>>(acc + m * padded + W * (first + i));
  for (int64_t j = 0; j < count; j++, v += dim) {
    prefetch(later ? later + j * dim : nullptr, dim);
    Part<DIM> part[NV];
    for (int i = 0; i < NV; i++) part[i] = part_of<T, DIM>(v, first + i, dim);
    for (int m = 0; m < MQ; m++) {
      const float w = weight[m * weight_stride + j];
      for (int i = 0; i < NV; i++) o[m][i] += w * part[i];
    }
  }
  for (int m = 0; m < MQ; m++)
    for (int i = 0; i < NV; i++)
      std::memcpy(acc + m * padded + W * (first + i), &o[m][i], sizeof o[m][i]);
}

// Turns the scores s[begin .. end) into weights; those outside [low, high) become zero. Updates `top`
// and `sum`; returns the factor by which older sums are multiplied.
SWELL_INLINE float softmax_tile(float* s, int64_t begin, int64_t end, int64_t low, int64_t high,
                          float scale, float softcap, float& top, float& sum) {
  const i8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
  const v8 zero = {};
  v8 largest = splat(kLowest);
  for (int64_t j = begin; j < end; j += 8) {
    const i8 index = lanes + int32_t(j);
    const i8 seen = (index >= int32_t(low)) & (index < int32_t(high));
    v8 x = load(s + j) * splat(scale);
    if (softcap > 0) x = splat(softcap) * vtanh(x / splat(softcap));
    x = seen ? x : splat(kLowest);
    store(s + j, x);
    largest = vmax(largest, x);
  }
  const float now = std::max(top, hmax(largest));
  v8 total = {};
  for (int64_t j = begin; j < end; j += 8) {
    const i8 index = lanes + int32_t(j);
    const i8 seen = (index >= int32_t(low)) & (index < int32_t(high));
    const v8 w = seen ? vexp(load(s + j) - splat(now)) : zero;
    store(s + j, w);
    total += w;
  }
  const float fade = vexp(splat(top - now))[0];
  sum = sum * fade + hsum(total);
  top = now;
  return fade;
}

// x[m][j] *= the scale of key j, for `count` keys.
template <typename T>
SWELL_INLINE void apply_scales(const char* scales, int64_t count, float* x, int64_t stride,
                               int64_t m_count) {
  for (int64_t m = 0; m < m_count; m++, x += stride)
    for (int64_t j = 0; j < count; j++)
      x[j] *= load_as<float>(scales + j * sizeof(float)) * kUnit<T>;
}

template <typename T, int DIM>
struct Attention {
  const AttentionArgs& a;
  const int64_t dim = DIM ? DIM : a.head_dim;
  const int64_t parts = (dim + kPart<DIM> - 1) / kPart<DIM>;
  const int64_t padded = parts * kPart<DIM>;
  const int64_t group = a.heads / a.kv_heads;
  const int64_t tile = std::max<int64_t>(1, kTileTokens / a.block_tokens) * a.block_tokens;
  const int64_t score_stride = tile + 16;
  // State of the current item:
  int64_t m_count = 0;  // query vectors, token-major
  KeyRange read;
  BlockIterator<T> ahead;
  std::vector<float> memory;
  float *query = nullptr, *acc = nullptr, *score = nullptr, *top = nullptr, *sum = nullptr;

  explicit Attention(const AttentionArgs& args) : a(args), ahead(args) {}

  void reserve(int64_t m) {
    memory.resize(m * (2 * padded + score_stride + 2));
    query = memory.data();
    acc = query + m * padded;
    score = acc + m * padded;
    top = score + m * score_stride;
    sum = top + m;
  }

  // Calls work(start of the keys, their scales, block to prefetch, first key, number of keys) for each
  // block that contains keys of [from, to).
  template <typename Work>
  SWELL_INLINE void each_block(const void* cache, int64_t stride, int64_t from, int64_t to,
                               Work work) {
    int64_t index = from / a.block_tokens, at = from % a.block_tokens;
    for (; from < to; index++, at = 0) {
      const int64_t count = std::min(a.block_tokens - at, to - from);
      const T *block = read.block<T>(a, cache, stride, index), *later = ahead.next();
      const char* scales = reinterpret_cast<const char*>(block + a.block_tokens * dim);
      work(block + at * dim, scales + at * sizeof(float), later, from, count);
      if (later)
        prefetch(later + count * dim,
                 (a.block_tokens - count) * dim + scale_elements<T>(a.block_tokens));
      from += count;
    }
  }

  // score[m][j - base] = q[m] . k[j] for the keys j of [from, to).
  void scores(int64_t base, int64_t from, int64_t to) {
    const auto work = [&](const T* k, const char* scales, const T* later, int64_t j, int64_t count) {
      float* s = score + (j - base);
      int64_t m = 0;
      const auto some = [&](auto run, int64_t n) {
        for (; m + n <= m_count; m += n)
          run(query + m * padded, k, m ? nullptr : later, dim, count, s + m * score_stride,
              score_stride);
      };
      some(score_keys<T, DIM, 4>, 4);
      some(score_keys<T, DIM, 2>, 2);
      some(score_keys<T, DIM, 1>, 1);
      if (kQuantized<T>) apply_scales<T>(scales, count, s, score_stride, m_count);
    };
    each_block(a.k_cache, a.k_block_stride, from, to, work);
  }

  void softmax(int64_t base, int64_t from, int64_t to) {
    const int64_t begin = (from - base) & ~int64_t(7), end = to - base;
    for (int64_t m = 0; m < m_count; m++) {
      float* s = score + m * score_stride;
      const int64_t p = read.position + m / group;
      const int64_t low = a.window > 0 ? std::max(from, p - a.window + 1) : from;
      const int64_t high = std::min(to, p + 1 + a.lookahead);
      if (low >= high) {
        for (int64_t j = begin; j < end; j += 8) store(s + j, v8{});
        continue;
      }
      const v8 fade = splat(
          softmax_tile(s, begin, end, low - base, high - base, a.scale, a.softcap, top[m], sum[m]));
      for (int64_t i = 0; i < padded; i += 8)
        store(acc + m * padded + i, load(acc + m * padded + i) * fade);
    }
  }

  // acc[m] += sum_j weight[m][j - base] v[j] for the keys j of [from, to).
  void weigh(int64_t base, int64_t from, int64_t to) {
    const auto work = [&](const T* v, const char* scales, const T* later, int64_t j, int64_t count) {
      float* w = score + (j - base);
      if (kQuantized<T>) apply_scales<T>(scales, count, w, score_stride, m_count);
      int64_t m = 0, i = 0;
      const auto some = [&](auto run, int64_t nv) {
        for (; i + nv <= parts; i += nv)
          run(w + m * score_stride, score_stride, v, m + i ? nullptr : later, i, dim, count,
              acc + m * padded);
      };
      for (; m + 4 <= m_count; m += 4, i = 0) {
        if (kPart<DIM> == 16) some(accumulate_values<T, DIM, 4, 4>, 4);  // needs 32 registers
        some(accumulate_values<T, DIM, 4, 2>, 2);
        some(accumulate_values<T, DIM, 4, 1>, 1);
      }
      for (; m + 2 <= m_count; m += 2, i = 0) {
        some(accumulate_values<T, DIM, 2, 4>, 4);
        some(accumulate_values<T, DIM, 2, 1>, 1);
      }
      for (; m < m_count; m++, i = 0) {
        some(accumulate_values<T, DIM, 1, 8>, 8);
        some(accumulate_values<T, DIM, 1, 4>, 4);
        some(accumulate_values<T, DIM, 1, 1>, 1);
      }
    };
    each_block(a.v_cache, a.v_block_stride, from, to, work);
  }

  template <typename X>
  void start(const WorkItem& item) {
    m_count = item.count * group;
    read = KeyRange(a, item);
    const X* q = static_cast<const X*>(a.q) + (a.query_start[item.row] + item.first) * a.q_stride;
    for (int64_t m = 0; m < m_count; m++) {
      const X* from = q + m / group * a.q_stride + (item.head * group + m % group) * dim;
      for (int64_t i = 0; i < padded; i += 8) {
        store(query + m * padded + i, part_8<X, DIM>(from, i, dim));
        store(acc + m * padded + i, v8{});
      }
      top[m] = kLowest;
      sum[m] = 0.0f;
    }
  }

  template <typename X>
  void finish(const WorkItem& item) {
    const int64_t begin = a.query_start[item.row] + item.first;
    for (int64_t m = 0; m < m_count; m++) {
      X* out = static_cast<X*>(a.out) +
               ((begin + m / group) * a.heads + item.head * group + m % group) * dim;
      const v8 total = splat(sum[m]);
      for (int64_t i = 0; i < padded; i += 8) {
        const v8 x = load(acc + m * padded + i) / total;
        if (DIM || i + 8 <= dim) store(out + i, x);
        else store_part(out + i, x, dim - i);
      }
    }
  }

  // `next`: the item that this thread computes after this one, if known.
  void attend(const WorkItem& item, const WorkItem* next) {
    if (a.is_bf16) start<bf16>(item);
    else start<float>(item);
    ahead.follow(item, next);
    for (int64_t base = read.base; base < read.end; base += read.tile) {
      const int64_t from = std::max(base, read.low), to = std::min(base + read.tile, read.end);
      scores(base, from, to);
      softmax(base, from, to);
      weigh(base, from, to);
    }
    if (a.is_bf16) finish<bf16>(item);
    else finish<float>(item);
  }
};

template <typename T, int DIM>
void run(const AttentionArgs& a) {
  const int64_t group = a.heads / a.kv_heads;
  const int64_t step = std::max<int64_t>(1, kQueryVectors / group);
  std::vector<WorkItem> items;
  int64_t work = 0;
  for (int64_t row = 0; row < a.rows; row++) {
    const int64_t tokens = a.query_start[row + 1] - a.query_start[row];
    work += tokens * a.context_tokens[row];
    for (int64_t first = 0; first < tokens; first += step)
      for (int64_t head = 0; head < a.kv_heads; head++)
        items.push_back({int32_t(row), int32_t(first), int32_t(std::min(step, tokens - first)),
                         int32_t(head)});
  }
  const int64_t count = items.size();
  parallel_for(count, work * a.heads * a.head_dim, [&](Tasks& tasks) {
    Attention<T, DIM> attention(a);
    attention.reserve(step * group);
    int64_t left = count;
    // The last tokens of a row attend to the most keys: start with them.
    const auto take = [&]() -> const WorkItem* {
      const int64_t task = tasks.next();
      if (task < 0) return nullptr;
      left = count - 1 - task;
      return &items[left];
    };
    for (const WorkItem* item = take(); item;) {
      // A thread claims the next item early to prefetch its keys. Near the end, threads claim only one
      // item at a time, so that all of them have work.
      const WorkItem* next = left > 2 * num_threads() ? take() : nullptr;
      attention.attend(*item, next);
      item = next ? next : take();
    }
  });
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

SWELL_API void swell_paged_attention(const AttentionArgs* a) {
  if (a->is_int8) run_dim<int8>(*a);
  else if (a->is_float8) run_dim<float8>(*a);
  else if (a->is_bf16) run_dim<bf16>(*a);
  else run_dim<float>(*a);
}
