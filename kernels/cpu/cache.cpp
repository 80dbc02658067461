// Writes K and V of a step's tokens into the paged cache: copied, or quantized. Strides are in bytes. A
// copy supports any type.
#include "cache.h"
#include "thread_pool.h"

namespace {

struct CacheArgs {
  const char *k, *v;  // tokens k_stride, v_stride apart, heads dense
  char *k_cache, *v_cache;
  const int64_t* slots;
  int64_t tokens, kv_heads, head_dim, item_bytes, block_tokens;
  int64_t k_stride, v_stride, k_block_stride, v_block_stride;
  int64_t is_int8, is_float8, is_bf16;  // is_bf16: the type of k and v if they are quantized
};

// Calls write(vector, content of its block and head, its index there) for K and V of each token and
// head. `part_bytes`: of one head of a block.
template <typename Write>
void each_vector(const CacheArgs& a, int64_t part_bytes, Write write) {
  const int64_t head_bytes = a.head_dim * a.item_bytes;
  parallel_for_each(a.tokens, a.tokens * a.kv_heads * head_bytes / 4, [&](int64_t t) {
    if (a.slots[t] < 0) return;  // padding
    const int64_t block = a.slots[t] / a.block_tokens, offset = a.slots[t] % a.block_tokens;
    for (int64_t h = 0; h < a.kv_heads; h++) {
      const int64_t from = h * head_bytes, to = h * part_bytes;
      write(a.k + t * a.k_stride + from, a.k_cache + block * a.k_block_stride + to, offset);
      write(a.v + t * a.v_stride + from, a.v_cache + block * a.v_block_stride + to, offset);
    }
  });
}

void copy(const CacheArgs& a) {
  const int64_t head_bytes = a.head_dim * a.item_bytes;
  each_vector(a, a.block_tokens * head_bytes, [=](const char* x, char* part, int64_t offset) {
    std::memcpy(part + offset * head_bytes, x, head_bytes);
  });
}

template <typename T, typename X>
void quantize_all(const CacheArgs& a) {
  const int64_t dim = a.head_dim, scales = a.block_tokens * dim;
  const int64_t part_bytes = scales + scale_elements<T>(a.block_tokens);
  each_vector(a, part_bytes, [=](const char* x, char* part, int64_t offset) {
    quantize(reinterpret_cast<const X*>(x), dim, reinterpret_cast<T*>(part) + offset * dim,
             part + scales + offset * sizeof(float));
  });
}

template <typename T>
void quantize_all_as(const CacheArgs& a) {
  if (a.is_bf16) quantize_all<T, bf16>(a);
  else quantize_all<T, float>(a);
}

}  // namespace

SWELL_API void swell_write_kv(const CacheArgs* args) {
  const CacheArgs a = *args;
  if (a.is_int8) quantize_all_as<int8>(a);
  else if (a.is_float8) quantize_all_as<float8>(a);
  else copy(a);
}
