// A thread pool that runs loops over items together with the calling thread. Knows nothing of the items.

#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

inline void futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// Runs loops over items on the calling thread and its helpers. Each thread has a share of consecutive items, and takes
// items from other shares when its own is empty. So threads rarely touch the same cache line, which would take longer
// than some items. A loop ends when all items are done: a helper that is not scheduled delays it only if it holds an
// item. Helpers without work go to sleep.
class Pool {
 public:
  explicit Pool(int num_threads) : shares_(std::max(1, num_threads)) {
    for (int thread = 1; thread < num_threads; ++thread) helpers_.emplace_back([this, thread] { help(thread); });
  }

  ~Pool() {
    stop_.store(true);
    ring();
    for (auto& helper : helpers_) helper.join();
  }

  // Wakes sleeping helpers. Called ahead of a loop, it hides their wake-up time.
  void wake() {
    if (asleep_.load() && asleep_.exchange(false)) ring();
  }

  template <class Body>
  void loop(int num_items, const Body& body) {
    if (num_items <= 1 || helpers_.empty()) {
      for (int item = 0; item < num_items; ++item) body(item, 0);
      return;
    }
    run_ = [](const void* context, int item, int thread) { (*static_cast<const Body*>(context))(item, thread); };
    context_ = &body;
    const long threads = static_cast<long>(shares_.size());
    for (auto& share : shares_) share.done.store(0, std::memory_order_relaxed);
    for (long thread = 0; thread < threads; ++thread)
      shares_[thread].items.store(num_items * (thread + 1) / threads << 32 | num_items * thread / threads);
    wake();
    while (work(0)) {
    }
    const uint64_t begin = __rdtsc();
    while (num_done() != num_items) {
      if (__rdtsc() - begin > kPatience) sched_yield();
    }
  }

 private:
  struct alignas(64) Share {
    std::atomic<uint64_t> items{0};  // end (upper half) and next (lower half) of the items not yet taken
    alignas(64) std::atomic<int> done{0};  // items done by the share's thread, from any share
  };

  static constexpr uint64_t kPatience = 100'000;  // about 40 us in cycles: spin time of an idle helper, and of the caller at the end of a loop
  static constexpr uint64_t kNext = 0xffffffff;

  void ring() {
    bell_.fetch_add(1);
    futex(&bell_, FUTEX_WAKE, INT32_MAX);
  }

  int num_done() const {
    int sum = 0;
    for (const auto& share : shares_) sum += share.done.load(std::memory_order_acquire);
    return sum;
  }

  static bool is_left(uint64_t items) { return (items & kNext) < items >> 32; }

  // Does one item, from the thread's own share if possible. Returns false when no item is left.
  bool work(int thread) {
    for (size_t offset = 0; offset < shares_.size(); ++offset) {
      auto& items = shares_[(thread + offset) % shares_.size()].items;
      if (!is_left(items.load())) continue;
      const uint64_t taken = items.fetch_add(1);
      if (!is_left(taken)) continue;
      run_(context_, static_cast<int>(taken & kNext), thread);  // the loop cannot end before this item is done
      shares_[thread].done.fetch_add(1, std::memory_order_release);
      return true;
    }
    return false;
  }

  bool has_items() const {
    return std::any_of(shares_.begin(), shares_.end(), [](const Share& share) { return is_left(share.items.load()); });
  }

  void help(int thread) {
    uint64_t last = __rdtsc();
    while (!stop_.load(std::memory_order_relaxed)) {
      if (work(thread)) {
        last = __rdtsc();
      } else if (__rdtsc() - last > kPatience) {
        const uint32_t bell = bell_.load();
        asleep_.store(true);
        if (!has_items() && !stop_.load()) futex(&bell_, FUTEX_WAIT, bell);
        last = __rdtsc();
      }
    }
  }

  std::vector<Share> shares_;
  std::vector<std::thread> helpers_;
  void (*run_)(const void*, int, int) = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> bell_{0};
  std::atomic<bool> asleep_{false};
  std::atomic<bool> stop_{false};
};

}  // namespace
