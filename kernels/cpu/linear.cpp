// y = x W^T + b, with W packed once.
//
//     W packed [panels][in][kPanel]:  for each k, a panel has kPanel neighbouring outputs
//     tile:  up to kRows rows of x times a block of one panel, with its sums in registers
//            for k of the block:  sum[m][0 .. kPanel) += x[m][k] * W[panel][k][0 .. kPanel)
//            meanwhile a part of the next block is prefetched into the cache
//
// An output is summed over k in blocks of kBlock, one after the other, for any number of rows and
// threads: a row's result has the same bits in every batch. With few rows, reading W takes most of the
// time, and two panels are read at a time, since memory delivers two streams faster than one. With
// many rows, a panel's block stays in the cache while all rows use it.
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "thread_pool.h"
#include "vec.h"

namespace {

constexpr int kRows = kLanes == 16 ? 12 : 6;  // 24 sums of 32 registers, or 12 of 16
constexpr int kPairRows = kRows / 2;  // with at most this many rows, two panels are read at a time
constexpr int64_t kPanel = 2 * kLanes;
constexpr int64_t kBlock = 256;
constexpr int64_t kChunk = 16 * kRows;  // rows that use a panel before the next panel is read
// How many elements ahead of the reading a position is prefetched, in each of P panels.
template <int P>
constexpr int64_t kPrefetch = (P == 1 ? 24 : 8) * kPanel;

constexpr lanes_u lane_numbers() {
  lanes_u numbers{};
  for (int i = 0; i < kLanes; i++) numbers[i] = i;
  return numbers;
}
const lanes_u kLaneNumbers = lane_numbers();

// The start of the prefetched memory, and how far it advances for each k.
template <typename T>
struct Prefetch {
  const T* from;
  int64_t step;
};

// sums [P][kChunk][kPanel] += x [M][count] times w [P][count][kPanel]. The rows of x are x_stride
// apart, the panels of w are `apart`. `first`: sums is still uninitialized.
template <typename T, int P, int M>
void tile(const float* x, int64_t x_stride, const T* w, int64_t apart, int64_t count,
          Prefetch<T> ahead, bool first, float* sums) {
  lanes sum[P][M][2] = {};
  for (int64_t k = 0; k < count; k++)
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) {
      const T *now = w + p * apart + k * kPanel, *later = ahead.from + p * apart + k * ahead.step;
      const lanes w0 = wide(now), w1 = wide(now + kLanes);
      __builtin_prefetch(later, 0, 2);
      __builtin_prefetch(later + kLanes, 0, 2);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        const float factor = x[m * x_stride + k];
        sum[p][m][0] += factor * w0;
        sum[p][m][1] += factor * w1;
      }
    }
#pragma GCC unroll 2
  for (int p = 0; p < P; p++)
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) {
        float* to = sums + (p * kChunk + m) * kPanel + i * kLanes;
        const lanes v = first ? sum[p][m][i] : wide(to) + sum[p][m][i];
        std::memcpy(to, &v, sizeof v);
      }
}

template <typename T>
using Tile = void (*)(const float*, int64_t, const T*, int64_t, int64_t, Prefetch<T>, bool, float*);

template <typename T, int P, int... M>
constexpr std::array<Tile<T>, sizeof...(M)> tiles(std::integer_sequence<int, M...>) {
  return {tile<T, P, M + 1>...};
}
template <typename T, int P>
constexpr auto kTiles = tiles<T, P>(std::make_integer_sequence<int, kRows / P>());

// Consumes a panel's sums by storing them as the outputs from `n` on, in rows that are `stride` apart;
// only the first `width` of the kPanel sums are valid.
template <typename T>
struct Out {
  const T* bias;
  T* y;
  int64_t stride, n, width;

  void take(const float* sums, int64_t first, int64_t rows) const {
    // By value: the compiler must assume that a store through `y` changes the members.
    put(sums, rows, bias ? bias + n : nullptr, y + first * stride + n, stride, width);
  }

 private:
  // If it were inlined into the product's loops, all of them would be 3 % slower.
  [[gnu::noinline]] static void put(const float* sums, int64_t rows, const T* bias, T* y,
                                    int64_t stride, int64_t width) {
    for (int64_t m = 0; m < rows; m++)
      for (int64_t i = 0; i < width; i += 8) {
        v8 v = load(sums + m * kPanel + i);
        const int64_t left = width - i;
        if (bias) v += left >= 8 ? load(bias + i) : load_part(bias + i, left);
        T* to = y + m * stride + i;
        left >= 8 ? store(to, v) : store_part(to, v, left);
      }
  }
};

// Consumes a panel's sums by keeping only the largest one and the first panel that has it, separately
// for each lane of a row; `best` reduces the lanes later. A NaN is never replaced.
template <typename T>
struct ArgmaxOutput {
  struct Row {
    lanes value[2];
    lanes_u panel[2];
  };
  Row* of_row;
  int64_t n, width;

  void take(const float* sums, int64_t first, int64_t rows) const {
    keep(sums, rows, of_row + first, n, width);
  }

 private:
  // If it were inlined into the product's loops, they would be slower.
  [[gnu::noinline]] static void keep(const float* sums, int64_t rows, Row* of_row, int64_t n,
                                     int64_t width) {
    const lanes_u panel = lanes_u{} + uint32_t(n / kPanel);
    float padded[kPanel];
    std::fill_n(padded, kPanel, -INFINITY);
    for (int64_t m = 0; m < rows; m++) {
      const float* from = sums + m * kPanel;
      if (width < kPanel) from = std::copy_n(from, width, padded) - width;
      Row& row = of_row[m];
      for (int i = 0; i < 2; i++) {
        const lanes v = round_wide<T>(wide(from + i * kLanes));
        const auto takes = (v > row.value[i]) | (v != v);
        row.panel[i] = takes ? panel : row.panel[i];
        row.value[i] = takes ? v : row.value[i];
      }
    }
  }
};

struct Best {
  float value = -INFINITY;
  int64_t n = -1;  // the output's index; -1: none yet

  void merge(Best other) {
    if (other.n < 0 || std::isnan(value) || other.value < value) return;
    if (n < 0 || !(other.value <= value) || other.n < n) *this = other;
  }
};

template <typename Row>
Best best(const Row& row) {
  float top = -INFINITY;
  for (int i = 0; i < 2; i++)
    for (int lane = 0; lane < kLanes; lane++) {
      if (std::isnan(row.value[i][lane]))
        return {NAN, int64_t(row.panel[i][lane]) * kPanel + i * kLanes + lane};
      top = std::max(top, row.value[i][lane]);
    }
  uint32_t first = UINT32_MAX;
  for (int i = 0; i < 2; i++) {
    const lanes_u n = row.panel[i] * uint32_t(kPanel) + kLaneNumbers + uint32_t(i * kLanes);
    const lanes_u those = row.value[i] == top ? n : lanes_u{} + UINT32_MAX;
    for (int lane = 0; lane < kLanes; lane++) first = std::min(first, those[lane]);
  }
  return top > -INFINITY ? Best{top, first} : Best{};
}

// Multiplies x [rows][size] by P panels [size][kPanel] that are `apart`, each for one of `outs`.
// `cold`: the beginning of the panels was not prefetched. With two panels there is one tile of rows.
template <typename T, typename Output, size_t P>
void multiply(const float* x, int64_t x_stride, const T* panel, int64_t apart, int64_t rows,
              int64_t size, bool cold, std::array<Output, P> outs) {
  alignas(64) float sums[P * kChunk * kPanel];
  const int64_t tiles = (rows + kRows - 1) / kRows, some = (rows + tiles - 1) / tiles;
  const int64_t step = kPanel / tiles;
  for (int64_t k = 0; k < size; k += kBlock) {
    const int64_t block = std::min(kBlock, size - k);
    const T *w = panel + k * kPanel, *next = w + block * kPanel;
    for (int64_t m = 0; m < rows; m += some) {
      const int64_t count = std::min(some, rows - m);
      // Each tile prefetches a part of the next block. The first tile of a cold panel, and a single
      // tile, prefetch the block that they read, a little ahead of the reading.
      const bool itself = tiles == 1 || (cold && k + m == 0);
      const Prefetch<T> ahead = itself ? Prefetch<T>{w + kPrefetch<P>, kPanel}
                                    : Prefetch<T>{next + m / some * step * block, step};
      float* to = sums + m * kPanel;
      kTiles<T, P>[count - 1](x + m * x_stride + k, x_stride, w, apart, block, ahead, k == 0, to);
      if (k + block < size) continue;
      for (size_t p = 0; p < P; p++) outs[p].take(to + p * kChunk * kPanel, m, count);
    }
  }
}

const float* as_float(const float* x, int64_t, int64_t, int64_t&, std::unique_ptr<float[]>&) {
  return x;
}
// Converts the rows to float32 without gaps, and sets `stride` to their stride.
const float* as_float(const bf16* x, int64_t rows, int64_t size, int64_t& stride,
                      std::unique_ptr<float[]>& memory) {
  const int64_t padded = (size + 7) / 8 * 8;
  memory.reset(new float[rows * padded]);
  for (int64_t m = 0; m < rows; m++)
    for (int64_t k = 0; k < size; k += 8) {
      const bf16* from = x + m * stride + k;
      store(memory.get() + m * padded + k, size - k >= 8 ? load(from) : load_part(from, size - k));
    }
  stride = padded;
  return memory.get();
}

// The split of a product into tasks: a task is one chunk of rows and some panels.
struct Split {
  int64_t panels, chunks, some, groups;

  Split(int64_t rows, int64_t outs)
      : panels((outs + kPanel - 1) / kPanel), chunks((rows + kChunk - 1) / kChunk) {
    const int64_t wanted = std::max<int64_t>(1, kTasks * num_threads() / std::max<int64_t>(1, chunks));
    some = (panels + wanted - 1) / wanted;
    // Makes it even, if every thread still gets two pairs of panels.
    if (rows <= kPairRows && panels >= 4 * num_threads()) some = (some + 1) / 2 * 2;
    groups = (panels + some - 1) / some;
  }
};

// Calls run(m, count, group, each_panel) for each task, which has the rows m .. m + count - 1:
// each_panel(output) multiplies them by the panels of that group.
template <typename T, typename Run>
void products(const T* x, const T* w, int64_t rows, int64_t size, int64_t outs, int64_t x_stride,
              const Split& split, const Run& run) {
  parallel_for(split.chunks * split.groups, rows * size * outs, [&](Tasks& tasks) {
    for (int64_t task; (task = tasks.next()) >= 0;) {
      std::unique_ptr<float[]> memory;
      const int64_t group = task % split.groups;
      const int64_t m = task / split.groups * kChunk, count = std::min(kChunk, rows - m);
      int64_t stride = x_stride;
      const float* from = as_float(x + m * x_stride, count, size, stride, memory);
      const int64_t first = group * split.some, last = std::min(first + split.some, split.panels);
      run(m, count, group, [&](const auto& output) {
        const auto of = [&](int64_t panel) {
          auto its = output;
          its.n = panel * kPanel;
          its.width = std::min(kPanel, outs - its.n);
          return its;
        };
        const int64_t pairs = rows <= kPairRows ? (last - first) / 2 : 0;
        for (int64_t panel = first; panel < first + pairs; panel++)
          multiply(from, stride, w + panel * kPanel * size, pairs * kPanel * size, count, size,
                   panel == first, std::array{of(panel), of(panel + pairs)});
        for (int64_t panel = first + 2 * pairs; panel < last; panel++)
          multiply(from, stride, w + panel * kPanel * size, 0, count, size, panel == first,
                   std::array{of(panel)});
      });
    }
  });
}

template <typename T>
void linear(const T* x, const T* w, const T* bias, T* y, int64_t rows, int64_t size, int64_t outs,
            int64_t x_stride) {
  products(x, w, rows, size, outs, x_stride, Split(rows, outs),
           [=](int64_t m, int64_t, int64_t, const auto& each_panel) {
             each_panel(Out<T>{bias, y + m * outs, outs, 0, 0});
           });
}

template <typename T>
void linear_argmax(const T* x, const T* w, float* values, int64_t* which, int64_t rows, int64_t size,
             int64_t outs, int64_t x_stride) {
  using Row = typename ArgmaxOutput<T>::Row;
  const Split split(rows, outs);
  static thread_local std::vector<Best> parts;
  parts.resize(rows * split.groups);
  Best* of_row = parts.data();
  products(x, w, rows, size, outs, x_stride, split,
           [=](int64_t m, int64_t count, int64_t group, const auto& each_panel) {
             const lanes lowest = lanes{} - INFINITY;
             Row kept[kChunk];
             std::fill_n(kept, count, Row{{lowest, lowest}, {}});
             each_panel(ArgmaxOutput<T>{kept, 0, 0});
             for (int64_t i = 0; i < count; i++)
               of_row[(m + i) * split.groups + group] = best(kept[i]);
           });
  for (int64_t row = 0; row < rows; row++) {
    Best all;
    for (int64_t group = 0; group < split.groups; group++)
      all.merge(of_row[row * split.groups + group]);
    values[row] = all.value;
    which[row] = all.n < 0 ? outs - 1 : all.n;
  }
}

// The elements of a row of W are `panel` apart; 1: W is not packed.
template <typename T>
void embedding(const int64_t* ids, const T* w, T* y, int64_t tokens, int64_t size, int64_t panel) {
  parallel_for_each(tokens, tokens * size * 8, [=](int64_t t) {
    const T* from = w + ids[t] / panel * panel * size + ids[t] % panel;
    if (panel == 1) std::memcpy(y + t * size, from, size * sizeof(T));
    else
      for (int64_t k = 0; k < size; k++) y[t * size + k] = from[k * panel];
  });
}

}  // namespace

struct LinearArgs {
  const void *x, *w, *bias;
  void* y;
  int64_t rows, size, outs, x_stride, is_bf16;
};

struct LinearArgmaxArgs {
  const void *x, *w;
  float* values;
  int64_t *which, rows, size, outs, x_stride, is_bf16;
};

struct EmbeddingArgs {
  const int64_t* ids;
  const void* w;
  void* y;
  int64_t tokens, size, panel, is_bf16;
};

// Returns the number of outputs of one panel.
SWELL_API int64_t swell_linear_panel() { return kPanel; }

SWELL_API void swell_linear(const LinearArgs* a) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    linear(static_cast<const T*>(a->x), static_cast<const T*>(a->w),
           static_cast<const T*>(a->bias), static_cast<T*>(a->y), a->rows, a->size, a->outs,
           a->x_stride);
  };
  a->is_bf16 ? run(bf16{}) : run(float{});
}

SWELL_API void swell_linear_argmax(const LinearArgmaxArgs* a) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    linear_argmax(static_cast<const T*>(a->x), static_cast<const T*>(a->w), a->values, a->which, a->rows,
            a->size, a->outs, a->x_stride);
  };
  a->is_bf16 ? run(bf16{}) : run(float{});
}

SWELL_API void swell_embedding(const EmbeddingArgs* a) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    embedding(a->ids, static_cast<const T*>(a->w), static_cast<T*>(a->y), a->tokens, a->size,
              a->panel);
  };
  a->is_bf16 ? run(bf16{}) : run(float{});
}
