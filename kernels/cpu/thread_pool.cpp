#include "thread_pool.h"

#include <omp.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;

// How long a thread spins before it sleeps. A helper spins between the loops of a step, but not
// between steps, when other processes have work. The caller spins while it waits for the last task.
constexpr auto kHelperWait = std::chrono::microseconds(50);
constexpr auto kCallerWait = std::chrono::microseconds(20);

template <typename Ready>
bool spin(Clock::duration longest, const Ready& ready) {
  if (ready()) return true;
  const auto end = Clock::now() + longest;
  do {
    for (int i = 0; i < 16; i++) {
      if (ready()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
  } while (Clock::now() < end);
  return false;
}

}  // namespace

class ThreadPool {
 public:
  explicit ThreadPool(int64_t size) : size(size), state_(std::make_shared<State>()) {
    for (int64_t i = 1; i < size; i++)
      std::thread([state = state_] { state->help(); }).detach();
  }
  ~ThreadPool() { state_->end(); }

  void run_tasks(int64_t count, void (*run)(const void*, Tasks&), const void* body) {
    state_->run_tasks(count, run, body);
  }

  const int64_t size;

 private:
  // Shared with the helpers, so it exists until the last of them has stopped. The pool does not join
  // them: in a forked process they do not exist.
  struct State {
    alignas(64) std::atomic<uint64_t> word{0};
    alignas(64) std::atomic<int64_t> done{0};  // tasks of this loop that helpers have done
    std::atomic<int> asleep{0};
    std::atomic<bool> ended{false}, caller_asleep{false};
    void (*run)(const void*, Tasks&) = nullptr;
    const void* body = nullptr;
    std::mutex mutex;
    std::condition_variable begun, finished;

    bool has_work() const { return word.load() & Tasks::kLeft; }

    void run_tasks(int64_t count, void (*what)(const void*, Tasks&), const void* of) {
      run = what, body = of;
      done.store(0, std::memory_order_relaxed);
      word.store(uint64_t(count));
      if (asleep.load()) {
        { std::lock_guard<std::mutex> lock(mutex); }
        begun.notify_all();
      }
      Tasks tasks(&word, false);
      run(body, tasks);
      const auto all_done = [&] { return done.load() == count - tasks.taken_; };
      if (spin(kCallerWait, all_done)) return;
      std::unique_lock<std::mutex> lock(mutex);
      caller_asleep.store(true);
      finished.wait(lock, all_done);
      caller_asleep.store(false);
    }

    void help() {
      while (wait_for_work()) {
        Tasks tasks(&word, true);
        if (!tasks.claim()) continue;
        tasks.claimed_ = true;  // run and body stay valid from here on: the caller waits
        run(body, tasks);
        done.fetch_add(tasks.taken_);
        if (caller_asleep.load()) {
          { std::lock_guard<std::mutex> lock(mutex); }
          finished.notify_one();
        }
      }
    }

    bool wait_for_work() {
      const auto ready = [&] { return has_work() || ended.load(); };
      if (!spin(kHelperWait, ready)) {
        std::unique_lock<std::mutex> lock(mutex);
        asleep.fetch_add(1);
        begun.wait(lock, ready);
        asleep.fetch_sub(1);
      }
      return !ended.load();
    }

    void end() {
      {
        std::lock_guard<std::mutex> lock(mutex);
        ended.store(true);
      }
      begun.notify_all();
    }
  };

  std::shared_ptr<State> state_;
};

int64_t num_threads() { return omp_get_max_threads(); }

void run_on_threads(int64_t count, void (*run)(const void*, Tasks&), const void* body) {
  static thread_local std::unique_ptr<ThreadPool> pool;
  if (!pool || pool->size != num_threads()) pool = std::make_unique<ThreadPool>(num_threads());
  pool->run_tasks(count, run, body);
}
