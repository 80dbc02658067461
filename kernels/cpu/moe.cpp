// Mixture of experts: the choice of experts, their products, and the weighted sum of their outputs.
#include <vector>

#include "activation.h"
#include "grouped.h"
#include "thread_pool.h"
#include "topk.h"

namespace {

// How many choices are computed at a time, so that their inputs and outputs need little memory.
constexpr int64_t kChoices = 2048;

// Sets e[0 .. count) to exp(x - largest), and returns the sum; e has room for whole vectors.
float exponentials(const float* x, int64_t count, float largest, float* e) {
  const int64_t full = count & ~int64_t(7), tail = count - full;
  v8 sums = {};
  for (int64_t i = 0; i < full; i += 8) {
    const v8 v = vexp(load(x + i) - splat(largest));
    store(e + i, v);
    sums += v;
  }
  if (tail) {
    store(e + full, vexp(load_part(x + full, tail) - splat(largest)));
    sums += load_part(e + full, tail);
  }
  return hsum(sums);
}

}  // namespace

struct RouteArgs {
  const void* logits;    // [rows, experts]
  const int64_t* slots;  // [rows], -1: padding; null: there is none
  float* weights;        // [rows, top_k]
  int64_t* chosen;       // [rows, top_k]
  int64_t rows, experts, top_k, renormalize, is_bf16;
};

SWELL_API void swell_route(const RouteArgs* a) {
  const int64_t top_k = a->top_k;
  parallel_for_each(a->rows, a->rows * a->experts * 8, [=](int64_t t) {
    float* weights = a->weights + t * top_k;
    int64_t* chosen = a->chosen + t * top_k;
    if (a->slots && a->slots[t] < 0) {
      std::fill_n(weights, top_k, 0.0f);
      std::fill_n(chosen, top_k, -1);
      return;
    }
    static thread_local std::vector<float> logits, powers;
    logits.resize(a->experts);
    powers.resize(a->experts + 7);
    copy_as_floats(a->logits, a->is_bf16, t * a->experts, a->experts, logits.data());
    pick_top(logits.data(), a->experts, top_k, chosen);
    const float largest = logits[chosen[0]];
    if (!std::isfinite(largest)) {
      std::fill_n(weights, top_k, NAN);
      return;
    }
    const float sum = exponentials(logits.data(), a->experts, largest, powers.data());
    float total = 0;
    for (int64_t j = 0; j < top_k; j++) total += weights[j] = powers[chosen[j]] / sum;
    if (a->renormalize)
      for (int64_t j = 0; j < top_k; j++) weights[j] /= total;
  });
}

// `bits`: 0: weights are packed floats.
struct ExpertForm {
  QuantizedForm form;
  int64_t integers;
};

struct ExpertsArgs {
  const void* x;             // [rows, hidden]
  const int64_t* chosen;     // [rows, top_k]
  const int64_t* addresses;  // [2, experts]: gate over up, then down; 0: the expert is not held
  void* out;                 // [rows, top_k, hidden]
  int64_t rows, top_k, experts, hidden, size, x_stride, is_bf16;
  ExpertForm of_gate_up, of_down;
};

namespace {

// Choices in the order of their experts: those of expert e are order[ends[e - 1]] .. order[ends[e] - 1].
struct Sorted {
  std::vector<int64_t> order, ends;

  void sort(const ExpertsArgs* a) {
    const int64_t choices = a->rows * a->top_k;
    const auto is_held = [=](int64_t e) { return e >= 0 && e < a->experts && a->addresses[e]; };
    ends.assign(a->experts + 1, 0);
    for (int64_t i = 0; i < choices; i++)
      if (is_held(a->chosen[i])) ends[a->chosen[i] + 1]++;
    for (int64_t e = 0; e < a->experts; e++) ends[e + 1] += ends[e];
    order.resize(ends.back());
    for (int64_t i = 0; i < choices; i++)
      if (is_held(a->chosen[i])) order[ends[a->chosen[i]]++] = i;
  }
  int64_t begin(int64_t e) const { return e ? ends[e - 1] : 0; }
};

void grouped_products(const GroupedRows& g, const ExpertForm& f) {
  if (f.form.bits)
    grouped_quantized_linear(g, f.form, f.integers);
  else
    grouped_linear(g);
}

template <typename T>
void expert_outputs(const ExpertsArgs* a) {
  static thread_local Sorted sorted;
  static thread_local std::vector<int64_t> starts;
  static thread_local std::vector<const void*> gate_ups, downs;
  static thread_local std::vector<T> inputs, gate_up, activated;
  sorted.sort(a);
  const int64_t all = int64_t(sorted.order.size()), hidden = a->hidden, size = a->size;
  for (int64_t from = 0; from < all; from += kChoices) {
    const int64_t to = std::min(all, from + kChoices), count = to - from;
    starts.clear(), gate_ups.clear(), downs.clear();
    for (int64_t e = 0; e < a->experts; e++) {
      const int64_t begin = std::max(sorted.begin(e), from), end = std::min(sorted.ends[e], to);
      if (begin >= end) continue;
      starts.push_back(begin - from);
      gate_ups.push_back(reinterpret_cast<const void*>(a->addresses[e]));
      downs.push_back(reinterpret_cast<const void*>(a->addresses[a->experts + e]));
    }
    starts.push_back(count);
    inputs.resize(count * hidden), gate_up.resize(count * 2 * size), activated.resize(count * size);
    const int64_t *at = sorted.order.data() + from, groups = int64_t(downs.size());
    T* rows = inputs.data();
    parallel_for_each(count, count * hidden, [=](int64_t i) {
      const T* x = static_cast<const T*>(a->x) + at[i] / a->top_k * a->x_stride;
      std::memcpy(rows + i * hidden, x, hidden * sizeof(T));
    });
    grouped_products({rows, gate_up.data(), nullptr, starts.data(), gate_ups.data(), groups, hidden,
                      2 * size, a->is_bf16},
                     a->of_gate_up);
    const ActivationArgs activation{gate_up.data(), activated.data(), count, size, a->is_bf16};
    swell_silu_and_mul(&activation);
    grouped_products({activated.data(), a->out, at, starts.data(), downs.data(), groups, size, hidden,
                      a->is_bf16},
                     a->of_down);
  }
}

}  // namespace

SWELL_API void swell_expert_outputs(const ExpertsArgs* a) {
  a->is_bf16 ? expert_outputs<bf16>(a) : expert_outputs<float>(a);
}

struct CombineArgs {
  const void* outputs;  // [rows, top_k, hidden]
  const void* weights;  // [rows, top_k]
  void* out;            // [rows, hidden]
  int64_t rows, top_k, hidden, is_bf16, weights_are_bf16;
};

namespace {

template <typename T>
void combine(const CombineArgs* a) {
  const int64_t hidden = a->hidden, top_k = a->top_k;
  parallel_for_each(a->rows, a->rows * top_k * hidden, [=](int64_t t) {
    static thread_local std::vector<float> weights;
    weights.resize(top_k);
    copy_as_floats(a->weights, a->weights_are_bf16, t * top_k, top_k, weights.data());
    const float* factors = weights.data();
    const T* from = static_cast<const T*>(a->outputs) + t * top_k * hidden;
    T* out = static_cast<T*>(a->out) + t * hidden;
    for (int64_t i = 0; i < hidden; i += 8) {
      const int64_t left = hidden - i;
      const auto term = [=](int64_t j) {
        const T* at = from + j * hidden + i;
        return left >= 8 ? load(at) : load_part(at, left);
      };
      v8 total = term(0) * splat(factors[0]);
      for (int64_t j = 1; j < top_k; j++) total = fused(term(j), splat(factors[j]), total);
      left >= 8 ? store(out + i, total) : store_part(out + i, total, left);
    }
  });
}

}  // namespace

SWELL_API void swell_combine_experts(const CombineArgs* a) {
  a->is_bf16 ? combine<bf16>(a) : combine<float>(a);
}
