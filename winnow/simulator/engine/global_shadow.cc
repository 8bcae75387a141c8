#include "winnow/simulator/engine/global_shadow.h"

#include <algorithm>
#include <deque>
#include <iterator>
#include <map>
#include <string>
#include <unordered_map>

#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/engine/device_memory.h"
#include "winnow/simulator/engine/grid.h"
#include "winnow/simulator/engine/report.h"
#include "winnow/simulator/engine/sites.h"

namespace winnow::simulator {
namespace {

// AddressSanitizer sees plain accesses instead of the engine.
#ifdef WINNOW_PLAIN_ACCESSES_UNSEEN
constexpr bool kOn = false;
#else
constexpr bool kOn = true;
#endif

enum class Strength : std::uint8_t { weak, gpu, system };

// An access: of which thread of which cluster, and its count then. 0: there was none.
class Event {
 public:
  Event() = default;
  Event(std::uint32_t cluster_number, Actor actor, std::uint32_t count, Strength strength)
      : bits_(std::uint64_t{cluster_number} << kClusterAt | std::uint64_t{actor} << kActorAt |
              std::uint64_t{std::min(count, kUnderWay)} << 2 |
              static_cast<std::uint64_t>(strength)) {}
  bool none() const { return bits_ == 0; }
  std::uint32_t cluster_number() const { return static_cast<std::uint32_t>(bits_ >> kClusterAt); }
  Actor actor() const {
    return static_cast<Actor>(bits_ >> kActorAt & ((1u << (kClusterAt - kActorAt)) - 1));
  }
  // kUnderWay: a copy for which its thread has not waited.
  std::uint32_t count() const { return static_cast<std::uint32_t>(bits_ >> 2 & kUnderWay); }
  Strength strength() const { return static_cast<Strength>(bits_ & 3); }
  bool is_strong() const { return strength() != Strength::weak; }
  bool operator==(const Event&) const = default;
  bool is_by_thread_of(Event other) const {
    return cluster_number() == other.cluster_number() && actor() == other.actor();
  }

  static constexpr std::uint32_t kUnderWay = (1u << 23) - 1;

 private:
  static constexpr int kActorAt = 25, kClusterAt = 40;
  std::uint64_t bits_ = 0;
};

struct Word {
  Event stored;     // the last weak write
  Event strong[2];  // behind it: the last strong one, and the last one of another cluster before
  Event reads[2];   // the last ones of two clusters
  std::uint16_t stored_site = 0, strong_sites[2] = {}, read_sites[2] = {};
  std::uint8_t mask = 0;  // bytes that were stored together
  bool copied = false;    // stored by the asynchronous proxy
};

constexpr std::uintptr_t kPageBytes = 4096;
// So many pages; then accesses to that which came first are forgotten, and are not in any reports.
constexpr std::size_t kMostPages = 4096;
struct Page {
  Word words[kPageBytes / 4];
};

struct KnownCluster {
  Ticket ticket;
  std::int64_t launch;
  unsigned first_block[3], threads;
  unsigned gpu;
  Actor kernel_before;
  std::shared_ptr<const Horizon> behind, behind_early;
};

struct {
  std::unordered_map<std::uintptr_t, std::unique_ptr<Page>> pages;
  std::deque<std::uintptr_t> order;                      // in which pages came
  std::unordered_map<std::uintptr_t, Message> messages;  // by address
  std::array<std::pair<std::uintptr_t, Page*>, 64> recent{};
  std::vector<std::pair<std::uintptr_t, Word>> before_held;  // of the store that is held
  std::vector<KnownCluster> clusters{1};
  // Of each stream: what words had told all kernels up to that of the number.
  std::map<std::uint32_t, std::map<std::uint32_t, Others>> told;
  Sites sites;
} all;

Page* page_at(std::uintptr_t number) {
  auto& [known, page] = all.recent[number % all.recent.size()];
  if (known == number && page != nullptr) return page;
  const auto found = all.pages.find(number);
  known = number;
  if (found != all.pages.end()) return page = found->second.get();
  std::unique_ptr<Page> made;
  while (all.pages.size() >= kMostPages) {
    const std::uintptr_t first = all.order.front();
    all.order.pop_front();
    if (auto node = all.pages.extract(first)) made = std::move(node.mapped());
    auto& recent = all.recent[first % all.recent.size()];
    if (recent.first == first) recent = {};
  }
  known = number;
  if (made) {
    *made = {};
  } else {
    made = std::make_unique<Page>();
  }
  all.order.push_back(number);
  return page = (all.pages[number] = std::move(made)).get();
}

Event event_of(Strength strength) {
  return {cluster->number, current->actor,
          static_cast<std::uint32_t>(current->knowledge.generic[current->actor]), strength};
}

// Of the kernels before it, the running thread's cluster or another knows in any case, or behind
// griddepcontrol.wait.
const Horizon& horizon(const KnownCluster& of, const Clock& clock) {
  return *(clock[of.kernel_before] > 0 ? of.behind : of.behind_early);
}

enum class Known { no, by_words, by_kernels };

// How the running thread knows of an event.
Known known(Event event, bool by_proxy = false) {
  const Knowledge& knowledge = current->knowledge;
  const Clock& clock = by_proxy ? knowledge.proxy_of_global : knowledge.generic;
  const auto knows = [&](const Clock& one) {
    return one[event.actor()] >= static_cast<std::int32_t>(event.count());
  };
  const std::uint32_t number = event.cluster_number();
  if (number == cluster->number) return knows(clock) ? Known::by_words : Known::no;
  const Ticket ticket = all.clusters[number].ticket;
  if (holds(horizon(all.clusters[cluster->number], knowledge.generic), ticket)) {
    return Known::by_kernels;
  }
  const Clock* const told = clock.others().find(number);
  if (told != nullptr && knows(*told)) return Known::by_words;
  const bool of_other =
      knowledge.generic.others().any([&](std::uint32_t other, const Clock& theirs) {
        return holds(horizon(all.clusters[other], theirs), ticket);
      });
  return of_other ? Known::by_kernels : Known::no;
}

bool is_same_gpu(Event event) {
  return all.clusters[event.cluster_number()].gpu == cluster->run->gpu;
}
// Whether two strong accesses may come in any order: the scopes of both include the other's thread.
bool are_atomic(Event earlier, Strength strength) {
  if (!earlier.is_strong() || strength == Strength::weak) return false;
  return is_same_gpu(earlier) ||
         (earlier.strength() == Strength::system && strength == Strength::system);
}

// Whether it is a read of the kernel ahead, before that let the running thread's begin.
bool was_let_go(Event read) {
  const LetGo* const ahead = cluster->run->ahead.get();
  const Clock* const reads = ahead == nullptr ? nullptr : ahead->reads.find(read.cluster_number());
  return reads != nullptr && (*reads)[read.actor()] >= static_cast<std::int32_t>(read.count());
}

std::string name_of(Event event) {
  const KnownCluster& its = all.clusters[event.cluster_number()];
  const unsigned thread = event.actor() % its.threads, rank = event.actor() / its.threads;
  return "thread " + std::to_string(thread) + " (warp " + std::to_string(thread / 32) +
         ") of block [" + std::to_string(its.first_block[0] + rank) + ", " +
         std::to_string(its.first_block[1]) + ", " + std::to_string(its.first_block[2]) + "] in " +
         name_of_launch(its.launch);
}

struct Made {
  Event event;
  Proxy proxy;
  const char* what;
  const Where& where;
};

std::uint16_t site_of(const Made& made) {
  return static_cast<std::uint16_t>(all.sites.number_of({made.what, made.where}));
}

std::string describe(const Made& made, const void* address, Event earlier, std::uint16_t site,
                     bool wrote) {
  const Site& its = all.sites[site];
  std::string text = std::string(made.what) + " of global memory, " + place_in_memory(address) +
                     ", is not ordered behind a " + (wrote ? "write" : "read") + " by " +
                     name_of(earlier) + " (" + its.what + ", " + line_of(its.where) + ")";
  if (earlier.count() == Event::kUnderWay) text += ", which has not waited for it";
  return text;
}

// Looks at the words of an access: at what each must come behind, which it hands to
// `found(address, event, site, wrote)`.
class Search {
 public:
  explicit Search(const Made& made) : made_(made) {}

  template <class Found>
  void writes(Word& word, std::uintptr_t at, std::uint8_t mask, bool stores, const Found& found) {
    if ((word.mask & mask) != 0) {
      if (!is_over(word.stored, behind_)) found(at, word.stored, word.stored_site, true);
      check_proxy(word, at);
    }
    // A word that the thread itself has added to is its own to store to: atomic operations on a
    // word are in order.
    const bool is_own = made_.event.is_by_thread_of(word.strong[0]);
    for (int i = 0; i < (stores && is_own ? 1 : 2); ++i) {
      const Event strong = word.strong[i];
      if (strong.none() || are_atomic(strong, made_.event.strength())) continue;
      if (!is_over(strong, behind_strong_[i])) found(at, strong, word.strong_sites[i], true);
    }
  }
  template <class Found>
  void reads(Word& word, std::uintptr_t at, const Found& found) {
    for (int i = 0; i < 2; ++i) {
      const Event read = word.reads[i];
      if (read.none() || are_atomic(read, made_.event.strength())) continue;
      if (was_let_go(read)) continue;
      if (!is_over(read, behind_reads_[i])) found(at, read, word.read_sites[i], false);
    }
  }

 private:
  static bool is_over(Event event, Event& last) {
    if (event.none() || event == last) return true;
    if (known(event) == Known::no) return false;
    last = event;
    return true;
  }
  void check_proxy(const Word& word, std::uintptr_t at) {
    if (made_.proxy == Proxy::generic || word.copied || word.stored.none() ||
        word.stored == fenced_) {
      return;
    }
    fenced_ = word.stored;
    if (known(word.stored) != Known::by_words || known(word.stored, true) != Known::no) return;
    const Site& site = all.sites[word.stored_site];
    fail("proxy fence",
         std::string(made_.what) + " of global memory, " +
             place_in_memory(reinterpret_cast<const void*>(at)) +
             ", meets what the generic proxy wrote there (" + site.what + ", " +
             line_of(site.where) + ", " + name_of(word.stored) +
             ") without a proxy fence between them",
         made_.where);
  }

  const Made& made_;
  Event behind_, behind_strong_[2], behind_reads_[2], fenced_;
};

// Calls function(word, address, mask of its bytes).
template <class Function>
void for_words(const void* address, std::size_t bytes, const Function& function) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address), end = begin + bytes;
  Page* page = nullptr;
  for (std::uintptr_t at = begin / 4 * 4; at < end; at += 4) {
    if (page == nullptr || at % kPageBytes == 0) page = page_at(at / kPageBytes);
    const std::uintptr_t first = at < begin ? begin - at : 0;
    const std::uintptr_t last = std::min<std::uintptr_t>(4, end - at);
    const auto mask = static_cast<std::uint8_t>((0xf << first) & (0xf >> (4 - last)));
    function(page->words[at % kPageBytes / 4], at, mask);
  }
}

void read(const void* address, std::size_t bytes, const Made& made) {
  if (!kOn) return;
  Search search(made);
  const std::uint16_t site = site_of(made);
  for_words(address, bytes, [&](Word& word, std::uintptr_t at, std::uint8_t mask) {
    search.writes(
        word, at, mask, false, [&](std::uintptr_t place, Event earlier, auto its, bool wrote) {
          fail("race", describe(made, reinterpret_cast<const void*>(place), earlier, its, wrote),
               made.where);
        });
    if (mask != 0xf) return;  // neighbours in a word are told apart for writes only
    // In the place of a read of the same cluster, of none, of one that it comes behind, or of the
    // older one.
    const auto is_own = [&](Event read) {
      return read.cluster_number() == cluster->number && read.is_strong() == made.event.is_strong();
    };
    int i = is_own(word.reads[0]) ? 0 : is_own(word.reads[1]) ? 1 : -1;
    if (i < 0) i = word.reads[0].none() ? 0 : word.reads[1].none() ? 1 : -1;
    if (i < 0) i = known(word.reads[0]) != Known::no ? 0 : 1;
    word.reads[i] = made.event;
    word.read_sites[i] = site;
  });
}

// What the write would be reported for; empty: nothing.
std::string write(const void* address, std::size_t bytes, const Made& made) {
  std::string text;
  if (!kOn) return text;
  Search search(made);
  const std::uint16_t site = site_of(made);
  const auto found = [&](std::uintptr_t place, Event earlier, std::uint16_t its, bool wrote) {
    if (text.empty()) {
      text = describe(made, reinterpret_cast<const void*>(place), earlier, its, wrote);
    }
  };
  for_words(address, bytes, [&](Word& word, std::uintptr_t at, std::uint8_t mask) {
    search.writes(word, at, mask, true, found);
    search.reads(word, at, found);
  });
  all.before_held.clear();
  for_words(address, bytes, [&](Word& word, std::uintptr_t at, std::uint8_t mask) {
    if (!text.empty()) all.before_held.emplace_back(at, word);
    if (made.event.is_strong()) {
      if (!word.strong[0].none() && word.strong[0].cluster_number() != cluster->number) {
        word.strong[1] = word.strong[0];
        word.strong_sites[1] = word.strong_sites[0];
      }
      word.strong[0] = made.event;
      word.strong_sites[0] = site;
    } else {
      word = {};
      word.stored = made.event;
      word.stored_site = site;
      word.mask = mask;
      word.copied = made.proxy == Proxy::asynchronous;
    }
  });
  return text;
}

Strength strength_of(Scope scope) {
  return scope == Scope::system ? Strength::system : Strength::gpu;
}

}  // namespace

std::uint32_t number_cluster(const GridRun& run, const unsigned (&first)[3], unsigned threads,
                             Actor kernel_before) {
  all.clusters.push_back({run.ticket,
                          run.number,
                          {first[0], first[1], first[2]},
                          threads,
                          run.gpu,
                          kernel_before,
                          run.behind,
                          run.behind_early});
  return static_cast<std::uint32_t>(all.clusters.size() - 1);
}

Others told_before(const Horizon& horizon) {
  Others before;
  for (const auto& [stream, numbers] : all.told) {
    const auto next = numbers.upper_bound(stream < horizon.size() ? horizon[stream] : 0);
    if (next != numbers.begin()) before.join(std::prev(next)->second);
  }
  return before;
}

Others told_to_host() {
  Others told;
  for (const auto& [word, message] : all.messages) {
    if (!is_of_host(reinterpret_cast<const void*>(word))) continue;
    told.join(message.levels[static_cast<std::size_t>(Scope::system)].told.generic);
  }
  return told;
}

void note_end(Ticket ticket, const Others& told) {
  auto& numbers = all.told[ticket.stream];
  Others sum = numbers.empty() ? Others() : numbers.rbegin()->second;
  sum.join(told);
  numbers[ticket.number] = sum;
}

void note_read(const void* address, std::size_t bytes, const char* what, const Where& where,
               Proxy proxy) {
  settle_store();
  read(address, bytes, {event_of(Strength::weak), proxy, what, where});
}

void note_store(const void* address, std::size_t bytes, const Where& where) {
  settle_store();
  const std::string text =
      write(address, bytes, {event_of(Strength::weak), Proxy::generic, "a store", where});
  if (!text.empty()) hold_store(address, bytes, text, where);
}

void forget_held_store() {
  for (const auto& [at, word] : all.before_held) {
    page_at(at / kPageBytes)->words[at % kPageBytes / 4] = word;
  }
  all.before_held.clear();
}

void note_strong_read(const void* address, std::size_t bytes, Scope scope, const char* what,
                      const Where& where) {
  settle_store();
  read(address, bytes, {event_of(strength_of(scope)), Proxy::generic, what, where});
}

void note_strong_write(const void* address, std::size_t bytes, Scope scope, const char* what,
                       const Where& where) {
  settle_store();
  const std::string text =
      write(address, bytes, {event_of(strength_of(scope)), Proxy::generic, what, where});
  if (!text.empty()) fail("race", text, where);
}

void note_copied(const void* address, std::size_t bytes, const char* what, const Where& where) {
  settle_store();
  const Event event{cluster->number, current->actor, Event::kUnderWay, Strength::weak};
  const std::string text = write(address, bytes, {event, Proxy::asynchronous, what, where});
  if (!text.empty()) fail("race", text, where);
}

void settle_copied(const void* address, std::size_t bytes) {
  if (!kOn) return;
  const Event under_way{cluster->number, current->actor, Event::kUnderWay, Strength::weak};
  const Event ended = event_of(Strength::weak);
  for_words(address, bytes, [&](Word& word, std::uintptr_t, std::uint8_t) {
    if (word.stored == under_way) word.stored = ended;
  });
}

Message* global_message(const void* word, bool makes) {
  const auto at = reinterpret_cast<std::uintptr_t>(word);
  if (!kOn) return nullptr;
  if (makes) return &all.messages[at];
  const auto found = all.messages.find(at);
  return found == all.messages.end() ? nullptr : &found->second;
}

void forget_accesses(const void* begin, std::size_t bytes) {
  // Allocations share no page with others.
  const auto first = reinterpret_cast<std::uintptr_t>(begin);
  const std::uintptr_t end = (first + bytes + kPageBytes - 1) / kPageBytes;
  std::erase_if(all.pages, [&](const auto& page) {
    return page.first >= first / kPageBytes && page.first < end;
  });
  std::erase_if(all.messages, [&](const auto& message) {
    return message.first >= first && message.first < first + bytes;
  });
  all.recent = {};
}

void forget_all_accesses() {
  all.pages.clear();
  all.order.clear();
  all.messages.clear();
  all.recent = {};
  all.clusters.resize(1);
  all.told.clear();
  all.sites.clear();
}

}  // namespace winnow::simulator
