#include "winnow/expert_parallel/testing/ranks.h"

#include <string>
#include <system_error>

#include "winnow/core/error.h"

namespace winnow::expert_parallel {
namespace {

bool is_timeout(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    return error.code() == ErrorCode::timeout;
  } catch (...) {
    return false;
  }
}

}  // namespace

RankTeam::RankTeam(int world_size) : world_(world_size) {
  try {
    for (int rank = 0; rank < world_size; ++rank) {
      threads_.emplace_back([this, rank] { work(rank); });
    }
  } catch (const std::system_error& error) {
    end();
    throw Error(ErrorCode::resource, "expert_parallel",
                "no thread for each of " + std::to_string(world_size) + " ranks: " + error.what());
  }
}

RankTeam::~RankTeam() { end(); }

void RankTeam::end() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void RankTeam::work(int rank) {
  const std::shared_ptr<Transport> transport = world_.transport(rank);
  std::unique_lock lock(mutex_);
  for (int done = 0;; ++done) {
    changed_.wait(lock, [&] { return ended_ || runs_ > done; });
    if (runs_ == done) return;
    const RankBody& body = *body_;
    lock.unlock();
    std::exception_ptr thrown;
    try {
      body(rank, transport);
    } catch (...) {
      thrown = std::current_exception();
    }
    lock.lock();
    thrown_[static_cast<std::size_t>(rank)] = thrown;
    if (--running_ == 0) changed_.notify_all();
  }
}

std::vector<std::exception_ptr> RankTeam::try_run(const RankBody& body) {
  std::unique_lock lock(mutex_);
  body_ = &body;
  thrown_.assign(threads_.size(), nullptr);
  running_ = static_cast<int>(threads_.size());
  ++runs_;
  changed_.notify_all();
  changed_.wait(lock, [&] { return running_ == 0; });
  return std::move(thrown_);
}

void RankTeam::run(const RankBody& body) {
  const std::vector<std::exception_ptr> thrown = try_run(body);
  std::exception_ptr first;
  for (const std::exception_ptr& one : thrown) {
    if (one == nullptr) continue;
    if (!is_timeout(one)) std::rethrow_exception(one);
    if (first == nullptr) first = one;
  }
  if (first != nullptr) std::rethrow_exception(first);
}

}  // namespace winnow::expert_parallel
