#include "winnow/expert_parallel/transport/nvshmem/nvshmem.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "winnow/core/error.h"
#include "winnow/core/interrupt.h"
#include "winnow/expert_parallel/rendezvous/agreement.h"
#include "winnow/expert_parallel/rendezvous/peer_watch.h"
#include "winnow/expert_parallel/transport/fault.h"
#include "winnow/expert_parallel/transport/nvshmem/nvshmem_library.h"
#include "winnow/expert_parallel/transport/nvshmem/nvshmem_world.h"

namespace winnow::expert_parallel {
namespace {

constexpr const char* kAllocate = "expert_parallel::allocate_cuda";

constexpr std::string_view kDigits = "0123456789abcdef";

std::string to_hex(const std::string& bytes) {
  std::string text;
  for (const char letter : bytes) {
    const auto byte = static_cast<unsigned char>(letter);
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

// Of anything else than to_hex() too few bytes.
std::string from_hex(const std::string& text) {
  std::string bytes;
  for (std::size_t at = 0; at + 1 < text.size(); at += 2) {
    const std::size_t high = kDigits.find(text[at]), low = kDigits.find(text[at + 1]);
    if (high == kDigits.npos || low == kDigits.npos) return {};
    bytes += static_cast<char>(high << 4 | low);
  }
  return bytes;
}

// "3 5 7 "
std::string to_text(const std::set<std::uint64_t>& numbers) {
  std::string text;
  for (const std::uint64_t number : numbers) text += std::to_string(number) + " ";
  return text;
}

std::set<std::uint64_t> from_text(std::string_view text) {
  const Sender by{kAllocate, "the announcement"};
  std::set<std::uint64_t> numbers;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    const std::int64_t number = untrusted_number(text.substr(0, end), by, "let go", 0, INT64_MAX);
    numbers.insert(static_cast<std::uint64_t>(number));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return numbers;
}

// What the ranks say in an agreement under a name.
std::vector<std::string> message(const Agreement& agreement, std::string_view name) {
  std::vector<std::string> values;
  for (const Fields& fields : agreement.own) {
    values.emplace_back();
    for (const auto& [field, value] : fields) {
      if (field == name) values.back() = value;
    }
  }
  return values;
}

// Throws what the lowest rank says that says something: the same on every rank.
void throw_first(const char* operation, ErrorCode code, const std::vector<std::string>& message,
                 const std::string& prefix = "") {
  for (std::size_t rank = 0; rank < message.size(); ++rank) {
    if (message[rank].empty()) continue;
    throw error_from_message(code, operation,
                             "rank " + std::to_string(rank) + ": " + prefix + message[rank]);
  }
}

std::vector<std::uint64_t> let_go_by_all(const Agreement& agreement) {
  std::map<std::uint64_t, std::size_t> ranks_of;
  for (const std::string& numbers : message(agreement, "let go")) {
    for (const std::uint64_t number : from_text(numbers)) ++ranks_of[number];
  }
  std::vector<std::uint64_t> common;
  for (const auto& [number, ranks] : ranks_of) {
    if (ranks == agreement.own.size()) common.push_back(number);
  }
  return common;
}

// ---- The transport.

class NvshmemMemory : public SymmetricMemory {
 public:
  NvshmemMemory(NvshmemWorld::Memory memory, std::size_t bytes)
      : SymmetricMemory(memory.data, bytes), number_(memory.number) {}
  // What only some ranks could have is never let go of by all, and stays.
  ~NvshmemMemory() override {
    if (local() != nullptr) NvshmemWorld::instance().let_go(number_);
  }
  std::byte* peer(int rank) override { return NvshmemWorld::instance().pointer(local(), rank); }

 private:
  std::uint64_t number_;
};

class NvshmemTransport : public Transport {
 public:
  NvshmemTransport(std::shared_ptr<Store> store, std::string world_id)
      : store_(std::move(store)),
        world_id_(std::move(world_id)),
        group_(world_.group()),
        fork_generation_(fork_generation()) {}

  int rank() const override { return group_.rank; }
  int world_size() const override { return static_cast<int>(group_.processes.size()); }
  std::string name() const override { return "nvshmem"; }
  std::string world_id() const override { return world_id_; }
  const FabricKernels* fabric() override { return world_.fabric(); }

  void check() const override {
    if (fork_generation_ != fork_generation()) {
      throw Error(
          ErrorCode::invalid_argument, kNvshmemOperation,
          "used after fork() in the child: rank " + std::to_string(rank()) + " is the parent");
    }
    world_.check(kNvshmemOperation);
  }

  std::shared_ptr<SymmetricMemory> allocate_cuda(Device device, std::size_t bytes,
                                                 const Deadline& deadline,
                                                 std::string_view what) override;

  // ---- Memory of the host, which NVSHMEM does not give.
  std::shared_ptr<SymmetricMemory> allocate(std::size_t, const Deadline&,
                                            std::string_view what) override {
    throw Error(ErrorCode::unsupported, "expert_parallel::allocate",
                std::string(what) + ": nvshmem has GPU memory only (allocate_cuda)");
  }
  void put(SymmetricMemory&, int, std::size_t, const void*, std::size_t) override {
    throw Error(ErrorCode::unsupported, "expert_parallel::put", "on nvshmem kernels put");
  }
  void put_signal(SymmetricMemory&, int, std::size_t, const void*, std::size_t, std::size_t,
                  std::uint64_t) override {
    throw Error(ErrorCode::unsupported, "expert_parallel::put_signal", "on nvshmem kernels put");
  }

  std::string describe_peer(int rank) const override {
    return describe(group_.processes.at(static_cast<std::size_t>(rank)));
  }
  bool peer_gone(int rank) const override {
    return state_of(group_.processes.at(static_cast<std::size_t>(rank))) == ProcessState::gone;
  }
  std::shared_ptr<void> watch_peers(std::function<void(int)> gone) override {
    return watch_processes(group_.processes, std::move(gone));
  }

 private:
  NvshmemWorld& world_ = NvshmemWorld::instance();
  std::shared_ptr<Store> store_;
  std::string world_id_;
  NvshmemWorld::Group group_;
  int fork_generation_;
  std::optional<Error> failed_;  // an allocation, on every rank alike
};

std::shared_ptr<SymmetricMemory> NvshmemTransport::allocate_cuda(Device device, std::size_t bytes,
                                                                 const Deadline& deadline,
                                                                 std::string_view what) {
  check();
  if (failed_) throw *failed_;
  try {
    // All ranks are here and ask for the same: only now NVSHMEM may wait for them.
    const std::string request = std::to_string(bytes) + " bytes for " + std::string(what);
    const std::string refusal =
        bytes == 0 ? "want at least 1 byte, got 0"
        : device != group_.device
            ? "want " + winnow::to_string(group_.device) + ", got " + winnow::to_string(device)
            : "";
    const Agreement asked = agree(*this, *store_, kAllocate, {{"allocation", request}}, deadline,
                                  {{"refusal", refusal}, {"let go", to_text(world_.let_go())}});
    throw_first(kAllocate, ErrorCode::invalid_argument, message(asked, "refusal"),
                std::string(what) + ": ");
    for (const std::uint64_t number : let_go_by_all(asked)) world_.free(number, deadline);
    auto memory = std::make_shared<NvshmemMemory>(world_.allocate(bytes, deadline), bytes);
    // Where a rank goes on, every rank has its memory, with zeros.
    const std::string missing = memory->local() == nullptr ? "no GPU memory of " + request : "";
    const Agreement got = agree(*this, *store_, kAllocate, {}, deadline, {{"missing", missing}});
    throw_first(kAllocate, ErrorCode::resource, message(got, "missing"));
    return memory;
  } catch (const Error& error) {
    failed_ = error;
    throw;
  }
}

// ---- Its making.

// What stands against an NVSHMEM world on this machine; empty: nothing.
std::string obstacle_of(Device device) {
  if (device.type != DeviceType::cuda) return "device: want a GPU, got " + to_string(device);
  const GpuList& list = gpus();
  if (list.gpus.empty()) return "device: want a GPU, but there is none: " + list.reason;
  if (device.index < 0 || device.index >= static_cast<int>(list.gpus.size())) {
    return "device: want one GPU for each rank, got " + to_string(device) + " on a machine with " +
           std::to_string(list.gpus.size());
  }
  const Gpu& gpu = list.gpus[static_cast<std::size_t>(device.index)];
  if (gpu.compute_major == 9 && gpu.compute_minor == 0) return {};
  return "device: want a GPU of compute capability 9.0, got " + gpu.name;
}

[[noreturn]] void refuse(std::size_t rank, const std::string& why) {
  throw Error(ErrorCode::unsupported, kNvshmemOperation,
              "rank " + std::to_string(rank) + ": " + why);
}

// How a rank says which NVSHMEM world it is in: nothing for none.
std::string place_in(const std::string& world, std::size_t rank, std::size_t ranks) {
  if (world.empty()) return {};
  return world + " rank " + std::to_string(rank) + " of " + std::to_string(ranks);
}

// Every rank has received the same and comes to the same verdict.
void check_ranks(const Agreement& agreement) {
  throw_first(kNvshmemOperation, ErrorCode::unsupported, message(agreement, "obstacle"));
  const std::vector<std::string> versions = message(agreement, "NVSHMEM");
  const std::vector<std::string> gpu_ids = message(agreement, "GPU");
  const std::vector<std::string> worlds = message(agreement, "world");
  for (std::size_t rank = 0; rank < worlds.size(); ++rank) {
    for (std::size_t other = 0; other < rank; ++other) {
      const std::string both = "it and rank " + std::to_string(other);
      if (agreement.processes[rank] == agreement.processes[other]) {
        refuse(rank, both + " are in one process: want a process for each rank");
      }
      if (gpu_ids[rank] == gpu_ids[other]) {
        refuse(rank, both + " have the same GPU: want one for each rank");
      }
    }
    if (versions[rank] != versions[0]) {
      throw Error(
          ErrorCode::invalid_argument, kNvshmemOperation, "NVSHMEM version",
          "the same on every rank",
          versions[0] + " (rank 0), " + versions[rank] + " (rank " + std::to_string(rank) + ")");
    }
    const std::string world = worlds[0].substr(0, worlds[0].find(' '));
    if (worlds[rank] == place_in(world, rank, worlds.size())) continue;
    throw Error(ErrorCode::invalid_argument, kNvshmemOperation,
                "rank " + std::to_string(rank) +
                    " is in another NVSHMEM world: a process has one for its life, of the same "
                    "ranks; restart all processes");
  }
}

// Until that rank has set the key, has ended or is late.
std::optional<std::string> await_rank_0(Store& store, const std::string& key,
                                        const ProcessIdentity& rank_0, const Deadline& deadline) {
  Interrupts interrupts;
  for (;;) {
    // In this order: what it said before it ended counts.
    const bool over = deadline.expired() || state_of(rank_0) == ProcessState::gone;
    std::optional<std::string> text = store.get(key, Deadline::now());
    if (text || over) return text;
    interrupts.look();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

// Rank 0 makes the id of the new NVSHMEM world and gives it to the others through the store.
std::string share_unique_id(Store& store, const std::string& key, int rank,
                            const ProcessIdentity& rank_0, const NvshmemLibrary& library,
                            const Deadline& deadline) {
  if (rank == 0) {
    std::string id(NvshmemLibrary::kUniqueIdBytes, '\0');
    const int status = library.unique_id(id.data());
    store.set(key, status == 0 ? to_hex(id) : "none");
    if (status == 0) return id;
  } else {
    const std::optional<std::string> text = await_rank_0(store, key, rank_0, deadline);
    if (!text) {
      const bool gone = state_of(rank_0) == ProcessState::gone;
      throw Error(ErrorCode::timeout, kNvshmemOperation,
                  gone ? "rank 0 ended before it started NVSHMEM: " + describe(rank_0)
                       : "rank 0 has not started NVSHMEM within " + to_seconds(deadline.timeout()),
                  {.reason = gone ? ErrorReason::peer_gone : ErrorReason::absent});
    }
    const std::string id = from_hex(*text);
    if (id.size() == NvshmemLibrary::kUniqueIdBytes) return id;
    if (*text != "none") {
      throw Error(ErrorCode::internal, kNvshmemOperation,
                  "what rank 0 says of its start: want an id, got \"" + *text + "\"");
    }
  }
  throw Error(ErrorCode::internal, kNvshmemOperation, "NVSHMEM found no network to start on");
}

}  // namespace

std::shared_ptr<Transport> join_nvshmem(const NvshmemLibrary* library, std::string obstacle,
                                        std::shared_ptr<Store> store, int rank, int world_size,
                                        Device device, const Deadline& deadline,
                                        const std::string& prefix) {
  NvshmemWorld& world = NvshmemWorld::instance();
  world.check(kNvshmemOperation);
  const NvshmemWorld::Group group = world.group();
  if (obstacle.empty() && !group.id.empty() && device != group.device) {
    obstacle = "device: want " + to_string(group.device) +
               " as in this process's NVSHMEM world, got " + to_string(device);
  }
  AgreementRequest request;
  request.operation = kNvshmemOperation;
  request.prefix = prefix;
  request.rank = rank;
  request.world_size = world_size;
  request.same = {{"transport", "nvshmem"}};
  begin_world(*store, request);
  if (obstacle.empty()) {
    int major = 0, minor = 0, patch = 0;
    library->version(&major, &minor, &patch);
    std::string gpu(NvshmemLibrary::kGpuIdBytes, '\0');
    library->gpu_id(device.index, gpu.data());
    request.own = {{"NVSHMEM", std::to_string(major) + "." + std::to_string(minor) + "." +
                                   std::to_string(patch)},
                   {"GPU", to_hex(gpu)},
                   {"world", place_in(group.id, static_cast<std::size_t>(group.rank),
                                      group.processes.size())}};
  } else {
    request.own = {{"obstacle", obstacle}};
  }
  const Agreement agreement = agree(*store, request, deadline);
  check_ranks(agreement);
  const std::string key = prefix + "/nvshmem/" + agreement.id;
  if (group.id.empty()) {
    const std::string unique_id =
        share_unique_id(*store, key, rank, agreement.processes[0], *library, deadline);
    world.start(*library, {agreement.id, rank, device, agreement.processes}, unique_id, deadline);
  }
  auto transport = std::make_shared<NvshmemTransport>(store, agreement.id);
  // Whoever comes back has a world that has started everywhere.
  agree(*transport, *store, kNvshmemOperation, {}, deadline);
  if (rank == 0) {
    store->remove(key);
    end_world(*store, request);
  }
  return transport;
}

std::shared_ptr<Transport> create_nvshmem(std::shared_ptr<Store> store, int rank, int world_size,
                                          Device device, const Deadline& deadline,
                                          const std::string& prefix) {
  if (store == nullptr) {
    throw Error(ErrorCode::invalid_argument, kNvshmemOperation, "store", "a store", "none");
  }
  std::string obstacle = obstacle_of(device);
  const NvshmemLibrary* library = nullptr;
  try {
    if (obstacle.empty()) library = &nvshmem_library();
  } catch (const Error& error) {
    obstacle = message_of(error);
  }
  return join_nvshmem(library, std::move(obstacle), std::move(store), rank, world_size, device,
                      deadline, prefix);
}

}  // namespace winnow::expert_parallel
