// The arguments of activations, and those that other sources call.
#pragma once
#include "vec.h"

struct ActivationArgs {
  const void* x;  // [rows, size]; with a gate [rows, 2 * size]
  void* out;
  int64_t rows, size, is_bf16;
};

SWELL_API void swell_silu_and_mul(const ActivationArgs* a);
