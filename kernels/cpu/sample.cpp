// Drawing tokens, one row at a time; nothing is sorted beyond what top_p needs to see.
#include <algorithm>
#include <functional>
#include <vector>

#include "vec.h"

namespace {

constexpr int64_t kRun = 256;  // tokens whose weights are summed together, a multiple of 8
constexpr float kNothing = -87.0f;  // below it, exp is 0 here

struct Sampler {
  int64_t vocab;
  std::vector<float> scaled, weight;  // of each token; the weights' tail is 0
  std::vector<double> runs;
  std::vector<uint64_t> keys;

  explicit Sampler(int64_t vocab) : vocab(vocab) {
    const int64_t count = (vocab + kRun - 1) / kRun;
    scaled.resize(count * kRun);
    weight.resize(count * kRun);
    runs.resize(count);
  }

  // Larger is more likely; among equals the lower token.
  uint64_t key(int64_t token) const {
    uint32_t bits;
    std::memcpy(&bits, &scaled[token], 4);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return uint64_t(bits) << 32 | (0xffffffffu - uint32_t(token));
  }
  double weight_of(uint64_t key) const { return weight[0xffffffffu - uint32_t(key)]; }

  void weigh(const float* logits, float top, float temperature, float min_p) {
    const float least = min_p > 0 ? std::min(0.0f, std::log(min_p)) : kNothing;
    const v8 floor = splat(std::max(least, kNothing)), zero = {};
    for (int64_t i = 0; i < vocab; i += 8) {
      const int64_t n = vocab - i;
      const v8 x = n >= 8 ? load(logits + i) : load_part(logits + i, n);
      const v8 s = (x - splat(top)) / splat(temperature);
      const v8 e = vexp(s);
      const v8 w = s >= floor ? e : zero;
      store(&scaled[i], s);
      if (n >= 8) store(&weight[i], w);
      else store_part(&weight[i], w, n);
    }
  }

  // The key of the least likely token that top_k, and after it top_p, keep.
  uint64_t last_kept(int64_t top_k, float top_p) {
    keys.clear();
    // All tokens below (1 - top_p) of the average hold less than top_p leaves out together, so
    // top_p alone never gets to them (half of it, for the sake of rounding).
    float rare = 0;
    if (!(top_k > 0) && top_p > 0) rare = 0.5f * (1 - top_p) * float(sum_runs() / double(vocab));
    for (int64_t i = 0; i < vocab; i++)
      if (weight[i] > rare) keys.push_back(key(i));
    const std::greater<uint64_t> more;
    if (top_k > 0 && top_k < int64_t(keys.size())) {
      std::nth_element(keys.begin(), keys.begin() + (top_k - 1), keys.end(), more);
      keys.resize(top_k);
    }
    if (!(top_p < 1)) return *std::min_element(keys.begin(), keys.end());
    double total = 0, held = 0;
    if (top_k > 0)
      for (uint64_t k : keys) total += weight_of(k);
    else
      total = sum_runs();
    // Sort the most likely ones only, and more of them as long as they do not hold enough.
    size_t sorted = 0;
    for (size_t want = 64; sorted < keys.size(); want *= 8) {
      const size_t end = std::min(keys.size(), want);
      std::nth_element(keys.begin() + sorted, keys.begin() + (end - 1), keys.end(), more);
      std::sort(keys.begin() + sorted, keys.begin() + end, more);
      for (; sorted < end; sorted++) {
        held += weight_of(keys[sorted]);
        if (held >= double(top_p) * total) return keys[sorted];
      }
    }
    return keys.back();
  }

  double sum_runs() {
    double total = 0;
    for (size_t r = 0; r < runs.size(); r++) {
      v8 sums[4] = {};
      for (int64_t i = 0; i < kRun; i += 8) sums[i / 8 % 4] += load(&weight[r * kRun + i]);
      runs[r] = hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
      total += runs[r];
    }
    return total;
  }

  // The first token, in token order, at which the sum of weights exceeds u times the total.
  int64_t invert(double u) {
    const double target = u * sum_runs();
    double sum = 0;
    int64_t last = vocab - 1;  // only NaN logits leave it
    for (size_t r = 0; r < runs.size(); r++) {
      const bool here = sum + runs[r] > target;
      if (runs[r] > 0 && (here || r + 1 == runs.size())) {
        for (int64_t i = r * kRun; i < int64_t(r + 1) * kRun; i++) {
          if (weight[i] > 0) last = i;
          sum += weight[i];
          if (sum > target) return i;
        }
        return last;  // the run's sum was rounded up
      }
      if (runs[r] > 0) last = last_of(r);
      sum += runs[r];
    }
    return last;
  }
  int64_t last_of(int64_t run) const {
    int64_t i = (run + 1) * kRun - 1;
    while (!(weight[i] > 0)) i--;
    return i;
  }

  int64_t draw(const float* logits, float temperature, int64_t top_k, float top_p, float min_p,
               double u) {
    const int64_t best = most_likely(logits, vocab);
    if (!(temperature > 0)) return best;
    weigh(logits, logits[best], temperature, min_p);
    if ((top_k > 0 && top_k < vocab) || top_p < 1) {
      if (!(weight[best] > 0)) return vocab - 1;  // NaN, or every token is forbidden
      const uint64_t least = last_kept(top_k, top_p);
      for (int64_t i = 0; i < vocab; i++)
        if (key(i) < least) weight[i] = 0;
    }
    return invert(u);
  }

  // The first of the largest logits.
  static int64_t most_likely(const float* logits, int64_t vocab) {
    v8 largest = splat(-INFINITY);
    for (int64_t i = 0; i + 8 <= vocab; i += 8) largest = vmax(load(logits + i), largest);
    float top = hmax(largest);
    for (int64_t i = vocab & ~int64_t(7); i < vocab; i++) top = std::max(top, logits[i]);
    const float* found = std::find(logits, logits + vocab, top);
    return found == logits + vocab ? vocab - 1 : found - logits;
  }
};

}  // namespace

SWELL_API void swell_greedy(const float* logits, int64_t rows, int64_t vocab, int64_t* out) {
#pragma omp parallel for if (rows * vocab > kParallelWork)
  for (int64_t row = 0; row < rows; row++)
    out[row] = Sampler::most_likely(logits + row * vocab, vocab);
}

SWELL_API void swell_sample(const float* logits, const float* temperature, const int64_t* top_k,
                            const float* top_p, const float* min_p, const double* u, int64_t rows,
                            int64_t vocab, int64_t* out) {
#pragma omp parallel if (rows * vocab * 8 > kParallelWork)
  {
    Sampler sampler(vocab);
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < rows; row++)
      out[row] = sampler.draw(logits + row * vocab, temperature[row], top_k[row], top_p[row],
                              min_p[row], u[row]);
  }
}

SWELL_API void swell_noise(const int64_t* seeds, const int64_t* positions, int64_t count,
                           double* out) {
  const uint64_t golden = 0x9e3779b97f4a7c15u;
  const auto mix = [](uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  };
  for (int64_t i = 0; i < count; i++) {
    const uint64_t z = mix(mix(uint64_t(seeds[i]) + golden) + (uint64_t(positions[i]) + 1) * golden);
    out[i] = double(z >> 11) * 0x1p-53;
  }
}
