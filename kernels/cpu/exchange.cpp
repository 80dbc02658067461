// Collective operations between processes of one machine, through a region of shared memory.
//
//   region   [ state ][ arrival of each rank ][ slots of rank 0 ][ slots of rank 1 ] ...
//
// An operation has steps. In step s, each rank writes a part of its tensor into its slot s % 2, counts
// s as its arrival, waits until all ranks have counted s, and reads their slots. A rank that writes
// slot s % 2 again, in step s + 2, has seen that all ranks arrived at s + 1, so they have read step s.
#include <algorithm>
#include <atomic>
#include <climits>
#include <ctime>

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vec.h"

namespace {

constexpr int64_t kLine = 64;       // bytes of a cache line: ranks do not write to the same one
constexpr int kSpins = 4000;        // some 100 us, longer than a peer usually needs
constexpr int64_t kLookNs = 50000000;  // how often a waiting rank looks for lost peers

enum Failure : int64_t { kNone = 0, kAborted = 1, kLost = 2, kLate = 3 };

struct Counter {
  std::atomic<uint32_t> value, sleepers;
};
static_assert(sizeof(Counter) <= kLine, "a counter has a line of its own");

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * int64_t(1000000000) + t.tv_nsec;
}

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void wake(Counter* counter) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&counter->value), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void sleep_on(Counter* counter, uint32_t seen) {
  const timespec limit{0, kLookNs};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&counter->value), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

}  // namespace

struct Exchange {
  uint8_t* region;
  const int64_t* processes;  // of each rank: a descriptor, readable once the process has ended
  int64_t rank, ranks, slot_bytes, timeout_ns;
  int64_t step;
  int64_t failure;   // a Failure; the following operations do nothing
  int64_t lost;      // the first rank that was lost or late
};

namespace {

std::atomic<uint32_t>* aborted(const Exchange* x) {
  return reinterpret_cast<std::atomic<uint32_t>*>(x->region);
}

Counter* arrival(const Exchange* x, int64_t rank) {
  return reinterpret_cast<Counter*>(x->region + kLine * (1 + rank));
}

uint8_t* slot(const Exchange* x, int64_t rank) {
  const int64_t start = kLine * (1 + x->ranks);
  return x->region + start + (rank * 2 + (x->step & 1)) * x->slot_bytes;
}

bool has_ended(int64_t process) {
  pollfd descriptor{int(process), POLLIN, 0};
  return poll(&descriptor, 1, 0) > 0;
}

bool has_arrived(uint32_t value, uint32_t step) { return int32_t(value - step) >= 0; }

// Waits until a rank has arrived at this step. Returns false, and notes the failure, if it does not.
bool wait_for(Exchange* x, int64_t rank) {
  Counter* counter = arrival(x, rank);
  const uint32_t step = uint32_t(x->step);
  for (int i = 0; i < kSpins; i++) {
    if (has_arrived(counter->value.load(std::memory_order_acquire), step)) return true;
    pause_core();
  }
  const int64_t deadline = now_ns() + x->timeout_ns;
  bool arrived = false;
  counter->sleepers.fetch_add(1);
  while (true) {
    const uint32_t value = counter->value.load();
    arrived = has_arrived(value, step);
    if (arrived) break;
    const Failure failure = aborted(x)->load()            ? kAborted
                            : has_ended(x->processes[rank]) ? kLost
                            : now_ns() > deadline           ? kLate
                                                            : kNone;
    if (failure) {
      arrived = has_arrived(counter->value.load(), step);  // it may have arrived and then left
      if (!arrived) x->failure = failure;
      break;
    }
    sleep_on(counter, value);
  }
  counter->sleepers.fetch_sub(1);
  if (!arrived) x->lost = rank;
  return arrived;
}

// Counts this rank's arrival, and waits for those of the others.
bool meet(Exchange* x) {
  Counter* own = arrival(x, x->rank);
  own->value.store(uint32_t(x->step));
  if (own->sleepers.load()) wake(own);
  for (int64_t rank = 0; rank < x->ranks; rank++)
    if (rank != x->rank && !wait_for(x, rank)) return false;
  return true;
}

template <typename T>
void add_up(Exchange* x, T* data, int64_t count) {
  const int64_t most = x->slot_bytes / int64_t(sizeof(T));
  for (int64_t start = 0; start < count; start += most) {
    const int64_t n = std::min(most, count - start), full = n & ~int64_t(7), tail = n - full;
    T* part = data + start;
    x->step++;
    std::memcpy(slot(x, x->rank), part, n * sizeof(T));
    if (!meet(x)) return;
    const auto at = [&](int64_t rank, int64_t i) {
      const T* from = reinterpret_cast<const T*>(slot(x, rank)) + i;
      return i < full ? load(from) : load_part(from, tail);
    };
    for (int64_t i = 0; i < n; i += 8) {
      v8 sum = at(0, i);
      for (int64_t rank = 1; rank < x->ranks; rank++) sum += at(rank, i);
      i < full ? store(part + i, sum) : store_part(part + i, sum, tail);
    }
  }
}

}  // namespace

struct AllReduceArgs {
  Exchange* exchange;
  void* data;  // [rows, size]
  int64_t rows, size, is_bf16;
};

// Replaces each element by its sum over the ranks, added in float32 in rank order.
SWELL_API void swell_all_reduce(const AllReduceArgs* a) {
  if (a->exchange->failure) return;
  const int64_t count = a->rows * a->size;
  a->is_bf16 ? add_up(a->exchange, static_cast<bf16*>(a->data), count)
             : add_up(a->exchange, static_cast<float*>(a->data), count);
}

struct AllGatherArgs {
  Exchange* exchange;
  const void* in;  // [rows, row_bytes]
  void* out;       // [rows, ranks, row_bytes]
  int64_t rows, row_bytes;
};

// Puts the rows of all ranks side by side.
SWELL_API void swell_all_gather(const AllGatherArgs* a) {
  Exchange* x = a->exchange;
  if (x->failure) return;
  const uint8_t* in = static_cast<const uint8_t*>(a->in);
  uint8_t* out = static_cast<uint8_t*>(a->out);
  const int64_t total = a->rows * a->row_bytes;
  for (int64_t start = 0; start < total; start += x->slot_bytes) {
    const int64_t n = std::min(x->slot_bytes, total - start);
    x->step++;
    std::memcpy(slot(x, x->rank), in + start, n);
    if (!meet(x)) return;
    for (int64_t rank = 0; rank < x->ranks; rank++) {
      const uint8_t* from = slot(x, rank);
      for (int64_t done = 0; done < n;) {  // each part of a row
        const int64_t row = (start + done) / a->row_bytes, column = (start + done) % a->row_bytes;
        const int64_t bytes = std::min(a->row_bytes - column, n - done);
        std::memcpy(out + (row * x->ranks + rank) * a->row_bytes + column, from + done, bytes);
        done += bytes;
      }
    }
  }
}

// Makes operations in flight fail, at all ranks. May be called from any thread.
SWELL_API void swell_abort_exchange(const Exchange* x) {
  aborted(x)->store(1);
  for (int64_t rank = 0; rank < x->ranks; rank++) wake(arrival(x, rank));
}
