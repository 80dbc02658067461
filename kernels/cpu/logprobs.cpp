// Log probabilities, ranks and the most likely tokens, one row at a time.
#include "select.h"
#include "thread_pool.h"

namespace {

struct Scratch {
  Selection selection;
  std::vector<int64_t> best;
};

// Finds the `top` most likely tokens; of equal ones, the lower id comes first. 0 if only NaN is left.
void find_best(Scratch& scratch, const float* logits, int64_t vocab, int64_t top, int64_t* out) {
  const Threshold cut = scratch.selection.largest(logits, vocab, top);
  std::vector<int64_t>& best = scratch.best;
  best.clear();
  for (int64_t begin = 0; begin < vocab; begin += 8) {
    if (!any(load_first(logits + begin, vocab - begin, NAN) >= splat(cut.value))) continue;
    for (int64_t token = begin; token < std::min(begin + 8, vocab); token++)
      if (logits[token] >= cut.value) best.push_back(token);
  }
  const int64_t found = std::min<int64_t>(top, best.size());
  std::partial_sort(best.begin(), best.begin() + found, best.end(), [&](int64_t a, int64_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  });
  for (int64_t i = 0; i < top; i++) out[i] = i < found ? best[i] : 0;
}

// Returns the logarithm of sum(exp(logit - top)); sets `larger` to the number of logits above `own`.
double log_sum(const float* logits, int64_t vocab, float top, float own, int64_t& larger) {
  double total = 0;
  larger = 0;
  for (int64_t begin = 0; begin < vocab; begin += kRun) {
    v8 sums[4] = {};
    i8 counts = {};
    const int64_t end = std::min(begin + kRun, vocab);
    for (int64_t i = begin; i < end; i += 8) {
      const v8 x = load_first(logits + i, end - i, -INFINITY), lower = x - splat(top);
      const v8 e = vexp(lower);
      sums[i / 8 % 4] += lower < splat(kExpUnderflow) ? v8{} : e;
      counts -= x > splat(own);
    }
    for (const v8& sum : sums)
      for (int j = 0; j < 8; j++) total += double(sum[j]);
    for (int j = 0; j < 8; j++) larger += counts[j];
  }
  return std::log(total);
}

void rank(Scratch& scratch, const float* logits, int64_t vocab, int64_t token, int64_t top,
          int64_t* tokens, float* logprobs, int64_t& rank) {
  const float most = first_largest(logits, vocab).value;
  int64_t larger;
  double whole = double(most) + log_sum(logits, vocab, most, logits[token], larger);
  if (!std::isfinite(most)) whole = NAN;
  rank = 1 + larger;
  tokens[0] = token;
  if (top > 0) find_best(scratch, logits, vocab, top, tokens + 1);
  for (int64_t i = 0; i <= top; i++) logprobs[i] = float(double(logits[tokens[i]]) - whole);
}

}  // namespace

// logits: rows `stride` apart; tokens and logprobs [rows, 1 + top], ranks [rows].
SWELL_API void swell_rank(const float* logits, const int64_t* selected, int64_t rows, int64_t vocab,
                          int64_t stride, int64_t top, int64_t* tokens, float* logprobs,
                          int64_t* ranks) {
  parallel_for_each(rows, rows * vocab * 8, [=](int64_t row) {
    static thread_local Scratch scratch;
    rank(scratch, logits + row * stride, vocab, selected[row], top, tokens + row * (1 + top),
         logprobs + row * (1 + top), ranks[row]);
  });
}
