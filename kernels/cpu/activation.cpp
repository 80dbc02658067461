// silu(gate) * up.
#include "thread_pool.h"
#include "vec.h"

namespace {

template <typename T>
SWELL_INLINE v8 gated(v8 gate, v8 up) {
  return round_to<T>(gate / (splat(1.0f) + vexp(-gate))) * up;
}

template <typename T>
void silu_and_mul(const T* gate_up, T* out, int64_t rows, int64_t size) {
  const int64_t full = size & ~int64_t(7), tail = size - full;
  parallel_for_each(rows, rows * size * 8, [=](int64_t row) {
    const T* gate = gate_up + row * 2 * size;
    const T* up = gate + size;
    T* to = out + row * size;
    for (int64_t i = 0; i < full; i += 8) store(to + i, gated<T>(load(gate + i), load(up + i)));
    if (tail)
      store_part(to + full, gated<T>(load_part(gate + full, tail), load_part(up + full, tail)),
                 tail);
  });
}

}  // namespace

struct ActivationArgs {
  const void* gate_up;
  void* out;
  int64_t rows, size, is_bf16;
};

SWELL_API void swell_silu_and_mul(const ActivationArgs* a) {
  if (a->is_bf16)
    silu_and_mul(static_cast<const bf16*>(a->gate_up), static_cast<bf16*>(a->out), a->rows,
                 a->size);
  else
    silu_and_mul(static_cast<const float*>(a->gate_up), static_cast<float*>(a->out), a->rows,
                 a->size);
}
