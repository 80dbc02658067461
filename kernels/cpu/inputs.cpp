// A step's inputs, row by row.
#include "vec.h"

struct Tables {
  const int32_t *token_ids, *blocks;  // of slot s: token_ids + s * width, blocks + s * max_blocks
  int64_t slots, width, max_blocks, block_tokens;

  bool holds(int64_t slot, int64_t begin, int64_t end) const {
    return 0 <= slot && slot < slots && 0 <= begin && begin <= end && end <= width &&
           end <= max_blocks * block_tokens;
  }
};

struct Inputs {
  int64_t *input_ids, *positions, *slot_mapping;
  int32_t *query_start, *context_tokens, *block_table;
  int64_t blocks, table_stride;
};

// The number of rows; less, if the row of that index lies outside of the tables.
SWELL_API int64_t swell_gather_inputs(const int64_t* slots, const int64_t* starts,
                                      const int64_t* query_start, int64_t rows,
                                      const Tables* from, const Inputs* to) {
  to->query_start[0] = 0;
  for (int64_t row = 0; row < rows; row++) {
    const int64_t begin = query_start[row], end = query_start[row + 1];
    if (!from->holds(slots[row], starts[row], starts[row] + end - begin)) return row;
    const int32_t* ids = from->token_ids + slots[row] * from->width;
    const int32_t* blocks = from->blocks + slots[row] * from->max_blocks;
    for (int64_t t = begin; t < end; t++) {
      const int64_t position = starts[row] + t - begin;
      to->input_ids[t] = ids[position];
      to->positions[t] = position;
      to->slot_mapping[t] = int64_t(blocks[position / from->block_tokens]) * from->block_tokens +
                            position % from->block_tokens;
    }
    to->query_start[row + 1] = int32_t(end);
    to->context_tokens[row] = int32_t(starts[row] + end - begin);
    std::memcpy(to->block_table + row * to->table_stride, blocks, to->blocks * sizeof(int32_t));
  }
  return rows;
}

// As above; token_ids [slots][width].
SWELL_API int64_t swell_write_tokens(int32_t* token_ids, int64_t slots, int64_t width,
                                     const int64_t* at, const int64_t* positions,
                                     const int64_t* tokens, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    if (at[i] < 0 || at[i] >= slots || positions[i] < 0 || positions[i] >= width) return i;
    token_ids[at[i] * width + positions[i]] = int32_t(tokens[i]);
  }
  return count;
}
