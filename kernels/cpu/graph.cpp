// Many calls in one.
#include "vec.h"

struct Call {
  void (*run)(const void* arguments);
  const void* arguments;
  int64_t* rows;  // among the arguments
};

SWELL_API void swell_replay(const Call* calls, int64_t count, int64_t rows) {
  for (int64_t i = 0; i < count; i++) {
    *calls[i].rows = rows;
    calls[i].run(calls[i].arguments);
  }
}
