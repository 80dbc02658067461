// The form of a quantized weight, and the arguments of its products.
#pragma once
#ifdef __FMA__
#include <immintrin.h>
#endif

#include "vec.h"

// a * b + c with one rounding, if the processor has an instruction for it. The compiler would choose
// it in most places, but not in all instances of a template.
SWELL_INLINE v8 fused(v8 a, v8 b, v8 c) {
#ifdef __FMA__
  return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
#ifdef __AVX512F__
SWELL_INLINE lanes fused(lanes a, lanes b, lanes c) {
  return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#endif

struct QuantizedForm {
  int64_t bits;         // of an integer: 4 or 8
  int64_t group;        // neighbouring inputs with one scale
  int64_t has_mins;     // otherwise the zero is half of the range
  int64_t wide_scales;  // scales and mins are float32, otherwise float16

  SWELL_INLINE int64_t scale_bytes() const { return wide_scales ? 4 : 2; }
  SWELL_INLINE int64_t block_bytes(int64_t panel) const {
    return panel * (scale_bytes() * (has_mins ? 2 : 1) + group * bits / 8);
  }
  // kLanes scales or mins from number `i` on.
  SWELL_INLINE lanes read(const uint8_t* from, int64_t i) const {
    return wide_scales ? load_as<lanes>(from + i * 4) : widen_half(from + i * 2);
  }
};

struct QuantizedArgs {
  const void *x, *w, *bias;  // x: the ids of an embedding
  void* y;                   // the largest outputs of an argmax
  int64_t* which;            // the places of these
  int64_t rows, size, outs, x_stride, is_bf16;
  QuantizedForm form;
  int64_t integers;  // whether rows of x are quantized, too
};
