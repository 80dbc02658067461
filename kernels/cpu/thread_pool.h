// Loops shared by a thread and its helpers.
//
// A loop's tasks are taken one by one by whoever is awake. The caller waits for tasks that a helper
// has begun, never for a helper that has not come: where other processes want the cores, it goes on
// alone meanwhile. Between loops helpers stay awake for a moment, then sleep.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

// Below this many multiply-adds a second thread costs more than it brings.
constexpr int64_t kParallelWork = 1 << 17;

// Tasks of a thread: a helper that loses its core keeps one of them.
constexpr int64_t kTasks = 16;

// What one thread takes of a loop: the caller from the first on, helpers from the last back, so that
// each stays among neighbours, and what it fetches beyond a task is its own next one.
class Tasks {
 public:
  explicit Tasks(int64_t count) : left_(count), count_(count) {}
  Tasks(std::atomic<uint64_t>* shared, bool helps) : shared_(shared), helps_(helps) {}

  // The next task; negative: there is none left.
  int64_t next() {
    if (ahead_) {
      ahead_ = false;
      return task_;
    }
    if (!shared_) return left_ > 0 ? count_ - left_-- : -1;
    return claim() ? task_ : -1;
  }

 private:
  friend class ThreadPool;

  // The word is first << 32 | left: the tasks that nobody has begun. A loop ends when all that were
  // begun are done, so whoever has claimed one is of this loop.
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
  bool ahead_ = false;  // task_ is claimed, but not begun
  int64_t left_ = 0, count_ = 0, task_ = 0, taken_ = 0;
};

// Of the calling thread: torch.get_num_threads().
int64_t num_threads();

// Calls run(body, tasks) on this thread and on helpers that come; returns when all tasks are done.
void run_on_threads(int64_t count, void (*run)(const void*, Tasks&), const void* body);

// body(tasks) on each thread that takes part: it has to take tasks until there are none left.
template <typename Body>
void share(int64_t count, int64_t work, const Body& body) {
  if (work <= kParallelWork || count < 2 || num_threads() < 2) {
    Tasks tasks(count);
    body(tasks);
    return;
  }
  run_on_threads(
      count, [](const void* b, Tasks& tasks) { (*static_cast<const Body*>(b))(tasks); }, &body);
}

// f(i) for each i of [0, count), neighbours together.
template <typename F>
void parallel_for_each(int64_t count, int64_t work, const F& f) {
  const int64_t run = std::max<int64_t>(1, count / (kTasks * num_threads()));
  share((count + run - 1) / run, work, [&](Tasks& tasks) {
    for (int64_t task; (task = tasks.next()) >= 0;)
      for (int64_t i = task * run; i < std::min(count, task * run + run); i++) f(i);
  });
}
