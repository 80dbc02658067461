// RMS norm and layer norm, with and without adding the residual first.
#include "thread_pool.h"
#include "vec.h"

namespace {

// x has `outer` groups of `inner` adjacent vectors; the groups are x_stride elements apart. All other
// tensors are contiguous. W: T or float, the type to which the quotient is rounded.
template <typename T, typename W, bool ADD>
void norm(const T* x, const T* residual, const W* weight, T* out, T* total, int64_t outer,
          int64_t inner, int64_t x_stride, int64_t size, float eps) {
  const int64_t full = size & ~int64_t(7), tail = size - full;
  parallel_for_each(outer * inner, outer * inner * size, [=](int64_t row) {
    const T* from = x + row / inner * x_stride + row % inner * size;
    const T* other = residual + row * size;
    T* sum = total + row * size;
    T* to = out + row * size;
    v8 squares[4] = {};
    for (int64_t i = 0; i < size; i += 8) {
      v8 v = i < full ? load(from + i) : load_part(from + i, tail);
      if (ADD) {
        v = round_to<T>(v + (i < full ? load(other + i) : load_part(other + i, tail)));
        i < full ? store(sum + i, v) : store_part(sum + i, v, tail);
      }
      squares[i / 8 % 4] += v * v;
    }
    const float mean = hsum((squares[0] + squares[1]) + (squares[2] + squares[3])) / float(size);
    const v8 inverse = splat(1.0f / std::sqrt(mean + eps));
    const T* again = ADD ? sum : from;
    for (int64_t i = 0; i < full; i += 8)
      store(to + i, load(weight + i) * round_to<W>(load(again + i) * inverse));
    if (tail)
      store_part(to + full, load_part(weight + full, tail) *
                 round_to<W>(load_part(again + full, tail) * inverse), tail);
  });
}

// Vectors are contiguous. The sum is first written to `out`, and normalized there.
template <typename T>
void center_norm(const T* x, const T* residual, const T* weight, const T* bias, T* out, int64_t rows,
                 int64_t size, float eps) {
  const int64_t full = size & ~int64_t(7), tail = size - full;
  const auto at = [=](const T* from, int64_t i) {
    return i < full ? load(from + i) : load_part(from + i, tail);
  };
  const auto put = [=](T* to, int64_t i, v8 v) {
    i < full ? store(to + i, v) : store_part(to + i, v, tail);
  };
  parallel_for_each(rows, rows * size * 2, [=](int64_t row) {
    const T *from = x + row * size, *other = residual + row * size;
    T* to = out + row * size;
    v8 sums[4] = {}, squares[4] = {};
    for (int64_t i = 0; i < size; i += 8) {
      v8 v = at(from, i);
      if (residual) v = round_to<T>(v + at(other, i));
      put(to, i, v);
      sums[i / 8 % 4] += v;
    }
    const float mean = hsum((sums[0] + sums[1]) + (sums[2] + sums[3])) / float(size);
    for (int64_t i = 0; i < full; i += 8) {
      const v8 v = load(to + i) - splat(mean);
      squares[i / 8 % 4] += v * v;
    }
    float variance = hsum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (int64_t i = 0; i < tail; i++) {  // zeros after the end would count as -mean
      const float v = load_part(to + full, tail)[i] - mean;
      variance += v * v;
    }
    const v8 inverse = splat(1.0f / std::sqrt(variance / float(size) + eps));
    for (int64_t i = 0; i < size; i += 8) {
      v8 v = (at(to, i) - splat(mean)) * inverse * at(weight, i);
      if (bias) v += at(bias, i);
      put(to, i, v);
    }
  });
}

}  // namespace

struct LayerNormArgs {
  const void *x, *residual, *weight, *bias;
  void* out;
  int64_t rows, size, is_bf16;
  float eps;
};

SWELL_API void swell_layer_norm(const LayerNormArgs* a) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    center_norm(static_cast<const T*>(a->x), static_cast<const T*>(a->residual),
                static_cast<const T*>(a->weight), static_cast<const T*>(a->bias),
                static_cast<T*>(a->out), a->rows, a->size, a->eps);
  };
  a->is_bf16 ? run(bf16{}) : run(float{});
}

struct NormArgs {
  const void *x, *residual, *weight;
  void *out, *total;
  int64_t outer, inner, x_stride, size, is_bf16, weight_is_bf16;
  float eps;
};

SWELL_API void swell_rms_norm(const NormArgs* a) {
  const auto run = [&](auto type, auto weight_type) {
    using T = decltype(type);
    using W = decltype(weight_type);
    (a->residual ? norm<T, W, true> : norm<T, W, false>)(
        static_cast<const T*>(a->x), static_cast<const T*>(a->residual),
        static_cast<const W*>(a->weight), static_cast<T*>(a->out), static_cast<T*>(a->total),
        a->outer, a->inner, a->x_stride, a->size, a->eps);
  };
  if (!a->is_bf16) return run(float{}, float{});
  a->weight_is_bf16 ? run(bf16{}, bf16{}) : run(bf16{}, float{});
}
