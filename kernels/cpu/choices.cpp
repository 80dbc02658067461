// Operations of torch by which routers choose among the last dimension's elements, for recorded calls.
#include "thread_pool.h"
#include "topk.h"

#include <vector>

struct TopkArgs {
  const void* x;     // [rows, vectors, count]
  void* values;      // [rows, vectors, k]
  int64_t* indices;  // [rows, vectors, k]
  int64_t rows, vectors, count, k, is_bf16;
};

// The largest elements, in descending order.
SWELL_API void swell_topk(const TopkArgs* a) {
  const int64_t all = a->rows * a->vectors, bytes = a->is_bf16 ? 2 : 4;
  parallel_for_each(all, all * a->count * 4, [=](int64_t i) {
    static thread_local std::vector<float> x;
    x.resize(a->count);
    copy_as_floats(a->x, a->is_bf16, i * a->count, a->count, x.data());
    int64_t* indices = a->indices + i * a->k;
    pick_top(x.data(), a->count, a->k, indices);
    const char* from = static_cast<const char*>(a->x) + i * a->count * bytes;
    char* to = static_cast<char*>(a->values) + i * a->k * bytes;
    for (int64_t j = 0; j < a->k; j++) std::memcpy(to + j * bytes, from + indices[j] * bytes, bytes);
  });
}

struct ColumnsArgs {
  void* x;                 // [rows, vectors, count]
  const int64_t* indices;  // [rows, vectors, k]
  void* out;               // [rows, vectors, k]; null: `value` is written to x
  int64_t rows, vectors, count, k, item_bytes;
  int64_t value;        // its bytes are those of an element
  int64_t outside, id;  // the number of indices beyond the vectors, and the last of them
};

// Reads the elements of x with these indices, or writes them.
SWELL_API void swell_columns(ColumnsArgs* a) {
  a->outside = 0;
  const int64_t bytes = a->item_bytes;
  for (int64_t i = 0; i < a->rows * a->vectors; i++)
    for (int64_t j = i * a->k; j < (i + 1) * a->k; j++) {
      const int64_t id = a->indices[j];
      if (id < 0 || id >= a->count) {
        a->outside++;
        a->id = id;
        continue;
      }
      char* element = static_cast<char*>(a->x) + (i * a->count + id) * bytes;
      if (a->out)
        std::memcpy(static_cast<char*>(a->out) + j * bytes, element, bytes);
      else
        std::memcpy(element, &a->value, bytes);
    }
}
