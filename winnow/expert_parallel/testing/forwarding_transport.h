// A transport that hands everything on to another one: what a test watches or changes, it
// overrides. Only for tests.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "winnow/expert_parallel/transport/transport.h"

namespace winnow::expert_parallel {

class ForwardingTransport : public Transport {
 public:
  explicit ForwardingTransport(std::shared_ptr<Transport> transport)
      : transport_(std::move(transport)) {}
  int rank() const override { return transport_->rank(); }
  int world_size() const override { return transport_->world_size(); }
  std::string name() const override { return transport_->name(); }
  std::string world_id() const override { return transport_->world_id(); }
  std::shared_ptr<SymmetricMemory> allocate(std::size_t bytes, const Deadline& deadline,
                                            std::string_view what) override {
    return transport_->allocate(bytes, deadline, what);
  }
  std::shared_ptr<SymmetricMemory> allocate_cuda(Device device, std::size_t bytes,
                                                 const Deadline& deadline,
                                                 std::string_view what) override {
    return transport_->allocate_cuda(device, bytes, deadline, what);
  }
  const FabricKernels* fabric() override { return transport_->fabric(); }
  int ranks_on_gpu() const override { return transport_->ranks_on_gpu(); }
  void put(SymmetricMemory& memory, int rank, std::size_t offset, const void* source,
           std::size_t bytes) override {
    transport_->put(memory, rank, offset, source, bytes);
  }
  void put_signal(SymmetricMemory& memory, int rank, std::size_t offset, const void* source,
                  std::size_t bytes, std::size_t signal_offset, std::uint64_t value) override {
    transport_->put_signal(memory, rank, offset, source, bytes, signal_offset, value);
  }
  void check() const override { transport_->check(); }
  std::string describe_peer(int rank) const override { return transport_->describe_peer(rank); }
  bool peer_gone(int rank) const override { return transport_->peer_gone(rank); }
  std::shared_ptr<void> watch_peers(std::function<void(int)> gone) override {
    return transport_->watch_peers(std::move(gone));
  }
  std::shared_ptr<void> presence() override { return transport_->presence(); }

 private:
  std::shared_ptr<Transport> transport_;
};

}  // namespace winnow::expert_parallel
