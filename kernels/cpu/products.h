// Products with weights in panels of neighbouring outputs: tiles of rows, the split into tasks, and the
// consumers of the sums. Users: linear.cpp (weights in the type of x), quantized.cpp.
//
//     panel: for S neighbouring k, kPanel neighbouring outputs: [in / S][kPanel][S]. S is 1 for
//            float32, and 2 for bfloat16, where `in` is padded with zeros.
//     tile:  up to kRows rows of x times a block of one panel, with its sums in registers
//            for k of the block:  sum[m][0 .. kPanel) += x[m][k] * W[panel][k][0 .. kPanel)
//            meanwhile a part of the next block is prefetched into the cache
//
// The second of two bfloat16 products is added before the first one, each with one rounding, because
// `vdpbf16ps` does so. Processors without it widen both numbers to float32, and find the same bits,
// except that the instruction takes subnormal numbers for zero.
//
// An output is summed over k in blocks of kBlock, one after the other, for any number of rows and
// threads: a row's result has the same bits in every batch. With few rows, reading W takes most of the
// time, and two panels are read at a time, since memory delivers two streams faster than one. With
// many rows, a panel's block stays in the cache while all rows use it.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "grouped.h"
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

// How tiles read W: in kPasses passes, `Weights<T>` adds the products of kStep neighbouring k of one
// panel with those of a row of x to the row's sums. `Input`: the type of x in tiles.
template <typename T>
struct Weights;

template <>
struct Weights<float> {
  using Input = float;
  static constexpr int64_t kStep = 1;
  static constexpr int kPasses = 1;
  lanes w[2];

  SWELL_INLINE Weights(const float* p, int) : w{wide(p), wide(p + kLanes)} {}
  SWELL_INLINE void add(lanes* sums, const float* x) const {
    const float factor = *x;
    sums[0] += factor * w[0];
    sums[1] += factor * w[1];
  }
};

#ifdef __AVX512BF16__
template <>
struct Weights<bf16> {
  using Input = bf16;
  static constexpr int64_t kStep = 2;
  static constexpr int kPasses = 1;
  __m512bh w[2];

  SWELL_INLINE Weights(const bf16* p, int)
      : w{load_as<__m512bh>(p), load_as<__m512bh>(p + 2 * kLanes)} {}
  SWELL_INLINE void add(lanes* sums, const bf16* x) const {
    const auto factors = (__m512bh)_mm512_set1_epi32(load_as<int>(x));
    sums[0] = (lanes)_mm512_dpbf16_ps((__m512)sums[0], w[0], factors);
    sums[1] = (lanes)_mm512_dpbf16_ps((__m512)sums[1], w[1], factors);
  }
};
#else
template <>
struct Weights<bf16> {
  using Input = float;
  static constexpr int64_t kStep = 2;
  static constexpr int kPasses = 2;
  int second;  // 1: the second of the two k; 0: the first
  lanes w[2];

  SWELL_INLINE Weights(const bf16* p, int pass) : second(1 - pass) {
    for (int i = 0; i < 2; i++) {
      const lanes_u pairs = load_as<lanes_u>(p + i * 2 * kLanes);
      const lanes_u bits = second ? pairs & 0xffff0000u : pairs << 16;
      w[i] = load_as<lanes>(&bits);
    }
  }
  SWELL_INLINE void add(lanes* sums, const float* x) const {
    const float factor = x[second];
    sums[0] += factor * w[0];
    sums[1] += factor * w[1];
  }
};
#endif

template <typename T>
constexpr int64_t kStep = Weights<T>::kStep;

// Returns `size` inputs with the padding of W.
template <typename T>
constexpr int64_t padded(int64_t size) {
  return (size + kStep<T> - 1) / kStep<T> * kStep<T>;
}

// The start of the prefetched memory, and how far it advances for each k.
template <typename T>
struct Prefetch {
  const T* from;
  int64_t step;
};

// sums [P][kChunk][kPanel] += x [M][count] times w [P][count][kPanel]. The rows of x are x_stride
// apart, the panels of w are `apart`. `first`: sums is still uninitialized.
template <typename T, int P, int M>
void tile(const typename Weights<T>::Input* x, int64_t x_stride, const T* w, int64_t apart,
          int64_t count, Prefetch<T> ahead, bool first, float* sums) {
  lanes sum[P][M][2] = {};
  for (int64_t k = 0; k < count; k += kStep<T>)
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) {
      const T *now = w + p * apart + k * kPanel, *later = ahead.from + p * apart + k * ahead.step;
      __builtin_prefetch(later, 0, 2);
      __builtin_prefetch(later + kStep<T> * kLanes, 0, 2);
#pragma GCC unroll 2
      for (int pass = 0; pass < Weights<T>::kPasses; pass++) {
        const Weights<T> weights(now, pass);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) weights.add(sum[p][m], x + m * x_stride + k);
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
using Tile = void (*)(const typename Weights<T>::Input*, int64_t, const T*, int64_t, int64_t,
                      Prefetch<T>, bool, float*);

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

// Like `Out`, for rows whose places in y are `at`.
template <typename T>
struct ScatteredOut {
  T* y;
  const int64_t* at;
  int64_t stride, n, width;

  void take(const float* sums, int64_t first, int64_t rows) const {
    for (int64_t m = 0; m < rows; m++)
      Out<T>{nullptr, y + at[first + m] * stride, stride, n, width}.take(sums + m * kPanel, 0, 1);
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

// Multiplies x [rows][size] by P panels [size][kPanel] that are `apart`, each for one of `outs`; `size`
// includes the padding. `cold`: the beginning of the panels was not prefetched. With two panels there
// is one tile of rows.
template <typename T, typename Output, size_t P>
void multiply(const typename Weights<T>::Input* x, int64_t x_stride, const T* panel, int64_t apart, int64_t rows,
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

inline void copy_row(const float* x, float* to, int64_t size) { std::copy_n(x, size, to); }
inline void copy_row(const bf16* x, bf16* to, int64_t size) { std::copy_n(x, size, to); }
inline void copy_row(const bf16* x, float* to, int64_t size) {
  int64_t k = 0;
  for (; k + 8 <= size; k += 8) store(to + k, load(x + k));
  if (k < size) store_part(to + k, load_part(x + k, size - k), size - k);
}

// The rows of x as tiles read them: as `Input`, and with the padding of W.
template <typename T, typename Input = typename Weights<T>::Input>
class Rows {
 public:
  Rows(const T* x, int64_t stride, int64_t rows, int64_t size) : stride(stride) {
    if constexpr (std::is_same_v<T, Input>)
      if (size == padded<T>(size)) {
        from = x;
        return;
      }
    this->stride = padded<T>(size);
    memory_.reset(new Input[rows * this->stride]);
    for (int64_t m = 0; m < rows; m++) {
      Input* row = memory_.get() + m * this->stride;
      copy_row(x + m * stride, row, size);
      std::fill(row + size, row + this->stride, Input{});
    }
    from = memory_.get();
  }

  const Input* from;
  int64_t stride;

 private:
  std::unique_ptr<Input[]> memory_;
};

constexpr int64_t chunks_of(int64_t rows) { return (rows + kChunk - 1) / kChunk; }

// The split of a product into tasks: a task is one chunk of rows and some panels. `all_chunks`: the
// chunks of all products that are computed together.
struct Split {
  int64_t panels, chunks, some, groups;

  Split(int64_t rows, int64_t outs) : Split(rows, outs, chunks_of(rows)) {}
  Split(int64_t rows, int64_t outs, int64_t all_chunks)
      : panels((outs + kPanel - 1) / kPanel), chunks(chunks_of(rows)) {
    const int64_t wanted =
        std::max<int64_t>(1, kTasks * num_threads() / std::max<int64_t>(1, all_chunks));
    some = (panels + wanted - 1) / wanted;
    // Makes it even, if every thread still gets two pairs of panels.
    if (rows <= kPairRows && panels >= 4 * num_threads()) some = (some + 1) / 2 * 2;
    groups = (panels + some - 1) / some;
  }
  int64_t tasks() const { return chunks * groups; }
};

// Calls run(m, count, group, each_panel) for one task, which has the rows m .. m + count - 1:
// each_panel(output) multiplies them by the panels of that group. `reader(m, count)` returns the
// function that multiplies these rows by one panel, or by two that are `apart`: it is called with
// (panel, apart, whether the panel's beginning was not prefetched, outputs).
template <typename Reader, typename Run>
SWELL_INLINE void product_task(int64_t task, int64_t rows, int64_t outs, const Split& split,
                               const Reader& reader, const Run& run) {
  const int64_t group = task % split.groups;
  const int64_t m = task / split.groups * kChunk, count = std::min(kChunk, rows - m);
  const auto multiply_panels = reader(m, count);
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
      multiply_panels(panel, pairs, panel == first, std::array{of(panel), of(panel + pairs)});
    for (int64_t panel = first + 2 * pairs; panel < last; panel++)
      multiply_panels(panel, 0, panel == first, std::array{of(panel)});
  });
}

// Computes all tasks of a product; see `product_task`.
template <typename Reader, typename Run>
void products(int64_t rows, int64_t size, int64_t outs, const Split& split, const Reader& reader,
              const Run& run) {
  parallel_for(split.tasks(), rows * size * outs, [&](Tasks& tasks) {
    for (int64_t task; (task = tasks.next()) >= 0;)
      product_task(task, rows, outs, split, reader, run);
  });
}

// y [rows][outs] = the products and the bias, if it is not null.
template <typename T, typename Reader>
void outputs(const T* bias, T* y, int64_t rows, int64_t size, int64_t outs, const Reader& reader) {
  products(rows, size, outs, Split(rows, outs), reader,
           [=](int64_t m, int64_t, int64_t, const auto& each_panel) {
             each_panel(Out<T>{bias, y + m * outs, outs, 0, 0});
           });
}

// Products of groups of rows with different weights. `reader(weight, m, count)` returns the function
// that multiplies the rows m .. m + count - 1 of x by panels of the weight.
template <typename T, typename Reader>
void grouped_outputs(const GroupedRows& g, const Reader& reader) {
  struct Tasked {
    int64_t first;  // the number of its first task
    Split split;
  };
  static thread_local std::vector<Tasked> kept;
  int64_t chunks = 0, tasks = 0;
  for (int64_t i = 0; i < g.groups; i++) chunks += chunks_of(g.rows_of(i));
  kept.clear();
  for (int64_t i = 0; i < g.groups; i++) {
    kept.push_back({tasks, Split(g.rows_of(i), g.outs, chunks)});
    tasks += kept.back().split.tasks();
  }
  const Tasked *begin = kept.data(), *end = begin + g.groups;
  T* y = static_cast<T*>(g.y);
  parallel_for(tasks, g.starts[g.groups] * g.size * g.outs, [&](Tasks& claimed) {
    for (int64_t task; (task = claimed.next()) >= 0;) {
      const auto after = [](int64_t number, const Tasked& each) { return number < each.first; };
      const Tasked& own = *(std::upper_bound(begin, end, task, after) - 1);
      const int64_t i = &own - begin, start = g.starts[i];
      const auto of_group = [&](int64_t m, int64_t count) {
        return reader(g.weights[i], start + m, count);
      };
      product_task(task - own.first, g.rows_of(i), g.outs, own.split, of_group,
                   [&](int64_t m, int64_t, int64_t, const auto& each_panel) {
                     if (g.at)
                       each_panel(ScatteredOut<T>{y, g.at + start + m, g.outs, 0, 0});
                     else
                       each_panel(Out<T>{nullptr, y + (start + m) * g.outs, g.outs, 0, 0});
                   });
    }
  });
}

// The largest of the products of each row, rounded to T, and the first output that has it.
template <typename T, typename Reader>
void largest_outputs(float* values, int64_t* which, int64_t rows, int64_t size, int64_t outs,
                     const Reader& reader) {
  using Row = typename ArgmaxOutput<T>::Row;
  const Split split(rows, outs);
  static thread_local std::vector<Best> parts;
  parts.resize(rows * split.groups);
  Best* of_row = parts.data();
  products(rows, size, outs, split, reader,
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

}  // namespace
