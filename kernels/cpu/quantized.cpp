// y = x W^T + b, with W quantized: groups of neighbouring inputs of an output share a scale.
//
//     W packed [panels][groups] blocks:  scales [kPanel] | mins [kPanel], if there are any | words
//     words    [group / n][kPanel] of 32 bits: n = 4 inputs of 8 bits, the first in the lowest byte;
//              or n = 8 inputs of 4 bits, the first four in the low halves of the bytes
//     weight   integer * scale + min, or (integer - zero) * scale, where zero is half of the range
//
// Products are computed in one of two ways:
//
//   exact  weights are dequantized to the type of x, with one rounding. So a result has the bits of
//          `linear` with the dequantized weight. Few rows use them in registers, many rows share a
//          block of them in the cache.
//   int8   each group of a row is quantized to integers of 8 bits and a scale. Sums of products of
//          integers are exact; they are scaled and added group by group, in one order. So a result
//          has the same bits on all processors, although only some have an instruction for such sums.
#include "quantized.h"

#include <optional>

#include "products.h"

namespace {

constexpr int kDotRows = kLanes == 16 ? 6 : 2;
// How many bytes ahead of the reading a position is prefetched, in each of P panels.
template <int P>
constexpr int64_t kBytesAhead = P == 1 ? 3072 : 1536;

// One panel, or P panels that are `apart`.
struct Panels {
  Panels(const QuantizedForm& form, const void* w, int64_t size, int64_t panel, int64_t apart)
      : form(form), bytes(form.block_bytes(kPanel)) {
    const int64_t panel_bytes = size / form.group * bytes;
    data = static_cast<const uint8_t*>(w) + panel * panel_bytes;
    this->apart = apart * panel_bytes;
  }
  const uint8_t* block(int64_t group) const { return data + group * bytes; }

  QuantizedForm form;
  int64_t bytes;  // of a block
  const uint8_t* data;
  int64_t apart;
};

// The parts of a block.
template <int Bits>
struct Block {
  static constexpr int64_t kInputs = 32 / Bits;  // of a word
  static constexpr float kZero = 1 << (Bits - 1);

  SWELL_INLINE Block(const uint8_t* from, const QuantizedForm& form) {
    const int64_t numbers = form.scale_bytes() * kPanel;
    for (int i = 0; i < 2; i++) {
      scale[i] = form.read(from, i * kLanes);
      if (form.has_mins) min[i] = form.read(from + numbers, i * kLanes);
    }
    words = from + numbers * (form.has_mins ? 2 : 1);
  }
  SWELL_INLINE const uint8_t* word(int64_t i) const { return words + i * kPanel * 4; }

  lanes scale[2], min[2];
  const uint8_t* words;
};

// Input j of the words `v`, as weights that are rounded to T. `offset`: the weight of the integer 0.
template <typename T, int Bits>
SWELL_INLINE lanes dequantized(lanes_u v, int j, lanes scale, lanes offset) {
  const int shift = Bits == 8 ? 8 * j : 8 * (j % 4) + 4 * (j / 4);
  const auto integers = (lanes_i)((v >> shift) & ((1u << Bits) - 1));
  return round_wide<T>(fused(__builtin_convertvector(integers, lanes), scale, offset));
}

// sums [P][kChunk][kPanel] += x [M][count] times the block of the panels that begins at `group`.
template <typename T, int Bits, int P, int M>
void exact_tile(const float* x, int64_t x_stride, const Panels& panels, int64_t group, int64_t count,
                bool first, float* sums) {
  constexpr int64_t N = Block<Bits>::kInputs;
  const QuantizedForm form = panels.form;
  lanes sum[P][M][2] = {};
  for (int64_t k = 0; k < count; k += form.group)
    for (int p = 0; p < P; p++) {
      const uint8_t* from = panels.block(group + k / form.group) + p * panels.apart;
      const Block<Bits> block(from, form);
      lanes offset[2];
      for (int i = 0; i < 2; i++)
        offset[i] = form.has_mins ? block.min[i] : block.scale[i] * -Block<Bits>::kZero;
      __builtin_prefetch(from + kBytesAhead<P>, 0, 2);
      for (int64_t word = 0; word < form.group / N; word++) {
        const uint8_t* at = block.word(word);
        __builtin_prefetch(at + kBytesAhead<P>, 0, 2);
        __builtin_prefetch(at + kBytesAhead<P> + kLanes * 4, 0, 2);
        const lanes_u v[2] = {load_as<lanes_u>(at), load_as<lanes_u>(at + kLanes * 4)};
        const float* row = x + k + word * N;
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) {
          const int input = std::is_same_v<T, bf16> ? j ^ 1 : j;  // see products.h
          lanes w[2];
          for (int i = 0; i < 2; i++)
            w[i] = dequantized<T, Bits>(v[i], input, block.scale[i], offset[i]);
#pragma GCC unroll 16
          for (int m = 0; m < M; m++) {
            const float factor = row[m * x_stride + input];
            for (int i = 0; i < 2; i++) sum[p][m][i] = fused(lanes{} + factor, w[i], sum[p][m][i]);
          }
        }
      }
    }
  for (int p = 0; p < P; p++)
    for (int m = 0; m < M; m++)
      for (int i = 0; i < 2; i++) {
        float* to = sums + (p * kChunk + m) * kPanel + i * kLanes;
        const lanes v = first ? sum[p][m][i] : wide(to) + sum[p][m][i];
        std::memcpy(to, &v, sizeof v);
      }
}

using ExactTile = void (*)(const float*, int64_t, const Panels&, int64_t, int64_t, bool, float*);

template <typename T, int Bits, int P, int... M>
constexpr std::array<ExactTile, sizeof...(M)> exact_tiles(std::integer_sequence<int, M...>) {
  return {exact_tile<T, Bits, P, M + 1>...};
}
template <typename T, int Bits, int P>
constexpr auto kExactTiles = exact_tiles<T, Bits, P>(std::make_integer_sequence<int, kPairRows>());

// Writes two neighbouring inputs of kLanes outputs as tiles read weights of the type T.
SWELL_INLINE void store_pair(float* to, lanes even, lanes odd) {
  std::memcpy(to, &even, sizeof even);
  std::memcpy(to + kPanel, &odd, sizeof odd);
}
SWELL_INLINE void store_pair(bf16* to, lanes even, lanes odd) {
#ifdef __AVX512BF16__
  // Products take subnormal numbers for zero, and so does this conversion.
  const auto halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  alignas(64) static constexpr auto kOrder = [] {
    std::array<uint16_t, 2 * kLanes> order{};
    for (int i = 0; i < 2 * kLanes; i++) order[i] = uint16_t(i / 2 + i % 2 * kLanes);
    return order;
  }();
  const __m512i pairs = _mm512_permutexvar_epi16(_mm512_load_si512(kOrder.data()), halves);
#else
  even = round_wide<bf16>(even), odd = round_wide<bf16>(odd);
  const lanes_u pairs = load_as<lanes_u>(&even) >> 16 | load_as<lanes_u>(&odd);
#endif
  std::memcpy(to, &pairs, sizeof pairs);
}

// Writes `count` inputs of a panel, from `group` on, as tiles read weights of the type T.
template <int Bits, typename T>
void dequantize_block(const Panels& panels, int64_t group, int64_t count, T* to) {
  constexpr int64_t N = Block<Bits>::kInputs, kOutput = std::is_same_v<T, bf16> ? 2 : 1;
  const QuantizedForm form = panels.form;
  for (int64_t k = 0; k < count; k += form.group) {
    const Block<Bits> block(panels.block(group + k / form.group), form);
    for (int i = 0; i < 2; i++) {
      const lanes offset = form.has_mins ? block.min[i] : block.scale[i] * -Block<Bits>::kZero;
      for (int64_t word = 0; word < form.group / N; word++) {
        const lanes_u v = load_as<lanes_u>(block.word(word) + i * kLanes * 4);
        T* row = to + (k + word * N) * kPanel + i * kOutput * kLanes;
#pragma GCC unroll 4
        for (int j = 0; j < N; j += 2)
          store_pair(row + j * kPanel, dequantized<float, Bits>(v, j, block.scale[i], offset),
                     dequantized<float, Bits>(v, j + 1, block.scale[i], offset));
      }
    }
  }
}

// Multiplies rows of x by dequantized panels of W.
template <typename T, int Bits>
class ExactRows {
 public:
  ExactRows(const QuantizedArgs* a, const void* w, int64_t m, int64_t count)
      : a_(a), w_(w), count_(count) {
    const T* x = static_cast<const T*>(a->x) + m * a->x_stride;
    if (count <= kPairRows)
      few_.emplace(x, a->x_stride, count, a->size);
    else
      many_.emplace(x, a->x_stride, count, a->size);
  }

  template <typename Output, size_t P>
  void operator()(int64_t panel, int64_t apart, bool, std::array<Output, P> outs) const {
    alignas(64) float sums[P * kChunk * kPanel];
    const Panels panels(a_->form, w_, a_->size, panel, apart);
    for (int64_t k = 0; k < a_->size; k += kBlock) {
      const int64_t block = std::min(kBlock, a_->size - k), group = k / a_->form.group;
      if (few_)
        kExactTiles<T, Bits, P>[count_ - 1](few_->from + k, few_->stride, panels, group, block, k == 0,
                                            sums);
      else
        multiply_block(panels, group, k, block, sums);
    }
    for (size_t p = 0; p < P; p++) outs[p].take(sums + p * kChunk * kPanel, 0, count_);
  }

 private:
  void multiply_block(const Panels& panels, int64_t group, int64_t k, int64_t block,
                      float* sums) const {
    alignas(64) T weights[kBlock * kPanel];
    dequantize_block<Bits>(panels, group, block, weights);
    // Each tile prefetches a part of the next block, which may be the next panel's.
    const int64_t tiles = (count_ + kRows - 1) / kRows, bytes = block / a_->form.group * panels.bytes;
    const auto* next = reinterpret_cast<const T*>(panels.block(group) + bytes);
    const int64_t step = bytes / (tiles * block * int64_t(sizeof(T)));
    for (int64_t m = 0; m < count_; m += kRows)
      kTiles<T, 1>[std::min<int64_t>(kRows, count_ - m) - 1](
          many_->from + m * many_->stride + k, many_->stride, weights, 0, block,
          {next + m / kRows * step * block, step}, k == 0, sums + m * kPanel);
  }

  const QuantizedArgs* a_;
  const void* w_;
  int64_t count_;
  std::optional<Rows<T, float>> few_;
  std::optional<Rows<T>> many_;
};

// Rows of x as integers of 8 bits, of which each group has a scale.
struct IntegerRows {
  int8_t* integers;  // [rows][size]
  float* scales;     // [rows][groups]
  int32_t* starts;   // [rows][groups]: the sum of the group's integers times the weights' -zero
  float* sums;       // [rows][groups]: the sum of the group's integers times its scale
};

// Memory that is prefetched while a tile reads its panels: for each group, from `from` on, `step` bytes
// further, and for each word of it `word` bytes further.
struct Ahead {
  const uint8_t* from;
  int64_t step, word;
};

// acc + the sums of four neighbouring products: bytes of u, unsigned, times those of `quad`, signed.
SWELL_INLINE lanes_i dot(lanes_i acc, lanes_u u, int quad) {
#if defined(__AVX512VNNI__)
  return (lanes_i)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)u, _mm512_set1_epi32(quad));
#elif defined(__AVX2__)
#ifdef __AVX512BW__
  const auto madd = [](lanes_u a, lanes_i b) {
    return (lanes_i)_mm512_madd_epi16((__m512i)a, (__m512i)b);
  };
#else
  const auto madd = [](lanes_u a, lanes_i b) {
    return (lanes_i)_mm256_madd_epi16((__m256i)a, (__m256i)b);
  };
#endif
  // Bytes 0 and 2, then 1 and 3, as 16-bit integers.
  const int low = (int)((uint32_t)(int8_t)quad & 0xffffu) | (int)(uint32_t(int8_t(quad >> 16)) << 16);
  const int high = (int)((uint32_t)(int8_t(quad >> 8)) & 0xffffu) | (int)(uint32_t(quad >> 24) << 16);
  return acc + madd(u & 0x00ff00ffu, lanes_i{} + low) + madd((u >> 8) & 0x00ff00ffu, lanes_i{} + high);
#else
  for (int shift = 0; shift < 32; shift += 8)
    acc += (lanes_i)((u >> shift) & 0xffu) * (int32_t)(int8_t)(quad >> shift);
  return acc;
#endif
}

// sums [P][kChunk][kPanel] = rows m0 .. m0 + M - 1 times the panels. `Group`: the inputs of a group, or
// 0 for any number.
template <int Bits, int Group, int P, int M>
void integer_tile(const IntegerRows& x, int64_t m0, int64_t size, const Panels& panels, Ahead ahead,
                  float* sums) {
  constexpr int64_t N = Block<Bits>::kInputs;
  QuantizedForm form = panels.form;
  if (Group) form.group = Group;
  const int64_t groups = size / form.group;
  const int8_t* rows = x.integers + m0 * size;
  lanes sum[P][M][2] = {};
  for (int64_t g = 0; g < groups; g++)
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) {
      const uint8_t* from = panels.block(g) + p * panels.apart;
      const Block<Bits> block(from, form);
      const uint8_t* later = ahead.from + g * ahead.step + p * panels.apart;
      __builtin_prefetch(later + ahead.step - 1, 0, 2);
      lanes_i acc[M][2];
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        acc[m][0] = acc[m][1] = lanes_i{} + x.starts[(m0 + m) * groups + g];
      }
#pragma GCC unroll 8
      for (int64_t word = 0; word < form.group / N; word++) {
        const uint8_t* at = block.word(word);
        __builtin_prefetch(later + word * ahead.word, 0, 2);
        __builtin_prefetch(later + word * ahead.word + ahead.word / 2, 0, 2);
        const lanes_u v[2] = {load_as<lanes_u>(at), load_as<lanes_u>(at + kLanes * 4)};
        const int8_t* row = rows + g * form.group + word * N;
#pragma GCC unroll 2
        for (int part = 0; part < N / 4; part++) {
          lanes_u u[2];
          for (int i = 0; i < 2; i++)
            u[i] = Bits == 8 ? v[i] : (part ? v[i] >> 4 : v[i]) & 0x0f0f0f0fu;
#pragma GCC unroll 16
          for (int m = 0; m < M; m++) {
            const int quad = load_as<int>(row + m * size + part * 4);
            acc[m][0] = dot(acc[m][0], u[0], quad);
            acc[m][1] = dot(acc[m][1], u[1], quad);
          }
        }
      }
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        const int64_t at = (m0 + m) * groups + g;
        const float scale = x.scales[at];
        for (int i = 0; i < 2; i++) {
          lanes& to = sum[p][m][i];
          to = fused(__builtin_convertvector(acc[m][i], lanes), scale * block.scale[i], to);
          if (form.has_mins) to = fused(lanes{} + x.sums[at], block.min[i], to);
        }
      }
    }
  for (int p = 0; p < P; p++)
    for (int m = 0; m < M; m++)
      for (int i = 0; i < 2; i++)
        std::memcpy(sums + (p * kChunk + m) * kPanel + i * kLanes, &sum[p][m][i], sizeof(lanes));
}

using IntegerTile = void (*)(const IntegerRows&, int64_t, int64_t, const Panels&, Ahead, float*);

template <int Bits, int Group, int P, int... M>
constexpr std::array<IntegerTile, sizeof...(M)> integer_tiles(std::integer_sequence<int, M...>) {
  return {integer_tile<Bits, Group, P, M + 1>...};
}
template <int Bits, int Group, int P>
constexpr auto kIntegerTiles =
    integer_tiles<Bits, Group, P>(std::make_integer_sequence<int, kDotRows>());

// Multiplies rows of integers by panels of W.
template <int Bits>
class IntegerProducts {
 public:
  IntegerProducts(const QuantizedArgs* a, const void* w, const IntegerRows& x, int64_t m,
                  int64_t count)
      : a_(a), w_(w), x_(x), m_(m), count_(count) {}

  template <typename Output, size_t P>
  void operator()(int64_t panel, int64_t apart, bool cold, std::array<Output, P> outs) const {
    alignas(64) float sums[P * kChunk * kPanel];
    const Panels panels(a_->form, w_, a_->size, panel, apart);
    const int64_t tiles = (count_ + kDotRows - 1) / kDotRows, some = (count_ + tiles - 1) / tiles;
    const auto& of_rows = a_->form.group == 32   ? kIntegerTiles<Bits, 32, P>
                          : a_->form.group == 16 ? kIntegerTiles<Bits, 16, P>
                                                 : kIntegerTiles<Bits, 0, P>;
    for (int64_t m = 0; m < count_; m += some)
      of_rows[std::min(some, count_ - m) - 1](x_, m_ + m, a_->size, panels,
                                              ahead<P>(panels, m / some, tiles, cold),
                                              sums + m * kPanel);
    for (size_t p = 0; p < P; p++) outs[p].take(sums + p * kChunk * kPanel, 0, count_);
  }

 private:
  // The first tile of a cold panel, and a single tile, prefetch the panel that they read, a little
  // ahead of the reading. The others prefetch a part of the next panel.
  template <int P>
  Ahead ahead(const Panels& panels, int64_t tile, int64_t tiles, bool cold) const {
    const int64_t word = kPanel * 4;
    if (tiles == 1 || (cold && tile == 0))
      return {panels.data + kBytesAhead<P>, panels.bytes, word};
    const int64_t parts = tiles - cold, groups = a_->size / a_->form.group;
    const int64_t step = panels.bytes / parts, part = tile - cold;
    return {panels.block(groups) + part * groups * step, step, word / parts};
  }

  const QuantizedArgs* a_;
  const void* w_;
  IntegerRows x_;
  int64_t m_, count_;
};

// Quantizes one group: the largest integer is 127. A group whose numbers are all below 2^-100 counts
// as zero; the scale of a group with a NaN or an infinity is NaN.
template <typename T>
void quantize_group(const T* x, int64_t size, int8_t* integers, float* scale, int32_t* sum) {
  u8 largest{};
  for (int64_t k = 0; k < size; k += 8) {
    const v8 v = load(x + k);
    const u8 bits = load_as<u8>(&v) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  uint32_t top = 0;
  for (int i = 0; i < 8; i++) top = std::max(top, largest[i]);
  const float most = load_as<float>(&top);
  if (top >= 0x7f800000u || most < 0x1p-100f) {
    std::fill_n(integers, size, 0);
    *scale = top >= 0x7f800000u ? NAN : 0.0f;
    *sum = 0;
    return;
  }
  typedef int8_t b8 __attribute__((vector_size(8)));
  const v8 factor = splat(127.0f / most), magic = splat(12582912.0f);  // see `vexp`
  i8 total{};
  for (int64_t k = 0; k < size; k += 8) {
    const v8 shifted = fused(load(x + k), factor, magic);
    const i8 integer = load_as<i8>(&shifted) - 0x4b400000;
    total += integer;
    const b8 bytes = __builtin_convertvector(integer, b8);
    std::memcpy(integers + k, &bytes, sizeof bytes);
  }
  *sum = 0;
  for (int i = 0; i < 8; i++) *sum += total[i];
  *scale = most / 127.0f;
}

// Quantizes all rows of x, to memory of the calling thread.
template <typename T>
IntegerRows quantize_rows(const QuantizedArgs* a) {
  static thread_local std::vector<int8_t> integers;
  static thread_local std::vector<float> scales;
  static thread_local std::vector<int32_t> starts;
  static thread_local std::vector<float> sums;
  const int64_t group = a->form.group, groups = a->size / group;
  integers.resize(a->rows * a->size);
  scales.resize(a->rows * groups);
  starts.resize(a->rows * groups);
  sums.resize(a->rows * groups);
  const IntegerRows to{integers.data(), scales.data(), starts.data(), sums.data()};
  const int32_t zero = a->form.has_mins ? 0 : 1 << (a->form.bits - 1);
  const T* x = static_cast<const T*>(a->x);
  parallel_for_each(a->rows, a->rows * a->size * 4, [=](int64_t m) {
    for (int64_t g = 0; g < groups; g++) {
      const int64_t at = m * groups + g;
      int32_t sum;
      quantize_group(x + m * a->x_stride + g * group, group, to.integers + m * a->size + g * group,
                     to.scales + at, &sum);
      to.starts[at] = sum * -zero;
      to.sums[at] = float(sum) * to.scales[at];
    }
  });
  return to;
}

template <typename T, int Bits>
void embedding(const QuantizedArgs* a) {
  constexpr int64_t N = Block<Bits>::kInputs;
  const QuantizedForm form = a->form;
  const auto* ids = static_cast<const int64_t*>(a->x);
  T* y = static_cast<T*>(a->y);
  parallel_for_each(a->rows, a->rows * a->size * 8, [=](int64_t t) {
    const Panels panels(form, a->w, a->size, ids[t] / kPanel, 0);
    const int64_t lane = ids[t] % kPanel, vector = lane / kLanes, in_vector = lane % kLanes;
    for (int64_t g = 0; g < a->size / form.group; g++) {
      const Block<Bits> block(panels.block(g), form);
      const float scale = block.scale[vector][in_vector];
      const float offset = form.has_mins ? block.min[vector][in_vector] : scale * -block.kZero;
      for (int64_t k = 0; k < form.group; k += 8) {
        v8 integers;
        for (int i = 0; i < 8; i++) {
          const uint8_t* word = block.word((k + i) / N) + lane * 4;
          integers[i] = Bits == 8 ? word[i % 4] : (word[i % 4] >> (i / 4 * 4)) & 15;
        }
        store(y + t * a->size + g * form.group + k, fused(integers, splat(scale), splat(offset)));
      }
    }
  });
}

// Calls compute(type, reader) for the type of x and the way of computing; see `grouped_outputs` for the
// reader.
template <typename T, int Bits, typename Compute>
void run_form(const QuantizedArgs* a, const Compute& compute) {
  if (a->integers) {
    const IntegerRows x = quantize_rows<T>(a);
    compute(T{}, [=](const void* w, int64_t m, int64_t count) {
      return IntegerProducts<Bits>(a, w, x, m, count);
    });
  } else {
    compute(T{}, [=](const void* w, int64_t m, int64_t count) {
      return ExactRows<T, Bits>(a, w, m, count);
    });
  }
}

template <typename Compute>
void run(const QuantizedArgs* a, const Compute& compute) {
  const bool eight = a->form.bits == 8;
  if (a->is_bf16)
    eight ? run_form<bf16, 8>(a, compute) : run_form<bf16, 4>(a, compute);
  else
    eight ? run_form<float, 8>(a, compute) : run_form<float, 4>(a, compute);
}

}  // namespace

SWELL_API void swell_quantized_linear(const QuantizedArgs* a) {
  run(a, [=](auto type, const auto& reader) {
    using T = decltype(type);
    outputs(static_cast<const T*>(a->bias), static_cast<T*>(a->y), a->rows, a->size, a->outs,
            [&](int64_t m, int64_t count) { return reader(a->w, m, count); });
  });
}

void grouped_quantized_linear(const GroupedRows& g, const QuantizedForm& form, int64_t integers) {
  const QuantizedArgs a{g.x,    nullptr, nullptr,   g.y,    nullptr, g.starts[g.groups],
                        g.size, g.outs,  g.size, g.is_bf16, form,    integers};
  run(&a, [&](auto type, const auto& reader) { grouped_outputs<decltype(type)>(g, reader); });
}

SWELL_API void swell_quantized_linear_argmax(const QuantizedArgs* a) {
  run(a, [=](auto type, const auto& reader) {
    largest_outputs<decltype(type)>(
        static_cast<float*>(a->y), a->which, a->rows, a->size, a->outs,
        [&](int64_t m, int64_t count) { return reader(a->w, m, count); });
  });
}

SWELL_API void swell_quantized_embedding(const QuantizedArgs* a) {
  const bool eight = a->form.bits == 8;
  if (a->is_bf16)
    eight ? embedding<bf16, 8>(a) : embedding<bf16, 4>(a);
  else
    eight ? embedding<float, 8>(a) : embedding<float, 4>(a);
}
