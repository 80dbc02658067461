// Products of groups of rows with different weights of the same sizes, such as experts.
#pragma once
#include "quantized.h"

struct GroupedRows {
  const void* x;               // [rows][size], group by group
  void* y;                     // [..][outs]
  const int64_t* at;           // [rows]: the places of rows in y; null: their places in x
  const int64_t* starts;       // [groups + 1]: the first row of each group, then the number of rows
  const void* const* weights;  // [groups]
  int64_t groups, size, outs, is_bf16;

  int64_t rows_of(int64_t group) const { return starts[group + 1] - starts[group]; }
};

// Weights are packed in the type of x.
void grouped_linear(const GroupedRows& g);
// Weights are quantized; see `QuantizedArgs` for `integers`.
void grouped_quantized_linear(const GroupedRows& g, const QuantizedForm& form, int64_t integers);
