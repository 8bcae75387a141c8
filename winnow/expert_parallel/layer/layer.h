// What the calls of one rank's layer share. Internal.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "winnow/core/check.h"
#include "winnow/core/error.h"
#include "winnow/expert_parallel/config.h"
#include "winnow/expert_parallel/exchange/exchange.h"
#include "winnow/expert_parallel/exchange/rail.h"
#include "winnow/expert_parallel/layer/place.h"
#include "winnow/expert_parallel/memory/arena.h"
#include "winnow/expert_parallel/routing/placement.h"
#include "winnow/expert_parallel/transport/communicator.h"

namespace winnow::expert_parallel {

// `config` is resolved.
ExpertMap map_of(const Config& config, const Transport& transport);

// Checks the `sm_count` of a call: 0, or at most the layer's, for which its memory is sized.
void check_sm_count(const Check& check, const Config& config, int sm_count);

// Room for one dispatch of arena_rows rows with everything that may stand beside them.
std::int64_t first_segment_bytes(const Config& config);

// The findings of a call that did not wait, which the next call reports; the same on every rank.
struct DeferredFault {
  ErrorCode code = ErrorCode::invalid_argument;
  std::string text;
};

struct Layer : Place {
  // Collective. `config` is checked and its defaults are resolved.
  Layer(std::shared_ptr<Transport> transport, const Config& config);

  Communicator communicator;
  Exchange exchange;
  Rail rail;
  Arena arena;
  std::uint64_t epoch = 0;  // of the last exchange
  std::optional<DeferredFault> deferred;
  // Represents this layer in descriptors, which must not keep the rest of it alive.
  std::shared_ptr<const char> identity = std::make_shared<const char>('\0');

  // Runs the next epoch's exchange; the rail's waits belong to it then.
  void meet(std::string_view operation, std::string_view phase, const Header& header,
            const PairCounts* counts = nullptr, std::span<const std::byte> table = {});

  // Communicator::call(), which begins with what an earlier call deferred.
  template <class Body>
  auto call(std::string_view operation, const Body& body) {
    return communicator.call(operation, [&] {
      if (deferred) {
        const DeferredFault fault = *std::exchange(deferred, std::nullopt);
        throw error_from_message(fault.code, std::string(operation), fault.text);
      }
      return body();
    });
  }

  // Throws unless the extent that a rank has sent in this call lies in the arena.
  void check_extent(int sender, const Extent& extent, std::string_view what) const;

  // Reserves a region of the arena at every rank, alike on all of them: `bytes` [W] are what each
  // needs, `free_extents` what each offered. Ranks whose extent is too small get the beginning of
  // one new segment, which makes the call collective. Segments that are `releasable` are given
  // back.
  std::vector<Extent> reserve(std::vector<Extent> free_extents, std::span<const std::int64_t> bytes,
                              std::uint64_t releasable);
};

}  // namespace winnow::expert_parallel
