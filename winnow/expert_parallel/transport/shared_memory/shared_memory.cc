#include "winnow/expert_parallel/transport/shared_memory/shared_memory.h"

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "winnow/core/error.h"
#include "winnow/core/write_errors.h"
#include "winnow/expert_parallel/rendezvous/agreement.h"
#include "winnow/expert_parallel/rendezvous/process.h"
#include "winnow/expert_parallel/transport/mapped/mapped_transport.h"

namespace winnow::expert_parallel {
namespace {

constexpr const char* kOperation = "expert_parallel::shared_memory";

[[noreturn]] void fail(const std::string& what) {
  throw Error(ErrorCode::resource, kOperation, what + ": " + std::strerror(errno));
}

// An open file of memory that has no name; closes itself.
class MemoryFile {
 public:
  MemoryFile() = default;
  explicit MemoryFile(std::size_t bytes) : descriptor_(memfd_create("winnow", MFD_CLOEXEC)) {
    if (descriptor_ < 0) fail("no shared memory");
    const WriteErrorsAreReturned fails;
    if (ftruncate(descriptor_, static_cast<off_t>(bytes)) != 0) {
      const int error = errno;
      close();
      errno = error;
      fail("no " + std::to_string(bytes) + " bytes of shared memory");
    }
  }
  // The file of that handle() which a process has open, of so many bytes, unless it has closed it.
  MemoryFile(const ProcessIdentity& owner, MemoryHandle wanted, std::size_t bytes) {
    const std::string path = "/proc/" + std::to_string(owner.pid) + "/fd/" +
                             std::to_string(static_cast<std::uint32_t>(wanted.value));
    descriptor_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    struct stat file{};
    if (descriptor_ >= 0 && handle().value >> 32 == wanted.value >> 32 &&
        fstat(descriptor_, &file) == 0 && S_ISREG(file.st_mode) &&
        std::cmp_equal(file.st_size, bytes)) {
      return;
    }
    const int error = descriptor_ < 0 ? errno : ENOENT;
    close();
    errno = error;
    fail("cannot open the memory of rank 0 (" + describe(owner) +
         "; all ranks must be of one user), " + path);
  }
  ~MemoryFile() { close(); }
  MemoryFile(MemoryFile&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  MemoryFile& operator=(MemoryFile&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }

  int descriptor() const { return descriptor_; }
  // Its number, and above it which file it is: a number may be another file's later.
  MemoryHandle handle() const {
    struct stat file{};
    if (fstat(descriptor_, &file) != 0) fail("no shared memory");
    return {std::uint64_t{file.st_ino} << 32 | static_cast<std::uint32_t>(descriptor_)};
  }

 private:
  void close() {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = -1;
  }
  int descriptor_ = -1;
};

class SharedMemoryTransport : public MappedTransport {
 public:
  SharedMemoryTransport(std::string world_id, int rank, std::vector<ProcessIdentity> processes,
                        std::shared_ptr<std::byte> control)
      : MappedTransport(std::move(world_id), rank, static_cast<int>(processes.size()),
                        std::move(control)),
        processes_(std::move(processes)) {}

  using MappedTransport::meet;

  std::string name() const override { return "shared_memory"; }

  std::string describe_peer(int rank) const override {
    check_rank(rank);
    const std::string text = describe(processes_[static_cast<std::size_t>(rank)]);
    return MappedTransport::peer_gone(rank) ? text + ", its transport is closed" : text;
  }

  bool peer_gone(int rank) const override {
    return MappedTransport::peer_gone(rank) ||
           state_of(processes_[static_cast<std::size_t>(rank)]) == ProcessState::gone;
  }

 private:
  std::shared_ptr<std::byte> create(std::size_t bytes, MemoryHandle& handle) override {
    fresh_ = MemoryFile(bytes);
    handle = fresh_.handle();
    return map_pages(bytes, fresh_.descriptor());
  }
  std::shared_ptr<std::byte> open(std::size_t bytes, MemoryHandle handle) override {
    return map_pages(bytes, MemoryFile(processes_[0], handle, bytes).descriptor());
  }
  void opened_by_all() noexcept override { fresh_ = MemoryFile(); }

  std::vector<ProcessIdentity> processes_;  // by rank
  MemoryFile fresh_;                        // rank 0: what not all have opened yet
};

// Each rank compares all with rank 0, so that all find the same.
void check_one_machine(const std::vector<ProcessIdentity>& processes) {
  for (std::size_t rank = 1; rank < processes.size(); ++rank) {
    if (processes[rank].boot == processes[0].boot &&
        processes[rank].pid_namespace == processes[0].pid_namespace) {
      continue;
    }
    throw Error(ErrorCode::unsupported, kOperation,
                "rank " + std::to_string(rank) +
                    " is on another machine than rank 0, or in another container");
  }
}

}  // namespace

std::shared_ptr<Transport> create_shared_memory(Store& store, int rank, int world_size,
                                                const Deadline& deadline,
                                                const std::string& prefix) {
  AgreementRequest request;
  request.operation = kOperation;
  request.prefix = prefix;
  request.rank = rank;
  request.world_size = world_size;
  request.same = {{"transport", "shared_memory"}};
  begin_world(store, request);
  MemoryFile file;
  if (rank == 0) {
    try {
      file = MemoryFile(WorldControl::bytes(world_size));
      request.own = {{"file", std::to_string(static_cast<std::int64_t>(file.handle().value))}};
    } catch (const Error& error) {  // for all ranks, which would wait for this one
      request.own = {{"no file", message_of(error)}};
    }
  }
  const Agreement agreement = agree(store, request, deadline);
  const Fields& message = agreement.own[0];
  if (message.size() != 1) {
    throw Error(ErrorCode::internal, kOperation, "rank 0 does not say which memory is its own");
  }
  const auto& [what, text] = message[0];
  if (what == "no file") throw Error(ErrorCode::resource, kOperation, "rank 0: " + text);
  check_one_machine(agreement.processes);
  // A rank that has met the others may have left because of a second caller that came then.
  const auto look = [&] { check_agreement(store, request); };
  if (rank != 0) {
    const Sender by{kOperation, "the announcement", 0};
    const MemoryHandle handle{
        static_cast<std::uint64_t>(untrusted_number(text, by, "file", INT64_MIN, INT64_MAX))};
    try {
      file = MemoryFile(agreement.processes[0], handle, WorldControl::bytes(world_size));
    } catch (const Error&) {
      look();
      throw;
    }
  }
  auto transport = std::make_shared<SharedMemoryTransport>(
      agreement.id, rank, agreement.processes,
      map_pages(WorldControl::bytes(world_size), file.descriptor()));
  transport->meet(deadline, look);
  end_world(store, request);
  return transport;
}

}  // namespace winnow::expert_parallel
