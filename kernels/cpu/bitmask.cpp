// Applies bitmasks of allowed tokens, 32 tokens at a time.
#include "thread_pool.h"
#include "vec.h"

namespace {

void mask_word(float* logits, uint32_t word, float value) {
  const i8 bit = {1, 2, 4, 8, 16, 32, 64, 128};
  for (int64_t i = 0; i < 32; i += 8) {
    const int32_t byte = word >> i & 255;
    const i8 bits = {byte, byte, byte, byte, byte, byte, byte, byte};
    store(logits + i, (bits & bit) == 0 ? splat(value) : load(logits + i));
  }
}

void mask_row(float* logits, const uint32_t* words, int64_t vocab, float value) {
  const int64_t whole = vocab / 32;
  for (int64_t w = 0; w < whole; w++)
    if (words[w] != ~0u) mask_word(logits + w * 32, words[w], value);
  for (int64_t token = whole * 32; token < vocab; token++)
    if (!(words[whole] >> token % 32 & 1)) logits[token] = value;
}

}  // namespace

// logits: rows `stride` apart; bitmask [n, words].
SWELL_API void swell_bitmask(float* logits, const uint32_t* bitmask, const int64_t* rows, float value,
                             int64_t n, int64_t vocab, int64_t words, int64_t stride) {
  parallel_for_each(n, n * vocab / 2, [=](int64_t i) {
    mask_row(logits + rows[i] * stride, bitmask + i * words, vocab, value);
  });
}
