// y = x W^T + b, with W packed once, in the type of x: [panels][in / S][kPanel][S] (see products.h).
#include "products.h"

namespace {

// Multiplies rows of x by panels of W.
template <typename T>
class PackedRows {
 public:
  PackedRows(const T* x, int64_t x_stride, int64_t rows, int64_t size, const T* w)
      : rows_(x, x_stride, rows, size), count_(rows), size_(padded<T>(size)), w_(w) {}

  template <typename Output, size_t P>
  void operator()(int64_t panel, int64_t apart, bool cold, std::array<Output, P> outs) const {
    const int64_t panel_size = kPanel * size_;
    multiply(rows_.from, rows_.stride, w_ + panel * panel_size, apart * panel_size, count_, size_, cold,
             outs);
  }

 private:
  Rows<T> rows_;
  int64_t count_, size_;
  const T* w_;
};

// Multiplies R rows of x by some of four rows of W, which is not packed. A sum has eight parts, for
// every eighth k, on all processors.
template <typename T, int R>
void dot_products(const T* x, int64_t x_stride, const T* w, int64_t size, int64_t some, T* y,
                  int64_t y_stride) {
  v8 sums[R][4] = {};
  const auto add = [&](const auto& read) {
    v8 rows[R];
    for (int r = 0; r < R; r++) rows[r] = read(x + r * x_stride);
    for (int o = 0; o < 4; o++) {
      const v8 weights = read(w + std::min<int64_t>(o, some - 1) * size);
      for (int r = 0; r < R; r++) sums[r][o] = fused(rows[r], weights, sums[r][o]);
    }
  };
  const int64_t full = size & ~int64_t(7), tail = size - full;
  for (int64_t k = 0; k < full; k += 8) add([=](const T* from) { return load(from + k); });
  if (tail) add([=](const T* from) { return load_part(from + full, tail); });
  for (int r = 0; r < R; r++) {
    v8 all = {};
    for (int o = 0; o < 4; o++) all[o] = hsum(sums[r][o]);
    store_part(y + r * y_stride, all, some);
  }
}

// `panel`: the number of outputs of one panel; 1: W is not packed.
template <typename T>
void embedding(const int64_t* ids, const T* w, T* y, int64_t tokens, int64_t size, int64_t panel) {
  parallel_for_each(tokens, tokens * size * 8, [=](int64_t t) {
    if (panel == 1) {
      std::memcpy(y + t * size, w + ids[t] * size, size * sizeof(T));
      return;
    }
    constexpr int64_t S = kStep<T>;
    const T* from = w + ids[t] / panel * panel * padded<T>(size) + ids[t] % panel * S;
    for (int64_t k = 0; k < size; k++) y[t * size + k] = from[k / S * S * panel + k % S];
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

// Returns the numerics class of this library: what the bits of its results depend on (see
// `swell.kernels.linear.numerics`).
#define SWELL_TEXT_OF(x) #x
#define SWELL_TEXT(x) SWELL_TEXT_OF(x)
SWELL_API const char* swell_numerics() {
#if defined(__x86_64__)
#define SWELL_PROCESSOR "x86_64"
#elif defined(__aarch64__)
#define SWELL_PROCESSOR "aarch64"
#else
#define SWELL_PROCESSOR "other"
#endif
#if defined(__FMA__) || defined(__aarch64__)
#define SWELL_ROUNDING "-fma"
#else
#define SWELL_ROUNDING ""
#endif
#if defined(__clang__)
#define SWELL_COMPILER "-clang" SWELL_TEXT(__clang_major__)
#else
#define SWELL_COMPILER "-gcc" SWELL_TEXT(__GNUC__)
#endif
  return SWELL_PROCESSOR SWELL_ROUNDING SWELL_COMPILER;
}

// Returns the number of outputs of one panel.
SWELL_API int64_t swell_linear_panel() { return kPanel; }

// Calls compute(type, reader) for the type of x; see `product_task` for the reader.
template <typename Args, typename Compute>
static void run(const Args* a, const Compute& compute) {
  const auto typed = [&](auto type) {
    using T = decltype(type);
    const auto x = static_cast<const T*>(a->x), w = static_cast<const T*>(a->w);
    compute(type, [=](int64_t m, int64_t count) {
      return PackedRows<T>(x + m * a->x_stride, a->x_stride, count, a->size, w);
    });
  };
  a->is_bf16 ? typed(bf16{}) : typed(float{});
}

SWELL_API void swell_linear(const LinearArgs* a) {
  run(a, [=](auto type, const auto& reader) {
    using T = decltype(type);
    outputs(static_cast<const T*>(a->bias), static_cast<T*>(a->y), a->rows, a->size, a->outs, reader);
  });
}

void grouped_linear(const GroupedRows& g) {
  const auto typed = [&](auto type) {
    using T = decltype(type);
    grouped_outputs<T>(g, [&](const void* w, int64_t m, int64_t count) {
      const T* x = static_cast<const T*>(g.x) + m * g.size;
      return PackedRows<T>(x, g.size, count, g.size, static_cast<const T*>(w));
    });
  };
  g.is_bf16 ? typed(bf16{}) : typed(float{});
}

SWELL_API void swell_linear_argmax(const LinearArgmaxArgs* a) {
  run(a, [=](auto type, const auto& reader) {
    largest_outputs<decltype(type)>(a->values, a->which, a->rows, a->size, a->outs, reader);
  });
}

struct PlainLinearArgs {
  const void *x, *w;  // [rows, size], [outs, size]
  void* y;
  int64_t rows, size, outs, x_stride, is_bf16;
};

SWELL_API void swell_plain_linear(const PlainLinearArgs* a) {
  const auto typed = [&](auto type) {
    using T = decltype(type);
    const auto x = static_cast<const T*>(a->x), w = static_cast<const T*>(a->w);
    T* y = static_cast<T*>(a->y);
    parallel_for_each((a->outs + 3) / 4, a->rows * a->size * a->outs, [=](int64_t block) {
      const int64_t n = block * 4, some = std::min<int64_t>(4, a->outs - n);
      const T* from = w + n * a->size;
      for (int64_t m = 0; m < a->rows; m += 2)
        (m + 1 < a->rows ? dot_products<T, 2> : dot_products<T, 1>)(
            x + m * a->x_stride, a->x_stride, from, a->size, some, y + m * a->outs + n, a->outs);
    });
  };
  a->is_bf16 ? typed(bf16{}) : typed(float{});
}

SWELL_API void swell_embedding(const EmbeddingArgs* a) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    embedding(a->ids, static_cast<const T*>(a->w), static_cast<T*>(a->y), a->tokens, a->size,
              a->panel);
  };
  a->is_bf16 ? run(bf16{}) : run(float{});
}

struct TableRowsArgs {
  const int64_t* ids;
  int64_t* rows;
  const int64_t* current;  // the number of rows of the table in this step; null: it is `count`
  int64_t tokens, wraps, count;
  int64_t outside, id;  // the number of ids outside the table, and the last of them
};

// Rows of a table; 0 for an id outside it. `wraps`: negative ids count from the end.
SWELL_API void swell_table_rows(TableRowsArgs* a) {
  if (a->current) a->count = *a->current;
  a->outside = 0;
  for (int64_t t = 0; t < a->tokens; t++) {
    const int64_t id = a->ids[t], row = a->wraps && id < 0 ? id + a->count : id;
    const bool is_inside = row >= 0 && row < a->count;
    a->rows[t] = is_inside ? row : 0;
    if (is_inside) continue;
    a->outside++;
    a->id = id;
  }
}

struct LocalIdsArgs {
  const int64_t* ids;
  int64_t *local, tokens, start, count;
};

// Ids within a part of `count` rows; 0 for an id of another part.
SWELL_API void swell_local_ids(const LocalIdsArgs* a) {
  for (int64_t t = 0; t < a->tokens; t++) {
    const int64_t id = a->ids[t] - a->start;
    a->local[t] = id >= 0 && id < a->count ? id : 0;
  }
}

struct ZeroRowsArgs {
  const int64_t* ids;
  void* y;  // [tokens, row_bytes]
  int64_t tokens, start, count, row_bytes;
};

// Clears the rows whose ids are of another part.
SWELL_API void swell_zero_rows(const ZeroRowsArgs* a) {
  for (int64_t t = 0; t < a->tokens; t++) {
    const int64_t id = a->ids[t] - a->start;
    if (id < 0 || id >= a->count)
      std::memset(static_cast<uint8_t*>(a->y) + t * a->row_bytes, 0, a->row_bytes);
  }
}

struct PickLargestArgs {
  const float* values;     // [rows, parts]
  const int64_t* indices;  // [rows, parts], within the parts
  float* largest;
  int64_t *which, rows, parts, part;
};

SWELL_API void swell_pick_largest(const PickLargestArgs* a) {
  for (int64_t r = 0; r < a->rows; r++) {
    const float* values = a->values + r * a->parts;
    int64_t best = 0;
    for (int64_t p = 1; p < a->parts; p++)
      if (values[p] > values[best] || (values[p] != values[p] && values[best] == values[best])) best = p;
    a->largest[r] = values[best];
    a->which[r] = a->indices[r * a->parts + best] + best * a->part;
  }
}
