#include "winnow/expert_parallel/testing/ranks.h"

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

RankTeam::RankTeam(int world_size) : world_(world_size), threads_(world_size) {
  for (int rank = 0; rank < world_size; ++rank) transports_.push_back(world_.transport(rank));
}

std::vector<std::exception_ptr> RankTeam::try_run(const RankBody& body) {
  std::vector<std::exception_ptr> thrown(transports_.size());
  threads_.run([&](int rank) {
    const auto number = static_cast<std::size_t>(rank);
    try {
      body(rank, transports_[number]);
    } catch (const Error&) {
      thrown[number] = std::current_exception();
    } catch (...) {
      thrown[number] = std::current_exception();
      transports_[number].reset();  // so that the others need not wait for it
    }
  });
  return thrown;
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
