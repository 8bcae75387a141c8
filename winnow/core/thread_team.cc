#include "winnow/core/thread_team.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include <pthread.h>

namespace winnow {
namespace {

using Work = std::function<void(int)>;

// A thread that waits for work. Whoever took it from the pool owns it until it is idle again.
struct Member {
  enum State : int { kIdle, kOffered, kBusy };

  std::atomic<int> state{kIdle};
  const Work* work = nullptr;  // of the offer, as is the number
  int number = 0;
  Member* next = nullptr;  // in the pool, or in the team of a call
  std::mutex mutex;        // is held while the state becomes idle, so that a wait can be timed
  std::condition_variable idle;
};

// How often a waiting thread looks before it sleeps: about 50 microseconds, more than what lies
// between two loops of a call. A thread that has no processor of its own would only be in the way.
constexpr int kLooks = 2000;

void pause_processor() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether the state has become another one than `old`, after some time that is spent awake.
bool looked_past(const Member& member, Member::State old, bool look) {
  for (int i = 0; look && i < kLooks; ++i) {
    if (member.state.load(std::memory_order_acquire) != old) return true;
    pause_processor();
  }
  return member.state.load(std::memory_order_acquire) != old;
}

void wait_for_offer(const Member& member, bool look) {
  if (looked_past(member, Member::kIdle, look)) return;
  while (member.state.load(std::memory_order_acquire) == Member::kIdle) {
    member.state.wait(Member::kIdle, std::memory_order_acquire);
  }
}

void wait_until_idle(Member& member, bool look, const std::function<void()>& meanwhile) {
  if (looked_past(member, Member::kBusy, look)) return;
  constexpr std::chrono::milliseconds kBetweenCalls{50};
  std::unique_lock lock(member.mutex);
  while (!member.idle.wait_for(lock, kBetweenCalls, [&] {
    return member.state.load(std::memory_order_acquire) != Member::kBusy;
  })) {
    lock.unlock();
    meanwhile();
    lock.lock();
  }
}

bool has_processors(int threads) {
  static const unsigned processors = std::thread::hardware_concurrency();
  return static_cast<unsigned>(threads) <= processors;
}

[[noreturn]] void serve(Member& member, bool look) {
  for (;;) {
    wait_for_offer(member, look);
    int offered = Member::kOffered;
    if (!member.state.compare_exchange_strong(offered, Member::kBusy)) continue;  // withdrawn
    (*member.work)(member.number);
    {
      const std::lock_guard lock(member.mutex);
      member.state.store(Member::kIdle, std::memory_order_release);
    }
    member.idle.notify_one();
  }
}

// The idle members of this process. Never destroyed: threads wait on it to the end of the process.
class Pool {
 public:
  // `parents`: the pool of the process that forked this one. Its threads are gone, its memory
  // stays.
  explicit Pool(Pool* parents) : parents_(parents) {}

  // Null if there is no idle member and no thread can be created.
  Member* take(int number) {
    {
      const std::lock_guard lock(mutex_);
      if (Member* member = idle_) {
        idle_ = member->next;
        return member;
      }
    }
    try {
      auto member = std::make_unique<Member>();
      std::thread([&member = *member, look = has_processors(number + 1)] {
        serve(member, look);
      }).detach();
      return member.release();
    } catch (const std::exception&) {
      return nullptr;
    }
  }

  // Gives back a list of members that ends with `last`.
  void give_back(Member* first, Member* last) {
    const std::lock_guard lock(mutex_);
    last->next = idle_;
    idle_ = first;
  }

 private:
  std::mutex mutex_;
  Member* idle_ = nullptr;
  [[maybe_unused]] Pool* const parents_;  // so that nothing is unreachable, which counts as a leak
};

std::atomic<Pool*> g_pool{new Pool(nullptr)};
// The child of a fork() has none of these threads, and the lock may be held by one that is gone.
const int g_fork_handler = pthread_atfork(nullptr, nullptr, [] { g_pool = new Pool(g_pool); });

}  // namespace

void run_on_team(int threads, const Work& work, const std::function<void()>& meanwhile) noexcept {
  Pool& pool = *g_pool;
  Member* first = nullptr;
  Member* last = nullptr;
  for (int number = 1; number < threads; ++number) {
    Member* const member = pool.take(number);
    if (member == nullptr) break;
    member->work = &work;
    member->number = number;
    member->state.store(Member::kOffered, std::memory_order_release);
    member->state.notify_one();
    member->next = first;
    first = member;
    if (last == nullptr) last = member;
  }
  work(0);
  if (first == nullptr) return;
  const bool look = has_processors(threads);
  for (Member* member = first; member != nullptr; member = member->next) {
    int offered = Member::kOffered;
    if (member->state.compare_exchange_strong(offered, Member::kIdle)) continue;  // came too late
    wait_until_idle(*member, look, meanwhile);
  }
  pool.give_back(first, last);
}

}  // namespace winnow
