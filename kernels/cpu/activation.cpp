// Activations, with and without a gate: act(x), and act(gate) * up; and operations with one factor.
#include "activation.h"
#include "thread_pool.h"

namespace {

SWELL_INLINE v8 silu(v8 x) { return x / (splat(1.0f) + vexp(-x)); }

// x * (1 + erf(x / sqrt(2))) / 2 by Abramowitz and Stegun 7.1.26: the error of erf is below 1.5e-7.
SWELL_INLINE v8 gelu(v8 x) {
  const v8 zero = {};
  const v8 z = (x < zero ? -x : x) * splat(0.70710678118654752f);
  const v8 t = splat(1.0f) / (splat(1.0f) + splat(0.3275911f) * z);
  v8 y = splat(1.061405429f);
  y = y * t + splat(-1.453152027f);
  y = y * t + splat(1.421413741f);
  y = y * t + splat(-0.284496736f);
  y = y * t + splat(0.254829592f);
  const v8 rest = splat(0.5f) * x * (y * t * vexp(-z * z));  // x * (1 - erf(|z|)) / 2
  return x < zero ? rest : x - rest;
}

// x * (1 + tanh(u)) / 2 = x / (1 + exp(-2u)) with u = sqrt(2 / pi) * (x + 0.044715 * x^3)
SWELL_INLINE v8 gelu_tanh(v8 x) {
  const v8 u = splat(0.79788456080286536f) * (x + splat(0.044715f) * (x * x * x));
  return x / (splat(1.0f) + vexp(u * splat(-2.0f)));
}

template <typename T, v8 (*ACT)(v8)>
void act(const T* x, T* out, int64_t rows, int64_t size) {
  const int64_t full = size & ~int64_t(7), tail = size - full;
  parallel_for_each(rows, rows * size * 8, [=](int64_t row) {
    const T* from = x + row * size;
    T* to = out + row * size;
    for (int64_t i = 0; i < full; i += 8) store(to + i, ACT(load(from + i)));
    if (tail) store_part(to + full, ACT(load_part(from + full, tail)), tail);
  });
}

template <typename T, v8 (*ACT)(v8)>
void act_and_mul(const T* gate_up, T* out, int64_t rows, int64_t size) {
  const int64_t full = size & ~int64_t(7), tail = size - full;
  parallel_for_each(rows, rows * size * 8, [=](int64_t row) {
    const T* gate = gate_up + row * 2 * size;
    const T* up = gate + size;
    T* to = out + row * size;
    for (int64_t i = 0; i < full; i += 8)
      store(to + i, round_to<T>(ACT(load(gate + i))) * load(up + i));
    if (tail)
      store_part(to + full,
                 round_to<T>(ACT(load_part(gate + full, tail))) * load_part(up + full, tail), tail);
  });
}

template <v8 (*ACT)(v8), bool GATED>
void run(const ActivationArgs* a) {
  const auto typed = [&](auto type) {
    using T = decltype(type);
    (GATED ? act_and_mul<T, ACT> : act<T, ACT>)(static_cast<const T*>(a->x),
                                                static_cast<T*>(a->out), a->rows, a->size);
  };
  a->is_bf16 ? typed(bf16{}) : typed(float{});
}

}  // namespace

SWELL_API void swell_silu_and_mul(const ActivationArgs* a) { run<silu, true>(a); }
SWELL_API void swell_gelu_tanh_and_mul(const ActivationArgs* a) { run<gelu_tanh, true>(a); }
SWELL_API void swell_gelu_and_mul(const ActivationArgs* a) { run<gelu, true>(a); }
SWELL_API void swell_gelu(const ActivationArgs* a) { run<gelu, false>(a); }

struct FactorArgs {
  const void* x;
  void* out;
  int64_t rows, size, is_bf16;
  float factor;
};

namespace {

struct Scale {
  template <typename T>
  static SWELL_INLINE v8 compute(v8 x, v8 factor) {
    return x * round_to<T>(factor);
  }
};

struct Softcap {
  template <typename T>
  static SWELL_INLINE v8 compute(v8 x, v8 cap) {
    return round_to<T>(vtanh(round_to<T>(x / cap))) * cap;
  }
};

template <typename OPERATION>
void with_factor(const FactorArgs* a, int64_t cost) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    const T* x = static_cast<const T*>(a->x);
    T* out = static_cast<T*>(a->out);
    const int64_t size = a->size, full = size & ~int64_t(7), tail = size - full;
    const v8 factor = splat(a->factor);
    parallel_for_each(a->rows, a->rows * size * cost, [=](int64_t row) {
      const T* from = x + row * size;
      T* to = out + row * size;
      for (int64_t i = 0; i < full; i += 8)
        store(to + i, OPERATION::template compute<T>(load(from + i), factor));
      if (tail)
        store_part(to + full, OPERATION::template compute<T>(load_part(from + full, tail), factor),
                   tail);
    });
  };
  a->is_bf16 ? run(bf16{}) : run(float{});
}

}  // namespace

SWELL_API void swell_scale(const FactorArgs* a) { with_factor<Scale>(a, 1); }
SWELL_API void swell_softcap(const FactorArgs* a) { with_factor<Softcap>(a, 8); }
