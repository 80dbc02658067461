// Vectors of eight floats, or of as many as the widest registers hold, with the compiler's vector
// extensions: one source for AVX2, AVX-512 and NEON. Sums run in a fixed order, so that a result does
// not depend on the tiling of the work.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define SWELL_API extern "C" __attribute__((visibility("default")))
#define SWELL_INLINE inline __attribute__((always_inline))

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));

struct bf16 {
  uint16_t bits;
};

constexpr float kLowest = -3.0e38f;

SWELL_INLINE v8 splat(float x) { return v8{x, x, x, x, x, x, x, x}; }

template <typename V>
SWELL_INLINE V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
// V: floats; Bits and Halves: the same number of uint32_t and uint16_t.
template <typename V, typename Bits, typename Halves>
SWELL_INLINE V widen(const bf16* p) {
  const Bits bits = __builtin_convertvector(load_as<Halves>(p), Bits) << 16;
  return load_as<V>(&bits);
}

SWELL_INLINE v8 load(const float* p) { return load_as<v8>(p); }
SWELL_INLINE v8 load(const bf16* p) { return widen<v8, u8, h8>(p); }

SWELL_INLINE void store(float* p, v8 v) { std::memcpy(p, &v, sizeof v); }
// Rounds to the nearest, ties to even; NaN stays NaN.
SWELL_INLINE void store(bf16* p, v8 v) {
  u8 bits;
  std::memcpy(&bits, &v, sizeof v);
  u8 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  u8 nan = (u8)(v != v);
  rounded = (nan & 0x7fc0u) | (~nan & rounded);
  h8 h = __builtin_convertvector(rounded, h8);
  std::memcpy(p, &h, sizeof h);
}

#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef float lanes __attribute__((vector_size(kLanes * 4)));
typedef uint32_t lanes_u __attribute__((vector_size(kLanes * 4)));
typedef uint16_t lanes_h __attribute__((vector_size(kLanes * 2)));
typedef int32_t lanes_i __attribute__((vector_size(kLanes * 4)));

// kLanes float16 numbers, none of them infinite or NaN, as floats.
SWELL_INLINE lanes widen_half(const void* p) {
#if defined(__AVX512F__)
  return (lanes)_mm512_cvtph_ps(load_as<__m256i>(p));
#elif defined(__F16C__)
  return (lanes)_mm256_cvtph_ps(load_as<__m128i>(p));
#else
  const lanes_u bits = __builtin_convertvector(load_as<lanes_h>(p), lanes_u);
  const lanes_u magnitude = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
  const lanes scaled = load_as<lanes>(&magnitude) * 0x1p112f;
  const lanes_u all = load_as<lanes_u>(&scaled) | sign;
  return load_as<lanes>(&all);
#endif
}

SWELL_INLINE lanes wide(const float* p) { return load_as<lanes>(p); }
SWELL_INLINE lanes wide(const bf16* p) { return widen<lanes, lanes_u, lanes_h>(p); }

// Loads or stores the first n < 8 elements; the others are zero (load), or not written (store).
template <typename T>
SWELL_INLINE v8 load_part(const T* p, int64_t n) {
  T padded[8] = {};
  std::memcpy(padded, p, n * sizeof(T));
  return load(padded);
}
template <typename T>
SWELL_INLINE void store_part(T* p, v8 v, int64_t n) {
  T padded[8];
  store(padded, v);
  std::memcpy(p, padded, n * sizeof(T));
}

// Rounds to T and back, as a sequence of tensor operations would.
template <typename T>
SWELL_INLINE v8 round_to(v8 v) {
  T t[8];
  store(t, v);
  return load(t);
}
template <>
SWELL_INLINE v8 round_to<float>(v8 v) {
  return v;
}

template <typename T>
SWELL_INLINE lanes round_wide(lanes v);
template <>
SWELL_INLINE lanes round_wide<float>(lanes v) {
  return v;
}
template <>
SWELL_INLINE lanes round_wide<bf16>(lanes v) {
  lanes_u bits = load_as<lanes_u>(&v);
  bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  return v == v ? load_as<lanes>(&bits) : v;
}

SWELL_INLINE v8 vmax(v8 a, v8 b) { return a > b ? a : b; }

SWELL_INLINE float hmax(v8 v) {
  float m = v[0];
  for (int i = 1; i < 8; i++) m = v[i] > m ? v[i] : m;
  return m;
}
SWELL_INLINE float hsum(v8 v) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

// Lane i of the result is hsum(a[i]), in the same order of additions.
SWELL_INLINE v8 hsum8(const v8* a) {
#define SWELL_PAIRS(x, y)                                           \
  (__builtin_shufflevector(x, y, 0, 2, 8, 10, 4, 6, 12, 14) +       \
   __builtin_shufflevector(x, y, 1, 3, 9, 11, 5, 7, 13, 15))
  v8 b0 = SWELL_PAIRS(a[0], a[1]), b1 = SWELL_PAIRS(a[2], a[3]);
  v8 b2 = SWELL_PAIRS(a[4], a[5]), b3 = SWELL_PAIRS(a[6], a[7]);
  v8 c0 = SWELL_PAIRS(b0, b1), c1 = SWELL_PAIRS(b2, b3);
#undef SWELL_PAIRS
  return __builtin_shufflevector(c0, c1, 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(c0, c1, 4, 5, 6, 7, 12, 13, 14, 15);
}

// Below this, exp(x) counts as 0: the smallest normal float is exp(-87.34).
constexpr float kExpUnderflow = -87.0f;

// exp(x) for x in [-87.3, 88.3], clamped there: Cephes' expf (Moshier), error below 2 ulp.
SWELL_INLINE v8 vexp(v8 x) {
  x = x < splat(-87.3f) ? splat(-87.3f) : x;
  x = x > splat(88.3f) ? splat(88.3f) : x;
  const v8 magic = splat(12582912.0f);  // 1.5 * 2^23: the sum's low bits hold round(x)
  v8 shifted = x * splat(1.44269504088896341f) + magic;
  v8 n = shifted - magic;
  v8 r = x - n * splat(0.693359375f);
  r = r - n * splat(-2.12194440e-4f);
  v8 y = splat(1.9875691500e-4f);
  y = y * r + splat(1.3981999507e-3f);
  y = y * r + splat(8.3334519073e-3f);
  y = y * r + splat(4.1665795894e-2f);
  y = y * r + splat(1.6666665459e-1f);
  y = y * r + splat(5.0000001201e-1f);
  y = y * (r * r) + (r + splat(1.0f));
  i8 bits, y_bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits <<= 23;  // everything except round(x) is shifted out
  std::memcpy(&y_bits, &y, sizeof y);
  y_bits += bits;
  std::memcpy(&y, &y_bits, sizeof y);
  return y;
}

// tanh(x) = 1 - 2 / (exp(2x) + 1), absolute error about 1e-7.
SWELL_INLINE v8 vtanh(v8 x) {
  return splat(1.0f) - splat(2.0f) / (vexp(x + x) + splat(1.0f));
}
