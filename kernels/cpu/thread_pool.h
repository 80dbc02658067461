// Runs loops in parallel on a thread and its helper threads.
//
// Threads that are awake claim a loop's tasks one by one. The caller waits for tasks that a helper
// has started, never for a helper that has not started: if other processes use the cores, the caller
// does all tasks itself. Between loops, helpers spin for a moment, then sleep.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

// Up to this many multiply-adds, a second thread costs more than it saves.
constexpr int64_t kParallelWork = 1 << 17;

// Tasks per thread: a helper that loses its core delays only one of them.
constexpr int64_t kTasks = 16;

// The tasks of a loop that one thread claims: the caller from the first task forwards, helpers from the
// last task backwards. So each thread works on neighbouring tasks, and the memory that the processor
// prefetches after one task belongs to the thread's next task.
class Tasks {
 public:
  explicit Tasks(int64_t count) : left_(count), count_(count) {}
  Tasks(std::atomic<uint64_t>* shared, bool helps) : shared_(shared), helps_(helps) {}

  // Returns the next task; negative: there is none left.
  int64_t next() {
    if (claimed_) {
      claimed_ = false;
      return task_;
    }
    if (!shared_) return left_ > 0 ? count_ - left_-- : -1;
    return claim() ? task_ : -1;
  }

 private:
  friend class ThreadPool;

  // The word is first << 32 | left: the tasks that no thread has claimed. A loop ends when all claimed
  // tasks are done, so a thread that has claimed a task belongs to this loop.
  bool claim() {
    uint64_t word = shared_->load(std::memory_order_relaxed);
    do {
      if (!(word & kLeft)) return false;
    } while (!shared_->compare_exchange_weak(word, word - 1 + (helps_ ? 0 : kFirst),
                                             std::memory_order_acquire,
                                             std::memory_order_relaxed));
    task_ = (word >> 32) + (helps_ ? (word & kLeft) - 1 : 0);
    taken_++;
    return true;
  }

  static constexpr uint64_t kFirst = uint64_t(1) << 32, kLeft = kFirst - 1;
  std::atomic<uint64_t>* shared_ = nullptr;
  bool helps_ = false;
  bool claimed_ = false;  // task_ is claimed, but not started
  int64_t left_ = 0, count_ = 0, task_ = 0, taken_ = 0;
};

// Returns the setting of the calling thread: torch.get_num_threads().
int64_t num_threads();

// Calls run(body, tasks) on this thread and on its helpers; returns when all tasks are done.
void run_on_threads(int64_t count, void (*run)(const void*, Tasks&), const void* body);

// Calls body(tasks) on each thread that takes part; the body claims tasks until none is left.
// `work`: multiply-adds of the whole loop.
template <typename Body>
void parallel_for(int64_t count, int64_t work, const Body& body) {
  if (work <= kParallelWork || count < 2 || num_threads() < 2) {
    Tasks tasks(count);
    body(tasks);
    return;
  }
  run_on_threads(
      count, [](const void* b, Tasks& tasks) { (*static_cast<const Body*>(b))(tasks); }, &body);
}

// Calls f(i) for each i of [0, count); neighbouring i are in one task.
template <typename F>
void parallel_for_each(int64_t count, int64_t work, const F& f) {
  const int64_t run = std::max<int64_t>(1, count / (kTasks * num_threads()));
  parallel_for((count + run - 1) / run, work, [&](Tasks& tasks) {
    for (int64_t task; (task = tasks.next()) >= 0;)
      for (int64_t i = task * run; i < std::min(count, task * run + run); i++) f(i);
  });
}
