// The largest of a few numbers.
#pragma once
#include <algorithm>

#include "vec.h"

// Copies `count` numbers from number `from` on.
SWELL_INLINE void copy_as_floats(const void* x, bool is_bf16, int64_t from, int64_t count, float* to) {
  if (!is_bf16) {
    std::memcpy(to, static_cast<const float*>(x) + from, count * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    const uint32_t bits = uint32_t(static_cast<const bf16*>(x)[from + i].bits) << 16;
    std::memcpy(to + i, &bits, sizeof bits);
  }
}

// Sets `chosen` to the places of the k largest of `count` numbers, in descending order, of equal ones
// the first; NaN is the largest.
inline void pick_top(const float* x, int64_t count, int64_t k, int64_t* chosen) {
  const auto is_larger = [](float a, float b) { return a > b || (a != a && b == b); };
  int64_t found = 0;
  for (int64_t i = 0; i < count; i++) {
    if (found == k && !is_larger(x[i], x[chosen[k - 1]])) continue;
    int64_t at = found < k ? found++ : k - 1;
    for (; at && is_larger(x[i], x[chosen[at - 1]]); at--) chosen[at] = chosen[at - 1];
    chosen[at] = i;
  }
}
