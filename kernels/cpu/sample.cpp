// Samples tokens, one row at a time, without sorting.
#include "select.h"
#include "thread_pool.h"

namespace {

struct Scratch {
  std::vector<float> weights, sums;  // [runs * kRun], [runs]
  Selection selection;
  // The logits and tokens of a row that top_k keeps.
  std::vector<float> logits;
  std::vector<int64_t> tokens;

  void reserve(int64_t runs) {
    if (int64_t(sums.size()) >= runs) return;
    sums.resize(runs);
    weights.resize(runs * kRun);
  }
};

// Samples from one row of logits. A token's weight is exp((logit - top) / temperature), or 0 if min_p
// or kExpUnderflow excludes it. The members that point to the scratch memory never change, so the
// compiler need not load them again after each store.
class WeightedSampler {
 public:
  WeightedSampler(Scratch& scratch, const float* logits, int64_t vocab, float top, float temperature,
                  float min_p)
      : logits_(logits), vocab_(vocab), runs_((vocab + kRun - 1) / kRun),
        top_(splat(top)), temperature_(splat(temperature)) {
    const float least = min_p > 0 ? std::min(0.0f, std::log(min_p)) : kExpUnderflow;
    floor_ = splat(std::max(least, kExpUnderflow));
    scratch.reserve(runs_);
    weights_ = scratch.weights.data();
    sums_ = scratch.sums.data();
  }

  const float* weights() const { return weights_; }

  // Computes the sum of each run's weights and returns the sum of all weights. Does not store the
  // weights.
  double sum_runs() {
    double total = 0;
    for (int64_t run = 0; run < runs_; run++) {
      v8 sums[4] = {};
      for (int64_t i = 0; i < kRun; i += 8) sums[i / 8 % 4] += weigh(run * kRun + i);
      total += sums_[run] = hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
    return total;
  }

  // Does the same, and stores the weights.
  double weigh_all() {
    double total = 0;
    for (int64_t run = 0; run < runs_; run++) total += sums_[run] = weigh_run(run);
    return total;
  }
  float weigh_run(int64_t run) {
    v8 sums[4] = {};
    for (int64_t i = 0; i < kRun; i += 8) {
      const v8 weight = weigh(run * kRun + i);
      store(weights_ + run * kRun + i, weight);
      sums[i / 8 % 4] += weight;
    }
    return hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }

  // Computes the sums of the weights that a threshold keeps. Ties that it excludes get weight 0 here;
  // the other excluded tokens get weight 0 in `cut_run`.
  double sum_left(const Threshold& cut) {
    const v8 least = splat(cut.value);
    double total = 0;
    int64_t ties = cut.ties;
    for (int64_t run = 0; run < runs_; run++) {
      v8 sums[4] = {};
      for (int64_t i = 0; i < kRun; i += 8) {
        const int64_t token = run * kRun + i;
        const v8 x = logits_at(token);
        const i8 tie = x == least;
        if (any(tie))
          for (int j = 0; j < 8; j++)
            if (tie[j] && --ties < 0) weights_[token + j] = 0;
        sums[i / 8 % 4] += x >= least ? load(weights_ + token) : v8{};
      }
      total += sums_[run] = hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
    return total;
  }
  void cut_run(const Threshold& cut, int64_t run) {
    for (int64_t i = run * kRun; i < (run + 1) * kRun; i += 8)
      store(weights_ + i, logits_at(i) >= splat(cut.value) ? load(weights_ + i) : v8{});
  }

  // Returns the first token, in token order, at which the sum of weights exceeds the target.
  // `fill(run)` stores the final weights of a run.
  template <typename Fill>
  int64_t invert(double target, Fill fill) {
    double before = 0, sum = 0;
    int64_t last_run = 0;
    for (int64_t run = 0; run < runs_ && sum <= target; run++) {
      if (!(sums_[run] > 0)) continue;
      last_run = run;
      before = sum;
      sum += sums_[run];
    }
    fill(last_run);
    int64_t last = 0;
    for (int64_t i = last_run * kRun; i < (last_run + 1) * kRun; i++) {
      if (weights_[i] > 0) last = i;
      before += weights_[i];
      if (before > target) return i;
    }
    return last;  // the run's sum, or the total, was rounded up
  }

 private:
  SWELL_INLINE v8 logits_at(int64_t token) const {
    return load_first(logits_ + token, vocab_ - token, -INFINITY);
  }
  SWELL_INLINE v8 weigh(int64_t token) const {
    const v8 scaled = (logits_at(token) - top_) / temperature_;
    const v8 weight = vexp(scaled);
    return scaled >= floor_ ? weight : v8{};
  }

  const float* const logits_;
  const int64_t vocab_, runs_;
  const v8 top_, temperature_;
  v8 floor_;
  float *weights_, *sums_;
};

// Samples a token with all filters except top_k.
int64_t sample_weighted(Scratch& scratch, const float* logits, int64_t vocab, float top,
                        float temperature, float top_p, float min_p, double u) {
  WeightedSampler sampler(scratch, logits, vocab, top, temperature, min_p);
  if (!(top_p < 1)) {
    const double total = sampler.sum_runs();
    if (!(total > 0)) return vocab - 1;  // NaN, or every logit is -inf
    return sampler.invert(u * total, [&](int64_t run) { sampler.weigh_run(run); });
  }
  double total = sampler.weigh_all();
  if (!(total > 0)) return vocab - 1;
  const Threshold cut = scratch.selection.heaviest(logits, sampler.weights(), vocab, total, top_p);
  if (!cut.keeps_all()) total = sampler.sum_left(cut);
  return sampler.invert(u * total, [&](int64_t run) { sampler.cut_run(cut, run); });
}

// Stores the logits and tokens that top_k keeps, in token order.
void keep_largest(Scratch& scratch, const float* logits, int64_t vocab, int64_t top_k) {
  const Threshold cut = scratch.selection.largest(logits, vocab, top_k);
  int64_t ties = cut.ties;
  scratch.logits.clear();
  scratch.tokens.clear();
  for (int64_t begin = 0; begin < vocab; begin += 8) {
    if (!any(load_first(logits + begin, vocab - begin, NAN) >= splat(cut.value))) continue;
    for (int64_t token = begin; token < std::min(begin + 8, vocab); token++)
      if (logits[token] > cut.value || (logits[token] == cut.value && ties-- > 0)) {
        scratch.logits.push_back(logits[token]);
        scratch.tokens.push_back(token);
      }
  }
}

int64_t sample_token(Scratch& scratch, const float* logits, int64_t vocab, const Top& best,
                     float temperature, int64_t top_k, float top_p, float min_p, double u) {
  if (!(temperature > 0)) return best.at;
  const float top = best.value;
  if (top_k > 0 && top_k < vocab) {
    if (!(top > -INFINITY)) return vocab - 1;
    keep_largest(scratch, logits, vocab, top_k);
    const int64_t left = scratch.tokens.size();
    const float* own = scratch.logits.data();
    return scratch.tokens[sample_weighted(scratch, own, left, top, temperature, top_p, min_p, u)];
  }
  return sample_weighted(scratch, logits, vocab, top, temperature, top_p, min_p, u);
}

}  // namespace

struct GreedyArgs {
  const float* logits;  // rows `stride` apart
  int64_t* out;
  float* max_logits;
  int64_t rows, vocab, stride;
};

SWELL_API void swell_greedy(const GreedyArgs* args) {
  const GreedyArgs a = *args;
  parallel_for_each(a.rows, a.rows * a.vocab / 2, [=](int64_t row) {
    const Top best = first_largest(a.logits + row * a.stride, a.vocab);
    a.out[row] = best.at, a.max_logits[row] = best.value;
  });
}

// Each parameter has a stride, in elements.
SWELL_API void swell_sample(const float* logits, const float* temperature, const int64_t* top_k,
                            const float* top_p, const float* min_p, const double* u,
                            const int64_t* strides, int64_t rows, int64_t vocab, int64_t* out,
                            float* max_logits) {
  parallel_for_each(rows, rows * vocab * 8, [=](int64_t row) {
    static thread_local Scratch scratch;
    const float* own = logits + row * strides[0];
    const Top best = first_largest(own, vocab);
    out[row] = sample_token(scratch, own, vocab, best, temperature[row * strides[1]],
                            top_k[row * strides[2]], top_p[row * strides[3]],
                            min_p[row * strides[4]], u[row * strides[5]]);
    max_logits[row] = best.value;
  });
}

SWELL_API void swell_noise(const int64_t* seeds, const int64_t* positions, int64_t seed_stride,
                           int64_t position_stride, int64_t count, double* out) {
  const uint64_t golden = 0x9e3779b97f4a7c15u;
  const auto mix = [](uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  };
  for (int64_t i = 0; i < count; i++) {
    const uint64_t seed = seeds[i * seed_stride], position = positions[i * position_stride];
    out[i] = double(mix(mix(seed + golden) + (position + 1) * golden) >> 11) * 0x1p-53;
  }
}
