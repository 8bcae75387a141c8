// Python bindings of the transports and stores.
#include <algorithm>
#include <cmath>
#include <string>
#include <thread>
#include <utility>

#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/rendezvous/launch_environment.h"
#include "winnow/expert_parallel/transport/arguments_py.h"
#include "winnow/expert_parallel/transport/in_process/in_process.h"
#include "winnow/expert_parallel/transport/nvshmem/nvshmem.h"
#include "winnow/expert_parallel/transport/nvshmem/nvshmem_library.h"
#include "winnow/expert_parallel/transport/shared_memory/shared_memory.h"
#include "winnow/python/bindings.h"
#include "winnow/python/call.h"
#include "winnow/python/text.h"

namespace winnow::python {
namespace {

namespace ep = expert_parallel;

// A store of Python: set(key, text), get(key) and, to look without waiting, check([key]) or
// wait([key], timedelta), as torch.distributed.Store has them. Called without the interpreter lock,
// on any thread.
//
// Keys are never deleted, but emptied: get() of such a store waits for a missing key, so that a key
// which another rank deletes between a look and the get would be waited for in vain.
class PythonStore : public ep::Store {
 public:
  explicit PythonStore(nb::object store)
      : store_(std::move(store)), has_check_(nb::hasattr(store_, "check")) {}

  ~PythonStore() override {
    if (!nb::is_alive()) {
      store_.release();
      return;
    }
    const Locked locked;
    store_.reset();
  }

  void set(const std::string& key, const std::string& value) override {
    call("set " + key, [&] { ask("set", nb::make_tuple(key, value)); });
  }

  std::optional<std::string> get(const std::string& key, const ep::Deadline& deadline) override {
    for (;;) {
      const bool last = deadline.expired();
      std::optional<std::string> value;
      call("get " + key, [&] { value = look(key); });
      if (value.has_value() || last) return value;
      std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(kPause, deadline.remaining()));
    }
  }

  void remove(const std::string& key) override {
    call("set " + key, [&] {
      if (look(key).has_value()) ask("set", nb::make_tuple(key, ""));
    });
  }

 private:
  static constexpr std::chrono::milliseconds kPause{2};

  nb::object ask(const char* method, const nb::tuple& arguments) {
    const nb::object function = store_.attr(method);
    return call_python(function, arguments);
  }

  std::optional<std::string> look(const std::string& key) {
    nb::list keys;
    keys.append(key);
    if (has_check_) {
      const int there = PyObject_IsTrue(ask("check", nb::make_tuple(keys)).ptr());
      if (there < 0) throw nb::python_error();
      if (there == 0) return std::nullopt;
    } else if (!came(keys)) {
      return std::nullopt;
    }
    const nb::object value = ask("get", nb::make_tuple(key));
    const bool bytes = PyBytes_Check(value.ptr());
    if (!bytes && !PyUnicode_Check(value.ptr())) {
      throw Error(ErrorCode::resource, "expert_parallel::Store",
                  "get() gave " + text_of(value.type().attr("__name__")) + ", not bytes or a text");
    }
    std::string text =
        bytes ? std::string(PyBytes_AsString(value.ptr()), nb::len(value)) : text_of(value);
    if (text.empty()) return std::nullopt;
    return text;
  }

  bool came(const nb::list& keys) {
    const nb::object moment = nb::module_::import_("datetime")
                                  .attr("timedelta")(nb::arg("milliseconds") = kPause.count());
    try {
      ask("wait", nb::make_tuple(keys, moment));
      return true;
    } catch (nb::python_error& error) {
      if (passes_unchanged(error)) throw;
      return false;
    }
  }

  // With the lock, and so that an interrupt ends the wait and a failing store is an Error.
  template <class Function>
  void call(const std::string& what, const Function& function) {
    const Locked locked;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    std::string text;
    try {
      function();
      return;
    } catch (nb::python_error& error) {
      if (passes_unchanged(error)) throw;
      text = first_line(error);
    }
    throw Error(ErrorCode::resource, "expert_parallel::Store", "cannot " + what + ": " + text);
  }

  nb::object store_;
  bool has_check_;
};

ep::Deadline deadline_argument(const char* operation, nb::handle seconds) {
  return ep::Deadline(timeout_argument(operation, seconds));
}

// Short enough that with what stands behind it every key is the name of a file.
void check_prefix(const char* operation, const std::string& prefix) {
  constexpr std::size_t kMost = 64;
  if (prefix.size() <= kMost) return;
  throw Error(ErrorCode::invalid_argument, operation, "prefix",
              "at most " + std::to_string(kMost) + " bytes",
              std::to_string(prefix.size()) + " bytes");
}

std::shared_ptr<ep::Transport> create_shared_memory(nb::handle store, int rank, int world_size,
                                                    nb::handle timeout, const std::string& prefix) {
  constexpr const char* operation = "expert_parallel::shared_memory";
  const std::shared_ptr<ep::Store> shared_store = store_argument(operation, store);
  const ep::Deadline deadline = deadline_argument(operation, timeout);
  check_prefix(operation, prefix);
  const Unlocked unlocked;
  return ep::create_shared_memory(*shared_store, rank, world_size, deadline, prefix);
}

void make_file_store(ep::FileStore* self, const std::filesystem::path& directory,
                     std::optional<std::string> job) {
  new (self) ep::FileStore(directory, job.value_or(ep::job_id()));
}

void make_world(ep::InProcessWorld* self, int world_size) {
  new (self) ep::InProcessWorld(world_size);
}

std::shared_ptr<ep::Transport> transport_of(ep::InProcessWorld& world, int rank) {
  return world.transport(rank);
}

std::string describe_peer(const ep::Transport& transport, int rank) {
  return transport.describe_peer(rank);
}

bool peer_gone(const ep::Transport& transport, int rank) { return transport.peer_gone(rank); }

// NVSHMEM is where Python would import it from, wherever Winnow itself is.
void look_for_nvshmem() {
  const nb::object folder = nb::module_::import_("winnow.nvshmem").attr("folder")();
  ep::set_nvshmem_folder(nb::cast<std::string>(folder));
}

std::shared_ptr<ep::Transport> create_nvshmem(nb::handle store, int rank, int world_size,
                                              nb::handle device, nb::handle timeout,
                                              const std::string& prefix) {
  constexpr const char* operation = "expert_parallel::nvshmem";
  std::shared_ptr<ep::Store> shared_store = store_argument(operation, store);
  const Device gpu = device_argument(operation, device);
  const ep::Deadline deadline = deadline_argument(operation, timeout);
  check_prefix(operation, prefix);
  look_for_nvshmem();
  const Unlocked unlocked;
  return ep::create_nvshmem(std::move(shared_store), rank, world_size, gpu, deadline, prefix);
}

// Opens the library of NVSHMEM, and says why it cannot.
std::string nvshmem_obstacle() {
  look_for_nvshmem();
  try {
    ep::nvshmem_library();
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

constexpr const char* kWorldDoc = R"(A world whose ranks are threads of this process.

    world = winnow.expert_parallel.InProcessWorld(2)
    # on each of two threads:
    layer = winnow.expert_parallel.AllToAll(world.transport(rank), world.store(), ...)

Serves layers on the CPU and on GPUs. Thread-safe. Transports outlive the world.

Raises:
    ValueError: world_size below 1.)";

constexpr const char* kSharedMemoryDoc =
    R"(Joins the processes of one host and returns this one's transport.

Collective: every rank calls it. The processes meet in the store and then share memory that has no
name, so that nothing remains however they end. The interpreter lock is released.

Args:
    store: a folder that all ranks can access, for a job with a name (FileStore), or an object with
        set, get and check or wait, as torch.distributed.Store has them; the store that torchrun's
        ranks share is torch.distributed.group.WORLD.get_group_store().
    rank, world_size: this process's rank and the number of ranks, up to 65,536.
    timeout: seconds; None: WINNOW_TIMEOUT_SECONDS, else 30.
    prefix: of the keys, up to 64 bytes; worlds of different ranks that share a store must use
        different prefixes.

Raises:
    winnow.Error: a timeout that names the ranks that did not arrive; a rank is on another machine,
        of another user or in another container; the store fails.
    ValueError: a rank is outside of the world, or some rank has another world_size or library
        version; the store is a folder and the job has no name.)";

constexpr const char* kNvshmemDoc =
    R"(Joins processes with a GPU each, of one host or several, and returns this one's transport.

Collective, as create_shared_memory(). The library of NVSHMEM is opened at the first call; a process
has one NVSHMEM world for its life, which later transports of the same ranks share. After a
rank has ended nothing new can be created: restart all processes. The store must exist as long as
layers are created, because the ranks agree on every allocation in it.

Args:
    store, rank, world_size, timeout, prefix: as in create_shared_memory().
    device: this rank's own GPU: "cuda:0", "cuda" (torch's current one), a device of torch.

Raises:
    winnow.Error: unsupported: some rank has no NVSHMEM (pip install nvidia-nvshmem-cu13==3.4.5), no
        such GPU, a GPU whose compute capability is not 9.0, or the GPU of another rank; every rank
        raises the same text. timeout: names the ranks that did not arrive.
    ValueError: as create_shared_memory(); some rank has another version of NVSHMEM.)";

}  // namespace

std::shared_ptr<ep::Store> store_argument(const char* operation, nb::handle store) {
  std::shared_ptr<ep::Store> own;
  if (nb::try_cast(store, own) && own != nullptr) return released_with_lock(std::move(own));
  if (nb::isinstance<nb::str>(store) || nb::hasattr(store, "__fspath__")) {
    return std::make_shared<ep::FileStore>(nb::cast<std::filesystem::path>(store));
  }
  const bool looks = nb::hasattr(store, "check") || nb::hasattr(store, "wait");
  if (nb::hasattr(store, "set") && nb::hasattr(store, "get") && looks) {
    return std::make_shared<PythonStore>(nb::borrow(store));
  }
  throw Error(ErrorCode::invalid_argument, operation, "store",
              "a folder, or an object with set, get and check or wait", repr_of(store));
}

std::chrono::nanoseconds timeout_argument(const char* operation, nb::handle seconds) {
  using std::chrono::nanoseconds;
  constexpr double kLongest = 365 * 24 * 3600.0;
  double value = 0;
  const bool read = seconds.is_none() || nb::try_cast(seconds, value);
  if (!read || !(value >= 0 && value <= kLongest)) {
    refuse_argument(operation, "timeout", "0 seconds to a year", seconds);
  }
  if (seconds.is_none()) return nanoseconds(0);  // the default
  return nanoseconds(static_cast<nanoseconds::rep>(std::max(std::ceil(value * 1e9), 1.0)));
}

void bind_expert_parallel_transport(nb::module_& m) {
  using namespace nb::literals;

  nb::class_<ep::Store>(m, "Store", "The key-value store in which ranks meet.");
  nb::class_<ep::MemoryStore, ep::Store>(m, "MemoryStore", "For the threads of one process.")
      .def(nb::init<>());
  nb::class_<ep::FileStore, ep::Store> files(
      m, "FileStore", "A folder that all ranks can access, in which each job has one of its own.");
  define<
      "def __init__(self, directory: str | os.PathLike[str], job: str | None = None) "
      "-> None">(
      files, make_file_store,
      "Creates the folder if its parent exists. winnow.Error if that fails. job: a name that no\n"
      "other job has; None: WINNOW_JOB, else that of torchrun --rdzv-id, mpirun or srun, or a\n"
      "ValueError if there is none.");

  nb::class_<ep::Transport> transport(
      m, "Transport",
      "One rank of a world: for one thread at a time. When the transport object is freed, the\n"
      "rank has left the world.");
  transport.def_prop_ro("rank", &ep::Transport::rank)
      .def_prop_ro("world_size", &ep::Transport::world_size)
      .def_prop_ro("name", &ep::Transport::name,
                   "\"in_process\", \"shared_memory\" or \"nvshmem\".")
      .def_prop_ro("world_id", &ep::Transport::world_id,
                   "The same on every rank and no other world's.");
  define<"def describe_peer(self, rank: int) -> str">(
      transport, describe_peer,
      "The state of a rank: \"process 4711, stopped\". ValueError outside of the world.");
  define<"def peer_gone(self, rank: int) -> bool">(
      transport, peer_gone,
      "Whether that rank certainly will not write again. ValueError outside the world.");

  nb::class_<ep::InProcessWorld> world(m, "InProcessWorld", kWorldDoc);
  define<"def __init__(self, world_size: int) -> None">(world, make_world);
  world.def_prop_ro("world_size", &ep::InProcessWorld::world_size)
      .def("store", &ep::InProcessWorld::store, "The store that the ranks of this world share.");
  define<"def transport(self, rank: int) -> Transport">(
      world, transport_of,
      "The rank's transport, for one thread: the same object while any reference to it exists.\n"
      "ValueError for a rank outside of the world or whose transport was freed.");

  define<
      "def create_shared_memory(store: typing.Any, rank: int, world_size: int, *, "
      "timeout: float | None = None, prefix: str = 'winnow') -> Transport">(m, create_shared_memory,
                                                                            kSharedMemoryDoc);

  define<
      "def create_nvshmem(store: typing.Any, rank: int, world_size: int, "
      "device: typing.Any, *, timeout: float | None = None, prefix: str = 'winnow') "
      "-> Transport">(m, create_nvshmem, kNvshmemDoc);
  m.def("nvshmem_obstacle", nvshmem_obstacle,
        "Why create_nvshmem() cannot load NVSHMEM's library; empty if it can. Loads it.");

  nb::class_<ep::LaunchEnvironment>(m, "LaunchEnvironment", "The result of launch_environment().")
      .def_ro("rank", &ep::LaunchEnvironment::rank)
      .def_ro("world_size", &ep::LaunchEnvironment::world_size)
      .def_ro("local_world_size", &ep::LaunchEnvironment::local_world_size, "Ranks per node.")
      .def_ro("local_rank", &ep::LaunchEnvironment::local_rank,
              "Among the processes of this machine: the index of the rank's GPU.")
      .def_ro("rendezvous", &ep::LaunchEnvironment::rendezvous,
              "The folder in which the ranks meet.");
  m.def(
      "launch_environment", ep::launch_environment,
      "The rank of this process from WINNOW_RENDEZVOUS and the environment variables of torchrun,\n"
      "mpirun or srun, or WINNOW_RANK and WINNOW_WORLD_SIZE; None if there is no variable of\n"
      "Winnow. ValueError if only some of them are set.");
  m.def(
      "default_timeout",
      [] { return std::chrono::duration<double>(ep::default_timeout()).count(); },
      "Seconds that a wait may last: WINNOW_TIMEOUT_SECONDS, else 30. ValueError if the variable "
      "is\n"
      "invalid.");
}

}  // namespace winnow::python
