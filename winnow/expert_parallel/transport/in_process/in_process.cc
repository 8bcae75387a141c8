#include "winnow/expert_parallel/transport/in_process/in_process.h"

#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/rendezvous/process.h"
#include "winnow/expert_parallel/transport/mapped/mapped_transport.h"

#if WINNOW_WITH_CUDA
#include "winnow/expert_parallel/cuda/fabric.h"
#include "winnow/expert_parallel/memory/cuda_memory.h"
#endif

namespace winnow::expert_parallel {

struct InProcessWorld::State {
  int world_size = 0;
  std::string id = random_id();
  std::shared_ptr<std::byte> control;  // WorldControl
  std::shared_ptr<MemoryStore> store = std::make_shared<MemoryStore>();

  std::mutex mutex;
  std::vector<std::weak_ptr<Transport>> transports;
  std::vector<bool> given;
  std::shared_ptr<std::byte> fresh;  // what rank 0 created and not all have opened yet

  struct Part {
    Device device;
    std::shared_ptr<std::byte> memory;
  };
  std::vector<Part> parts;  // [W] on GPUs: what each rank made and not all have seen yet

  struct Watch {
    int rank;
    std::function<void(int)> gone;
  };
  std::mutex watch_mutex;
  std::list<Watch> watches;
  std::vector<bool> left;  // [W]
  void leave(int rank);
};

void InProcessWorld::State::leave(int rank) {
  const std::lock_guard lock(watch_mutex);
  left[static_cast<std::size_t>(rank)] = true;
  for (const Watch& watch : watches) {
    if (watch.rank != rank) watch.gone(rank);
  }
}

namespace {

#if WINNOW_WITH_CUDA
// The parts of all ranks, which all of them hold.
class CudaMemory : public SymmetricMemory {
 public:
  CudaMemory(std::vector<InProcessWorld::State::Part> parts, int rank, std::size_t bytes)
      : SymmetricMemory(parts[static_cast<std::size_t>(rank)].memory.get(), bytes),
        parts_(std::move(parts)) {
    std::vector<std::byte*> pointers;
    for (const auto& part : parts_) pointers.push_back(part.memory.get());
    const Device device = parts_[static_cast<std::size_t>(rank)].device;
    table_ = allocate_cuda_memory(device, pointers.size() * sizeof(std::byte*));
    write_cuda_memory(device, table_.get(), pointers.data(), pointers.size() * sizeof(std::byte*));
  }
  std::byte* peer(int rank) override { return parts_[static_cast<std::size_t>(rank)].memory.get(); }
  std::byte* const* peers() override { return reinterpret_cast<std::byte* const*>(table_.get()); }

 private:
  std::vector<InProcessWorld::State::Part> parts_;
  std::shared_ptr<std::byte> table_;
};
#endif

class InProcessTransport : public MappedTransport {
 public:
  InProcessTransport(std::shared_ptr<InProcessWorld::State> state, int rank)
      : MappedTransport(state->id, rank, state->world_size, state->control),
        state_(std::move(state)),
        presence_(std::make_shared<Presence>(state_, rank)) {}
  ~InProcessTransport() override { close(); }

  std::string name() const override { return "in_process"; }

  std::string describe_peer(int rank) const override {
    check_rank(rank);
    const RankControl& control = control_of(rank);
    if (load_acquire(&control.closed) != 0) return "thread, its transport is closed";
    return load_acquire(&control.joined) != 0 ? "thread, running" : "thread, not there yet";
  }

  std::shared_ptr<void> watch_peers(std::function<void(int)> gone) override {
    const std::lock_guard lock(state_->watch_mutex);
    for (int other = 0; other < world_size(); ++other) {
      if (state_->left[static_cast<std::size_t>(other)]) gone(other);
    }
    const auto watch = state_->watches.insert(state_->watches.end(), {rank(), std::move(gone)});
    const auto let_go = [state = state_, watch, generation = fork_generation()](void*) {
      if (generation != fork_generation()) return;
      const std::lock_guard held(state->watch_mutex);
      state->watches.erase(watch);
    };
    return {this, let_go};
  }
  std::shared_ptr<void> presence() override { return presence_; }

#if WINNOW_WITH_CUDA
  std::shared_ptr<SymmetricMemory> allocate_cuda(Device device, std::size_t bytes,
                                                 const Deadline& deadline,
                                                 std::string_view what) override;
  const FabricKernels* fabric() override { return &pointer_fabric(); }
  int ranks_on_gpu() const override { return ranks_on_gpu_; }
#endif

 private:
  // The last that is left of a rank: its transport, or its work on a GPU.
  class Presence {
   public:
    Presence(std::shared_ptr<InProcessWorld::State> state, int rank)
        : state_(std::move(state)), rank_(rank) {}
    ~Presence() {
      if (generation_ == fork_generation()) state_->leave(rank_);
    }
    Presence(const Presence&) = delete;
    Presence& operator=(const Presence&) = delete;

   private:
    std::shared_ptr<InProcessWorld::State> state_;
    int rank_;
    int generation_ = fork_generation();
  };

  std::shared_ptr<std::byte> create(std::size_t bytes, MemoryHandle&) override {
    std::shared_ptr<std::byte> pages = map_pages(bytes, -1);
    const std::lock_guard lock(state_->mutex);
    return state_->fresh = pages;
  }
  std::shared_ptr<std::byte> open(std::size_t, MemoryHandle) override {
    const std::lock_guard lock(state_->mutex);
    return state_->fresh;
  }
  void opened_by_all() noexcept override {
    const std::lock_guard lock(state_->mutex);
    state_->fresh.reset();
  }

  std::shared_ptr<InProcessWorld::State> state_;
  std::shared_ptr<Presence> presence_;
  int ranks_on_gpu_ = 1;
};

#if WINNOW_WITH_CUDA
std::shared_ptr<SymmetricMemory> InProcessTransport::allocate_cuda(Device device, std::size_t bytes,
                                                                   const Deadline& deadline,
                                                                   std::string_view what) {
  const std::uint64_t number = agree_on(bytes, deadline, what);
  const auto set_part = [&](InProcessWorld::State::Part part) {
    const std::lock_guard lock(state_->mutex);
    state_->parts[static_cast<std::size_t>(rank())] = std::move(part);
  };
  std::shared_ptr<SymmetricMemory> memory;
  try {
    set_part({device, allocate_cuda_memory(device, bytes)});
    reach(&RankControl::created, number, deadline);
    std::vector<InProcessWorld::State::Part> parts;
    {
      const std::lock_guard lock(state_->mutex);
      parts = state_->parts;
    }
    ranks_on_gpu_ = 0;
    for (const auto& part : parts) {
      if (part.device == device) ++ranks_on_gpu_;
      if (reaches(device, part.device)) continue;
      throw Error(ErrorCode::unsupported, "expert_parallel::allocate",
                  to_string(device) + " does not reach the memory of " + to_string(part.device));
    }
    memory = std::make_shared<CudaMemory>(std::move(parts), rank(), bytes);
  } catch (const Error& error) {
    set_part({});
    fail_alone(error);
  }
  reach(&RankControl::mapped, number, deadline);
  set_part({});
  return memory;
}
#endif

}  // namespace

InProcessWorld::InProcessWorld(int world_size) {
  if (world_size < 1) {
    throw Error(ErrorCode::invalid_argument, "expert_parallel::InProcessWorld", "world_size",
                "1 or more", std::to_string(world_size));
  }
  state_ = std::make_shared<State>();
  state_->world_size = world_size;
  state_->control = map_pages(WorldControl::bytes(world_size), -1);
  state_->transports.resize(static_cast<std::size_t>(world_size));
  state_->left.resize(static_cast<std::size_t>(world_size));
  state_->given.resize(static_cast<std::size_t>(world_size));
  state_->parts.resize(static_cast<std::size_t>(world_size));
}

int InProcessWorld::world_size() const { return state_->world_size; }

std::shared_ptr<Store> InProcessWorld::store() const { return state_->store; }

std::shared_ptr<Transport> InProcessWorld::transport(int rank) {
  constexpr const char* operation = "expert_parallel::InProcessWorld";
  if (rank < 0 || rank >= state_->world_size) {
    throw Error(ErrorCode::invalid_argument, operation, "rank",
                "in [0, " + std::to_string(state_->world_size) + ")", std::to_string(rank));
  }
  const auto n = static_cast<std::size_t>(rank);
  const std::lock_guard lock(state_->mutex);
  if (std::shared_ptr<Transport> transport = state_->transports[n].lock()) return transport;
  if (state_->given[n]) {
    throw Error(ErrorCode::invalid_argument, operation,
                "the transport of rank " + std::to_string(rank) +
                    " was closed: make a new world of all ranks");
  }
  auto transport = std::make_shared<InProcessTransport>(state_, rank);
  state_->transports[n] = transport;
  state_->given[n] = true;
  return transport;
}

}  // namespace winnow::expert_parallel
