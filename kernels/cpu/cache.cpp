// K and V of a step's tokens into the paged cache. Sizes and strides are in bytes: any type.
#include "vec.h"

// k, v: tokens k_stride, v_stride apart, heads dense. caches [blocks, kv_heads, block_tokens, head].
SWELL_API void swell_write_kv(const char* k, const char* v, char* k_cache, char* v_cache,
                              const int64_t* slots, int64_t tokens, int64_t kv_heads,
                              int64_t head_bytes, int64_t block_tokens, int64_t k_stride,
                              int64_t v_stride, int64_t k_block_stride, int64_t v_block_stride) {
#pragma omp parallel for if (tokens * kv_heads * head_bytes > 4 * kParallelWork)
  for (int64_t t = 0; t < tokens; t++) {
    const int64_t block = slots[t] / block_tokens, offset = slots[t] % block_tokens;
    char* to_k = k_cache + block * k_block_stride + offset * head_bytes;
    char* to_v = v_cache + block * v_block_stride + offset * head_bytes;
    for (int64_t h = 0; h < kv_heads; h++) {
      std::memcpy(to_k + h * block_tokens * head_bytes, k + t * k_stride + h * head_bytes, head_bytes);
      std::memcpy(to_v + h * block_tokens * head_bytes, v + t * v_stride + h * head_bytes, head_bytes);
    }
  }
}
