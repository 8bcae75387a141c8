// What happened to each word of a shared memory, and the search for accesses that nothing orders.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "winnow/simulator/engine/clock.h"
#include "winnow/simulator/engine/sites.h"
#include "winnow/simulator/plant.h"

namespace winnow::simulator {

// Operations that are under way, or have landed and nobody has waited for them yet: the stamp is
// that of their writes or reads, none until it is known.
struct OperationRecord {
  Stamp stamp;
  Actor thread;
  const char* what;
  Where where;
  bool waited = false;  // tcgen05.ld and st: the warp itself has waited for it
};
// "thread 5", "thread 5 of block 1", "a matrix product of warpgroup 0".
std::string name_of_actor(Actor actor);

struct Access {
  Stamp stamp;
  const Knowledge* knowledge;
  bool async_proxy;  // bulk copies, wgmma
  const char* what;
  Where where;
  // Of tensor memory: what was known at the last tcgen05.fence::after_thread_sync, and the actor
  // whose own accesses are in order, where they are no operation without a wait.
  const Clock* tensor = nullptr;
  Actor self = 0;
};

class Shadow {
 public:
  // Of the addresses [base, base + bytes).
  // `memory` names it in reports; `threads`: the number of actors that are threads.
  void reset(const char* memory, std::uint32_t base, std::size_t bytes,
             const std::vector<OperationRecord>* operations, unsigned threads);
  // It has so many bytes from now on, which are no fewer than before.
  void extend(std::size_t bytes) {
    bytes_ = bytes;
    words_.resize((bytes + 3) / 4);
  }
  void read(std::uint32_t address, std::size_t bytes, const Access& access);
  void write(std::uint32_t address, std::size_t bytes, const Access& access);
  // What a write() would report, if it is out of order with nothing but earlier writes of threads;
  // else empty. overwrite() makes it all the same.
  std::string unordered_rewrite(std::uint32_t address, std::size_t bytes, const Access& access);
  void overwrite(std::uint32_t address, std::size_t bytes, const Access& access);
  // Whether the access would be in order, without a trace of it.
  void check_only(std::uint32_t address, std::size_t bytes, bool writes, const Access& access);
  void atomic(std::uint32_t address, std::size_t bytes, const Access& access);
  // An atomic load: in order behind plain writes.
  void atomic_read(std::uint32_t address, std::size_t bytes, const Access& access);
  bool contains(std::uint32_t address, std::size_t bytes) const {
    return address >= base_ && address - base_ + bytes <= bytes_;
  }

 private:
  struct Word {
    Stamp write;
    std::uint32_t site = 0;   // of the write
    std::uint32_t reads = 0;  // a set of stamps
    std::uint8_t mask = 0;    // bytes that were written together
    bool atomic = false;
  };
  struct Added {
    std::uint32_t set;
    Stamp stamp;
    bool operator==(const Added&) const = default;
  };
  struct AddedHash {
    std::size_t operator()(const Added& added) const {
      return (added.stamp.bits * 0x9e3779b97f4a7c15ull ^ added.set) * 0xff51afd7ed558ccdull >> 20;
    }
  };

  template <class Function>
  void for_words(std::uint32_t address, std::size_t bytes, const Function& function);
  bool is_ordered(Stamp earlier, const Access& access) const;
  void check_written(const Word& word, std::uint32_t address, const Access& access) const;
  void check_reads(const Word& word, std::uint32_t address, const Access& access) const;
  std::uint32_t with_read(std::uint32_t set, Stamp stamp);
  void drop_unused_sets();
  std::string name_of(Stamp stamp) const;
  std::string describe(const Word& word, Stamp earlier, bool earlier_wrote, std::uint32_t address,
                       const Access& access) const;
  [[noreturn]] void report(const Word& word, Stamp earlier, bool earlier_wrote,
                           std::uint32_t address, const Access& access) const;

  const char* memory_ = "";
  std::uint32_t base_ = 0;
  std::size_t bytes_ = 0;
  unsigned threads_ = 0;
  const std::vector<OperationRecord>* operations_ = nullptr;
  std::vector<Word> words_;
  std::unordered_map<std::uint32_t, Word> before_atomics_;  // of words that are atomic
  std::vector<std::vector<Stamp>> read_sets_;               // [0]: none
  std::unordered_map<Added, std::uint32_t, AddedHash> added_;
  // Stamps that the sets hold, and with how many those that no word has any more are dropped.
  std::size_t stamps_ = 0, most_stamps_ = 0;
  Sites sites_;
};

}  // namespace winnow::simulator
