// Finds the largest of many floats without sorting them.
#pragma once
#include <algorithm>
#include <vector>

#include "vec.h"

constexpr int64_t kRun = 256;  // length of a run, which is summed in float; runs are summed in double

SWELL_INLINE bool any(i8 mask) {
  typedef long long l4 __attribute__((vector_size(32)));
  const l4 wide = (l4)mask;
#ifdef __AVX__
  return !__builtin_ia32_ptestz256(wide, wide);
#else
  return (wide[0] | wide[1]) | (wide[2] | wide[3]);
#endif
}

// Loads eight floats from p; those after the first n are `rest`.
SWELL_INLINE v8 load_first(const float* p, int64_t n, float rest) {
  if (n >= 8) return load(p);
  float padded[8];
  for (int64_t i = 0; i < 8; i++) padded[i] = i < n ? p[i] : rest;
  return load(padded);
}

// Index and value of the first of the largest floats. If one of the floats is NaN, so is the value,
// and `at` is the index of any float.
struct Top {
  int64_t at;
  float value;
};

inline Top first_largest(const float* x, int64_t count) {
  float top = -INFINITY;
  int64_t run = 0;
  i8 nan[4] = {};
  for (int64_t begin = 0; begin < count; begin += kRun) {
    v8 largest[4] = {splat(top), splat(top), splat(top), splat(top)};
    const int64_t end = std::min(begin + kRun, count);
    int64_t i = begin;
    for (; i + 32 <= end; i += 32)
      for (int j = 0; j < 4; j++) {
        const v8 v = load(x + i + 8 * j);
        largest[j] = vmax(v, largest[j]);
        nan[j] |= v != v;
      }
    for (; i < end; i += 8) {
      const v8 v = load_first(x + i, end - i, -INFINITY);
      largest[0] = vmax(v, largest[0]);
      nan[0] |= v != v;
    }
    const float most = hmax(vmax(vmax(largest[0], largest[1]), vmax(largest[2], largest[3])));
    if (most > top) top = most, run = begin;
  }
  const float* end = x + std::min(run + kRun, count);
  const float* found = std::find(x + run, end, top);
  const bool sound = !any((nan[0] | nan[1]) | (nan[2] | nan[3]));
  return {found == end ? count - 1 : found - x, sound ? top : NAN};
}

// A set of largest values: all values above `value`, and the first `ties` values equal to it.
struct Threshold {
  float value = -INFINITY;
  int64_t ties = INT64_MAX;
  bool keeps_all() const { return value == -INFINITY; }
};

// Finds the threshold of the smallest set of largest values whose total measure reaches a target; the
// measure of a value is 1, or its weight, which is the same for equal values. This is a quickselect: a
// pivot is chosen from a sample of the values, the measures on both sides of it are summed, and only
// the side in which the set ends is searched further. The sample affects the time, not the result.
class Selection {
 public:
  // Finds the `count` largest of n values.
  Threshold largest(const float* values, int64_t n, int64_t count) {
    return reach<false>({values, nullptr, n}, double(n), double(count));
  }

  // Finds the largest values whose weights sum to `share` of `total`, the sum of all weights.
  Threshold heaviest(const float* values, const float* weights, int64_t n, double total, double share) {
    return reach<true>({values, weights, n}, total, share * total);
  }

 private:
  static constexpr int64_t kFew = 32;

  struct List {
    const float *values, *weights;
    int64_t n;
  };
  struct Token {
    float value, measure;
  };

  template <bool kWeighted>
  static Token token(const List& list, int64_t i) {
    const float value = list.values[i];
    return {value >= -INFINITY ? value : -INFINITY, kWeighted ? list.weights[i] : 1.0f};
  }

  static Threshold cut(const Token& last, double missing) {
    if (last.value == -INFINITY) return {};
    return {last.value, std::max<int64_t>(1, int64_t(std::ceil(missing / last.measure)))};
  }

  template <bool kWeighted>
  Threshold reach(List list, double total, double target) {
    while (list.n > kFew) {
      const Token pivot = choose_pivot<kWeighted>(list, target / total);
      double above = 0, at = 0;
      measure<kWeighted>(list, pivot.value, above, at);
      if (above >= target) {
        list = gather<kWeighted>(list, [v = pivot.value](auto x) { return x > v; });
        total = above;
      } else if (above + at >= target) {
        return cut(pivot, target - above);
      } else {
        list = gather<kWeighted>(list, [v = pivot.value](auto x) { return x < v; });
        total -= above + at;
        target -= above + at;
      }
    }
    take<kWeighted>(list, list.n, 1);
    for (size_t i = 0; i < tokens_.size();) {
      const Token& first = tokens_[i];
      double at = 0;
      for (; i < tokens_.size() && tokens_[i].value == first.value; i++) at += tokens_[i].measure;
      if (at >= target) return cut(first, target);
      target -= at;
    }
    return {};  // due to rounding, the total is below the target
  }

  // Takes `count` of the list's tokens, one out of `every`, and sorts them with the largest first.
  template <bool kWeighted>
  void take(const List& list, int64_t count, int64_t every) {
    tokens_.clear();
    for (int64_t i = 0; i < count; i++) tokens_.push_back(token<kWeighted>(list, i * every));
    std::sort(tokens_.begin(), tokens_.end(),
              [](const Token& a, const Token& b) { return a.value > b.value; });
  }

  // Returns a value near the estimated end of the set, moved so far towards the middle of the list that
  // the end is most probably on the smaller side.
  template <bool kWeighted>
  Token choose_pivot(const List& list, double share) {
    const int64_t count = std::clamp<int64_t>(std::sqrt(double(list.n)), 16, 256);
    take<kWeighted>(list, count, list.n / count);
    double total = 0, held = 0;
    for (const Token& token : tokens_) total += token.measure;
    int64_t rank = 0;
    for (; rank + 1 < count; rank++) {
      held += tokens_[rank].measure;
      if (held >= share * total) break;
    }
    const int64_t slack = 1 + 2 * std::sqrt(double(rank * (count - rank)) / count);
    rank += rank < count / 2 ? slack : -slack;
    return tokens_[std::clamp<int64_t>(rank, 0, count - 1)];
  }

  template <bool kWeighted>
  static void measure(const List& list, float pivot, double& above, double& at) {
    const v8 p = splat(pivot), zero = {}, one = splat(1);
    for (int64_t begin = 0; begin < list.n; begin += kRun) {
      const int64_t end = std::min(begin + kRun, list.n);
      v8 more[2] = {}, same[2] = {};
      for (int64_t i = begin; i < end; i += 8) {
        const v8 x = load_first(list.values + i, end - i, NAN);
        const v8 m = kWeighted ? load_first(list.weights + i, end - i, 0) : one;
        more[i / 8 % 2] += x > p ? m : zero;
        same[i / 8 % 2] += x == p ? m : zero;
      }
      above += hsum(more[0] + more[1]);
      at += hsum(same[0] + same[1]);
    }
  }

  // Returns the values that pass, in list order; the result may use the memory of the list.
  template <bool kWeighted, typename Passes>
  List gather(const List& list, Passes passes) {
    if (int64_t(values_.size()) < list.n) values_.resize(list.n), weights_.resize(list.n);
    float *const values = values_.data(), *const weights = weights_.data();
    int64_t n = 0;
    for (int64_t begin = 0; begin < list.n; begin += 8) {
      const int64_t end = std::min(begin + 8, list.n);
      if (!any(passes(load_first(list.values + begin, end - begin, NAN)))) continue;
      for (int64_t i = begin; i < end; i++) {
        const float value = list.values[i];
        const bool passed = passes(value);
        values[n] = value;
        if (kWeighted) weights[n] = list.weights[i];
        n += passed;
      }
    }
    return {values, weights, n};
  }

  std::vector<float> values_, weights_;
  std::vector<Token> tokens_;
};
