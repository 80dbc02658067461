// Rotary embedding in place.
#include "thread_pool.h"
#include "vec.h"

// A fused multiply-add would round once, but the sequence of torch operations rounds twice.
#pragma GCC optimize("fp-contract=off")

namespace {

template <typename T, typename C>
void rope(T* x, const C* cos, const C* sin, int64_t tokens, int64_t heads, int64_t stride,
          int64_t head_dim, int64_t half) {
  parallel_for_each(tokens, tokens * heads * half, [=](int64_t t) {
    for (int64_t h = 0; h < heads; h++) {
      T* a = x + t * stride + h * head_dim;
      T* b = a + half;
      for (int64_t i = 0; i < half; i += 8) {
        const int64_t n = half - i;
        const bool full = n >= 8;
        const v8 c = full ? load(cos + t * half + i) : load_part(cos + t * half + i, n);
        const v8 s = full ? load(sin + t * half + i) : load_part(sin + t * half + i, n);
        const v8 u = full ? load(a + i) : load_part(a + i, n);
        const v8 w = full ? load(b + i) : load_part(b + i, n);
        const v8 uc = u * c, ws = w * s, wc = w * c, us = u * s;
        full ? store(a + i, uc - ws) : store_part(a + i, uc - ws, n);
        full ? store(b + i, wc + us) : store_part(b + i, wc + us, n);
      }
    }
  });
}

}  // namespace

struct RopeArgs {
  void* x;
  const void *cos, *sin;
  int64_t tokens, heads, stride, head_dim, half, is_bf16, cos_bf16;
};

SWELL_API void swell_rope(const RopeArgs* a) {
  const auto run = [&](auto type, auto cos_type) {
    using T = decltype(type);
    using C = decltype(cos_type);
    rope(static_cast<T*>(a->x), static_cast<const C*>(a->cos), static_cast<const C*>(a->sin),
         a->tokens, a->heads, a->stride, a->head_dim, a->half);
  };
  const auto with_cos = [&](auto type) { a->cos_bf16 ? run(type, bf16{}) : run(type, float{}); };
  a->is_bf16 ? with_cos(bf16{}) : with_cos(float{});
}
