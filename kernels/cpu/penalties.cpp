// Applies penalties; only the tokens that a slot has seen are computed.
#include "thread_pool.h"
#include "vec.h"

namespace {

// Products and sums are rounded to float separately: products of floats are exact in double, so fusing
// a product with a sum would not change it.
float times(float a, float b) { return float(double(a) * double(b)); }

struct Strengths {
  float repetition, frequency, presence;

  float apply(float x, int32_t count) const {
    x = x > 0 ? x / repetition : times(x, repetition);
    return x - float(double(times(frequency, float(count))) + (count > 0 ? presence : 0.0f));
  }
};

void penalize(float* logits, const uint8_t* seen, const int32_t* counts, int64_t vocab,
              const Strengths& strengths) {
  constexpr int64_t kStride = 64;
  for (int64_t begin = 0; begin < vocab; begin += kStride) {
    const int64_t end = begin + kStride < vocab ? begin + kStride : vocab;
    if (end - begin == kStride) {
      uint64_t words[kStride / 8], some = 0;
      std::memcpy(words, seen + begin, kStride);
      for (uint64_t word : words) some |= word;
      if (!some) continue;
    }
    for (int64_t token = begin; token < end; token++)
      if (seen[token]) logits[token] = strengths.apply(logits[token], counts[token]);
  }
}

}  // namespace

// logits: rows `stride` apart; output_counts, seen [slots, vocab]; the strengths [n].
SWELL_API void swell_penalties(float* logits, const int64_t* rows, const int64_t* slots,
                               const int32_t* output_counts, const uint8_t* seen,
                               const float* repetition, const float* frequency,
                               const float* presence, int64_t n, int64_t vocab, int64_t stride) {
  parallel_for_each(n, n * vocab / 2, [=](int64_t i) {
    penalize(logits + rows[i] * stride, seen + slots[i] * vocab, output_counts + slots[i] * vocab,
             vocab, {repetition[i], frequency[i], presence[i]});
  });
}

SWELL_API void swell_count(int32_t* output_counts, uint8_t* seen, const int64_t* slots,
                           const int64_t* tokens, int64_t n, int64_t vocab) {
  for (int64_t i = 0; i < n; i++) {
    output_counts[slots[i] * vocab + tokens[i]]++;
    seen[slots[i] * vocab + tokens[i]] = 1;
  }
}
