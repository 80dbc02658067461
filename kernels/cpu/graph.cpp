// Replays recorded calls.
#include "vec.h"

struct Call {
  void (*run)(const void* arguments);
  const void* arguments;
  int64_t* rows;  // the argument with the number of rows
  int64_t size;   // index of the size to which `rows` is set; -1: it stays as it is
};

struct ReplayArgs {
  const Call* calls;
  int64_t count;
  const int64_t* sizes;
  volatile int64_t progress;  // calls made so far, by all replays
};

SWELL_API void swell_replay(ReplayArgs* a) {
  for (const Call* call = a->calls; call < a->calls + a->count; call++) {
    if (call->size >= 0) *call->rows = a->sizes[call->size];
    call->run(call->arguments);
    a->progress = a->progress + 1;
  }
}
