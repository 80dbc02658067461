// Fills a step's inputs, row by row.
#include <algorithm>

#include "vec.h"

struct GatherArgs {
  const int64_t* columns;  // [4][room_rows]: slots, starts, counts, samples of each row
  const int32_t *token_ids, *blocks;  // of slot s: token_ids + s * width, blocks + s * max_blocks
  int64_t slots, width, max_blocks, block_tokens;
  int64_t *input_ids, *positions, *slot_mapping;
  int32_t *query_start, *context_tokens, *block_table;  // block_table [room_rows][max_blocks]
  int64_t* samples;  // [3][room_samples]: index of the token before, slot, position
  int64_t room_tokens, room_rows, room_samples;
  int64_t padded_tokens, padded_rows, padded_samples;  // 0: not padded
  int64_t tokens, samples_count, max_query, max_context;  // results

  bool holds(int64_t slot, int64_t begin, int64_t end, int64_t sampled) const {
    return 0 <= slot && slot < slots && 0 <= begin && begin <= end && end + (sampled > 0) <= width &&
           end <= max_blocks * block_tokens && sampled <= std::max<int64_t>(end - begin, 1);
  }

  void pad(int64_t rows) const {
    for (int64_t t = tokens; t < padded_tokens; t++) {
      input_ids[t] = positions[t] = 0;
      slot_mapping[t] = -1;
    }
    for (int64_t row = rows; row < padded_rows; row++) {
      query_start[row + 1] = int32_t(tokens);
      context_tokens[row] = 0;
    }
    for (int64_t s = samples_count; s < padded_samples; s++) {
      samples[s] = samples[2 * room_samples + s] = 0;
      samples[room_samples + s] = -1;
    }
  }
};

// Returns the number of rows. A smaller result is the index of a row that is outside of the tables,
// or that exceeds the room for tokens or samples: then `tokens` or `samples_count` exceeds it, too.
SWELL_API int64_t swell_gather_inputs(GatherArgs* a, int64_t rows) {
  const int64_t *slots = a->columns, *starts = slots + a->room_rows;
  const int64_t *counts = starts + a->room_rows, *sampling = counts + a->room_rows;
  a->tokens = a->samples_count = a->max_query = a->max_context = 0;
  a->query_start[0] = 0;
  for (int64_t row = 0; row < rows; row++) {
    const int64_t first = a->tokens, begin = starts[row], end = begin + counts[row];
    if (!a->holds(slots[row], begin, end, sampling[row])) return row;
    a->tokens += counts[row];
    const int64_t first_sample = a->samples_count;
    a->samples_count += sampling[row];
    if (a->tokens > a->room_tokens || a->samples_count > a->room_samples) return row;
    const int32_t* ids = a->token_ids + slots[row] * a->width;
    const int32_t* blocks = a->blocks + slots[row] * a->max_blocks;
    for (int64_t p = begin, t = first; p < end; p++, t++) {
      a->input_ids[t] = ids[p];
      a->positions[t] = p;
      a->slot_mapping[t] =
          int64_t(blocks[p / a->block_tokens]) * a->block_tokens + p % a->block_tokens;
    }
    a->query_start[row + 1] = int32_t(a->tokens);
    a->context_tokens[row] = int32_t(end);
    const int64_t used = (end + a->block_tokens - 1) / a->block_tokens;
    std::memcpy(a->block_table + row * a->max_blocks, blocks, used * sizeof(int32_t));
    for (int64_t back = sampling[row] - 1, s = first_sample; back >= 0; back--, s++) {
      const int64_t sample[] = {a->tokens - 1 - back, slots[row], end - back};
      for (int i = 0; i < 3; i++) a->samples[i * a->room_samples + s] = sample[i];
    }
    a->max_query = std::max(a->max_query, counts[row]);
    a->max_context = std::max(a->max_context, end);
  }
  a->pad(rows);
  return rows;
}

struct WriteArgs {
  int32_t* token_ids;  // [slots][width]
  const int64_t *at, *positions, *tokens;
  int64_t slots, width, count;
  int64_t written;  // less than `count`: the token with that index is outside of the table
};

SWELL_API void swell_write_tokens(WriteArgs* a) {
  for (int64_t i = a->written = 0; i < a->count; a->written = ++i) {
    const int64_t slot = a->at[i], position = a->positions[i];
    if (slot == -1) continue;  // padding
    if (slot < 0 || slot >= a->slots || position < 0 || position >= a->width) return;
    a->token_ids[slot * a->width + position] = int32_t(a->tokens[i]);
  }
}
