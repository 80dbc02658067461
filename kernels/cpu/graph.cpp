// Many calls in one.
#include "vec.h"

struct Call {
  void (*run)(const void* arguments);
  const void* arguments;
  int64_t* rows;  // among the arguments
  int64_t size;   // which of the sizes it is
};

SWELL_API void swell_replay(const Call* calls, int64_t count, const int64_t* sizes,
                            volatile int64_t* progress) {
  for (int64_t i = 0; i < count; i++) {
    *calls[i].rows = sizes[calls[i].size];
    calls[i].run(calls[i].arguments);
    *progress = *progress + 1;
  }
}
