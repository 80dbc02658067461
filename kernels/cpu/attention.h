// The arguments of attention, and the order in which it reads the cache.
#pragma once
#include <algorithm>

#include "cache.h"
#include "vec.h"

struct AttentionArgs {
  const void* q;  // [T, heads, head_dim], tokens q_stride elements apart
  const void* k_cache;  // blocks block_stride elements apart (see cache.h)
  const void* v_cache;
  void* out;  // [T, heads, head_dim]
  const int32_t* query_start;
  const int32_t* context_tokens;
  const int32_t* block_table;
  int64_t rows, heads, kv_heads, head_dim, block_tokens, table_stride, q_stride;
  int64_t k_block_stride, v_block_stride, window, lookahead, is_bf16, is_int8, is_float8;
  float scale, softcap;
};

constexpr int64_t kTileTokens = 64;
constexpr int64_t kPrefetch = 2;  // how many blocks ahead of the reading a block is prefetched

struct WorkItem {
  int32_t row, first, count;  // the row's tokens first .. first + count - 1
  int32_t head;  // the KV head
};

// The keys that an item reads: [low, end), in tiles that start at `base`, base + tile, ...
struct KeyRange {
  const int32_t* table = nullptr;
  int64_t position = 0;  // position of the item's first token
  int64_t head = 0, tile = 0, base = 0, low = 0, end = 0;

  KeyRange() = default;
  KeyRange(const AttentionArgs& a, const WorkItem& item) {
    const int64_t tokens = a.query_start[item.row + 1] - a.query_start[item.row];
    table = a.block_table + item.row * a.table_stride;
    head = item.head;
    position = a.context_tokens[item.row] - tokens + item.first;
    tile = std::max<int64_t>(1, kTileTokens / a.block_tokens) * a.block_tokens;
    low = a.window > 0 ? std::max<int64_t>(0, position - a.window + 1) : 0;
    base = low / tile * tile;
    end = std::min<int64_t>(a.context_tokens[item.row], position + item.count + a.lookahead);
  }

  // Returns this head's part of block `index`, in a cache whose blocks are `stride` elements apart.
  template <typename T>
  const T* block(const AttentionArgs& a, const void* cache, int64_t stride, int64_t index) const {
    const int64_t part = a.block_tokens * a.head_dim + scale_elements<T>(a.block_tokens);
    return static_cast<const T*>(cache) + table[index] * stride + head * part;
  }
};

// Prefetches one vector of a later block; called for each vector that is read from the current block.
// The processor does not predict the next block, and prefetching all of it at once would fill its
// queues. null: does nothing.
template <typename T>
SWELL_INLINE void prefetch(const T* from, int64_t elements) {
  const char* p = reinterpret_cast<const char*>(from);
  if (p)
    for (int64_t i = 0; i < elements * int64_t(sizeof(T)); i += 64) __builtin_prefetch(p + i, 0, 2);
}

// Iterates over the blocks of one item after the other, in the order in which they are read (for each
// tile first K, then V), but kPrefetch blocks ahead of the reading.
template <typename T>
class BlockIterator {
 public:
  explicit BlockIterator(const AttentionArgs& args) : a_(args) {}

  // Called when the reading of an item begins; `next`: the item after it, if known.
  void follow(const WorkItem& item, const WorkItem* next) {
    next_ = next;
    if (entered_ == &item) return;
    enter(item);
    const int64_t part = a_.block_tokens * a_.head_dim + scale_elements<T>(a_.block_tokens);
    for (int64_t i = 0; i < kPrefetch; i++) prefetch(this->next(), part);
  }

  // Returns the next block; null: no further block is known yet.
  const T* next() {
    while (index_ == stop_)
      if (!turn()) return nullptr;
    const int64_t index = index_++;
    return values_ ? at_.block<T>(a_, a_.v_cache, a_.v_block_stride, index)
                   : at_.block<T>(a_, a_.k_cache, a_.k_block_stride, index);
  }

 private:
  void enter(const WorkItem& item) {
    entered_ = &item;
    at_ = KeyRange(a_, item);
    values_ = false;
    tile();
  }

  void tile() {
    index_ = std::max(at_.base, at_.low) / a_.block_tokens;
    stop_ = (std::min(at_.base + at_.tile, at_.end) + a_.block_tokens - 1) / a_.block_tokens;
  }

  // Continues from K to V, to the next tile, or to the next item.
  bool turn() {
    values_ = !values_;
    if (!values_) at_.base += at_.tile;
    if (at_.base < at_.end) {
      tile();
      return true;
    }
    values_ = true;  // so that the next turn enters the next item
    at_.base = at_.end;
    if (!next_) return false;
    enter(*next_);
    next_ = nullptr;
    return true;
  }

  const AttentionArgs& a_;
  const WorkItem *entered_ = nullptr, *next_ = nullptr;
  KeyRange at_;
  int64_t index_ = 0, stop_ = 0;
  bool values_ = false;
};
