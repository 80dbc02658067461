// y[t] += B (A x[t]) for the tokens of several adapters, in one call per layer.
//
//     A packed [in][ranks]:           for each k, all ranks of the layer's matrices, padded to kLanes
//     B packed, one after the other:  [rank][outs] for each matrix that is adapted, outs padded to kStep
//
// A task is up to kTokens tokens of one adapter, which share the loads of A and B. Each sum runs over
// k, or over the ranks, in the same order for any number of tokens: a token's result has the same bits
// in every batch.
#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "thread_pool.h"
#include "vec.h"

namespace {

constexpr int kTokens = kLanes == 16 ? 8 : 4;
constexpr int64_t kStep = 2 * kLanes;

SWELL_INLINE float number(float x) { return x; }
SWELL_INLINE float number(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  return load_as<float>(&bits);
}

// One adapter in one layer; `down` is null if it does not adapt the layer.
struct Adapter {
  const void *down, *up;
  int64_t ranks;     // sum of all matrices' ranks, padded
  int64_t rank[3];   // rank of each matrix; 0: it is not adapted
};

struct Layer {
  const Adapter* adapters;
  int64_t num_adapters, size, parts, outs[3], all_outs;
};

// The rows of M tokens.
template <typename T, int M>
using Rows = std::array<T*, M>;

// h [M][ranks] = x A^T, with M > 1: in a single sum, the compiler may round products and sums separately
// (avoid-fma-max-bits); then the sum would have other bits than together with others.
template <typename T, int M>
void shrink(const Rows<const T, M>& x, const T* down, int64_t size, int64_t ranks, float* h) {
  for (int64_t r = 0; r < ranks; r += kLanes) {
    lanes sum[M] = {};
    for (int64_t k = 0; k < size; k++) {
      const lanes w = wide(down + k * ranks + r);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) sum[m] += number(x[m][k]) * w;
    }
    for (int m = 0; m < M; m++) std::memcpy(h + m * ranks + r, &sum[m], sizeof(lanes));
  }
}

// y [M][first .. first + outs) += h[.][.. rank) B^T; the rows of h are `ranks` apart.
template <typename T, int M>
void expand(const Rows<T, M>& y, const T* up, const float* h, int64_t ranks, int64_t rank,
            int64_t first, int64_t outs) {
  const int64_t padded = (outs + kStep - 1) / kStep * kStep;
  for (int64_t n = 0; n < outs; n += kStep) {
    lanes sum[M][2] = {};
    for (int64_t r = 0; r < rank; r++) {
      const lanes w0 = wide(up + r * padded + n), w1 = wide(up + r * padded + n + kLanes);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const float factor = h[m * ranks + r];
        sum[m][0] += factor * w0;
        sum[m][1] += factor * w1;
      }
    }
    for (int m = 0; m < M; m++) {
      float added[kStep];
      std::memcpy(added, sum[m], sizeof added);
      const int64_t width = std::min(kStep, outs - n);
      for (int64_t i = 0; i < width; i += 8) {
        T* to = y[m] + first + n + i;
        const int64_t left = width - i;
        if (left >= 8) store(to, load(to) + load(added + i));
        else store_part(to, load_part(to, left) + load_part(added + i, left), left);
      }
    }
  }
}

template <typename T, int M>
void add(const Layer& layer, const Adapter& adapter, const T* x, int64_t x_stride, T* y,
         const int64_t* tokens, float* h) {
  constexpr int kShrunk = std::max(M, 2);
  Rows<const T, kShrunk> from;
  Rows<T, M> to;
  for (int m = 0; m < kShrunk; m++) from[m] = x + tokens[m % M] * x_stride;
  for (int m = 0; m < M; m++) to[m] = y + tokens[m] * layer.all_outs;
  shrink<T, kShrunk>(from, static_cast<const T*>(adapter.down), layer.size, adapter.ranks, h);
  const T* up = static_cast<const T*>(adapter.up);
  int64_t first = 0, before = 0;
  for (int64_t p = 0; p < layer.parts; p++) {
    const int64_t rank = adapter.rank[p], outs = layer.outs[p];
    if (rank) expand<T, M>(to, up, h + before, adapter.ranks, rank, first, outs);
    up += rank * ((outs + kStep - 1) / kStep * kStep);
    before += rank;
    first += outs;
  }
}

template <typename T>
using Add = void (*)(const Layer&, const Adapter&, const T*, int64_t, T*, const int64_t*, float*);

template <typename T, int... M>
constexpr std::array<Add<T>, sizeof...(M)> adds(std::integer_sequence<int, M...>) {
  return {add<T, M + 1>...};
}
template <typename T>
constexpr auto kAdds = adds<T>(std::make_integer_sequence<int, kTokens>());

struct Task {
  const Adapter* adapter;
  const int64_t* tokens;
  int64_t count;
};

struct Group {
  int64_t adapter, begin, end;
};

template <typename T>
void add_all(const Layer& layer, const T* x, int64_t x_stride, T* y, const int64_t* tokens,
             const Group* groups, int64_t num_groups) {
  std::vector<Task> tasks;
  int64_t work = 0, most = 0;
  for (const Group* group = groups; group < groups + num_groups; group++) {
    const Adapter* adapter = layer.adapters + group->adapter;
    if (group->adapter >= layer.num_adapters || !adapter->down) continue;
    most = std::max(most, adapter->ranks);
    work += (group->end - group->begin) * adapter->ranks * (layer.size + layer.all_outs);
    for (int64_t i = group->begin; i < group->end; i += kTokens)
      tasks.push_back({adapter, tokens + i, std::min<int64_t>(kTokens, group->end - i)});
  }
  parallel_for(tasks.size(), work, [&](Tasks& mine) {
    std::unique_ptr<float[]> h(new float[kTokens * std::max<int64_t>(most, 1)]);
    for (int64_t i; (i = mine.next()) >= 0;) {
      const Task& task = tasks[i];
      kAdds<T>[task.count - 1](layer, *task.adapter, x, x_stride, y, task.tokens, h.get());
    }
  });
}

}  // namespace

struct LoraArgs {
  const void* x;
  void* y;
  const Layer* layer;
  const int64_t *tokens, *groups;  // groups: their number, then each group
  int64_t rows, x_stride, is_bf16;
};

// The multiples to which A's ranks, and the outputs of each B, are padded.
SWELL_API int64_t swell_lora_rank_step() { return kLanes; }
SWELL_API int64_t swell_lora_out_step() { return kStep; }

SWELL_API void swell_lora(const LoraArgs* a) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    add_all(*a->layer, static_cast<const T*>(a->x), a->x_stride, static_cast<T*>(a->y), a->tokens,
            reinterpret_cast<const Group*>(a->groups + 1), *a->groups);
  };
  a->is_bf16 ? run(bf16{}) : run(float{});
}
