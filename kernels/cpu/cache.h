// The content of the paged cache: K and V in the type of the model, or quantized, with a scale for each
// vector (see `swell.kernels.attention`).
#pragma once
#include <type_traits>

#include "vec.h"

struct int8 {
  int8_t value;
};
struct float8 {
  uint8_t bits;  // E4M3: sign, 4 bits of the exponent, 3 bits of the fraction
};

typedef int16_t int16_lanes __attribute__((vector_size(kLanes * 2)));
typedef int8_t int8_lanes __attribute__((vector_size(kLanes)));
typedef int16_t int16_v8 __attribute__((vector_size(16)));
typedef int8_t int8_v8 __attribute__((vector_size(8)));
typedef uint8_t byte_v8 __attribute__((vector_size(8)));

template <typename T>
constexpr bool kQuantized = std::is_same_v<T, int8> || std::is_same_v<T, float8>;
// The number in the cache is the loaded one times this, times the vector's scale.
template <typename T>
constexpr float kUnit = std::is_same_v<T, float8> ? 0x1p8f : 1.0f;

// The elements of the scales of n vectors.
template <typename T>
constexpr int64_t scale_elements(int64_t n) {
  return kQuantized<T> ? n * int64_t(sizeof(float)) : 0;
}

// The compiler would widen integers in more steps.
SWELL_INLINE v8 load(const int8* p) {
#ifdef __AVX2__
  return (v8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_set_epi64x(0, load_as<int64_t>(p))));
#else
  const int16_v8 shorts = __builtin_convertvector(load_as<int8_v8>(p), int16_v8);
  return __builtin_convertvector(__builtin_convertvector(shorts, i8), v8);
#endif
}

// A float8 with its bits in the place of a float16's is 2^-8 times as large, for subnormal numbers,
// too. The sign, which is extended and shifted to two places, is kept in one of them.
SWELL_INLINE v8 load(const float8* p) {
  const h8 halves = (h8)(__builtin_convertvector(load_as<int8_v8>(p), int16_v8) << 7) & 0xbfff;
#ifdef __F16C__
  return (v8)_mm256_cvtph_ps(load_as<__m128i>(&halves));
#else
  const u8 magnitude = __builtin_convertvector(halves & 0x7fff, u8) << 13;
  const u8 sign = __builtin_convertvector(halves & 0x8000, u8) << 16;
  const v8 scaled = load_as<v8>(&magnitude) * splat(0x1p112f);
  const u8 all = load_as<u8>(&scaled) | sign;
  return load_as<v8>(&all);
#endif
}

#ifdef __AVX512F__
SWELL_INLINE lanes wide(const int8* p) {
  return (lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(p)));
}
SWELL_INLINE lanes wide(const float8* p) {
  const int16_lanes bits = __builtin_convertvector(load_as<int8_lanes>(p), int16_lanes);
  const lanes_h halves = (lanes_h)(bits << 7) & 0xbfff;
  return widen_half(&halves);
}
#else
SWELL_INLINE lanes wide(const int8* p) { return load(p); }
SWELL_INLINE lanes wide(const float8* p) { return load(p); }
#endif

// Numbers up to the type's limit, rounded to the nearest value; ties to even.
SWELL_INLINE void store(int8* p, v8 v) {
  const v8 shifted = v + splat(12582912.0f);  // see `vexp`
  const i8 integers = load_as<i8>(&shifted) - 0x4b400000;
  const int8_v8 bytes = __builtin_convertvector(integers, int8_v8);
  std::memcpy(p, &bytes, sizeof bytes);
}
SWELL_INLINE void store(float8* p, v8 v) {
  const u8 bits = load_as<u8>(&v), magnitude = bits & 0x7fffffffu;
  const u8 normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  const v8 shifted = load_as<v8>(&magnitude) + splat(0x1p14f);  // its low bits count steps of 2^-9
  const u8 subnormal = load_as<u8>(&shifted) - 0x46800000u;
  const u8 is_small = (u8)(magnitude < 0x3c800000u);  // 2^-6
  const u8 all = (is_small & subnormal) | (~is_small & normal) | (bits >> 24 & 0x80u);
  const byte_v8 bytes = __builtin_convertvector(all, byte_v8);
  std::memcpy(p, &bytes, sizeof bytes);
}

template <typename T>
constexpr float kLimit = std::is_same_v<T, int8> ? 127.0f : 448.0f;

// Stores a vector of `dim` numbers and its scale.
template <typename T, typename X>
void quantize(const X* x, int64_t dim, T* values, char* scale) {
  const auto part = [&](int64_t i) {
    return i + 8 <= dim ? load(x + i) : load_part(x + i, dim - i);
  };
  u8 largest{};
  for (int64_t i = 0; i < dim; i += 8) {
    const v8 v = part(i);
    const u8 bits = load_as<u8>(&v) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  uint32_t top = 0;
  for (int i = 0; i < 8; i++) top = largest[i] > top ? largest[i] : top;
  const float most = load_as<float>(&top);
  const bool is_finite = top < 0x7f800000u, is_zero = most < 0x1p-100f;
  const float own = is_zero ? 0.0f : most / kLimit<T>;
  std::memcpy(scale, &own, sizeof own);
  if (!is_finite || is_zero) {
    std::memset(values, 0, dim);
    return;
  }
  for (int64_t i = 0; i < dim; i += 8) {
    const v8 quotient = part(i) / splat(own);
    if (i + 8 <= dim) store(values + i, quotient);
    else store_part(values + i, quotient, dim - i);
  }
}
