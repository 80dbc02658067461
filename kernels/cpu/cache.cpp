// Copies K and V of a step's tokens into the paged cache. Sizes and strides are in bytes, so any type
// is supported.
#include "thread_pool.h"
#include "vec.h"

struct CacheArgs {
  const char *k, *v;  // tokens k_stride, v_stride apart, heads dense
  char *k_cache, *v_cache;  // [blocks, kv_heads, block_tokens, head]
  const int64_t* slots;
  int64_t tokens, kv_heads, head_bytes, block_tokens;
  int64_t k_stride, v_stride, k_block_stride, v_block_stride;
};

SWELL_API void swell_write_kv(const CacheArgs* args) {
  const CacheArgs a = *args;
  parallel_for_each(a.tokens, a.tokens * a.kv_heads * a.head_bytes / 4, [&a](int64_t t) {
    if (a.slots[t] < 0) return;  // padding
    const int64_t block = a.slots[t] / a.block_tokens, offset = a.slots[t] % a.block_tokens;
    char* to_k = a.k_cache + block * a.k_block_stride + offset * a.head_bytes;
    char* to_v = a.v_cache + block * a.v_block_stride + offset * a.head_bytes;
    const char *k = a.k + t * a.k_stride, *v = a.v + t * a.v_stride;
    for (int64_t h = 0; h < a.kv_heads; h++) {
      const int64_t head = h * a.block_tokens * a.head_bytes;
      std::memcpy(to_k + head, k + h * a.head_bytes, a.head_bytes);
      std::memcpy(to_v + head, v + h * a.head_bytes, a.head_bytes);
    }
  });
}
