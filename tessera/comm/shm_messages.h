// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/shm_window.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

// One send or recv under way.
struct ShmTransfer {
  bool outgoing;
  at::Tensor tensor;
  int64_t peer;
  int tag;
  uint64_t moved = 0; // bytes, a send's header included
  bool done = false;
  std::string mismatch; // what arrived instead of what was asked for

  std::string text() const; // "of Float [3,4]"
};
using ShmTransferPtr = std::shared_ptr<ShmTransfer>;

// The messages of one rank: one ring of bytes per ordered pair of ranks, in
// which each message is a header and its elements. Nothing here blocks: pump()
// moves what fits, and throws CorruptionError when a peer says what cannot be.
// A message whose receive is not posted yet is kept aside once another one
// waits behind it. Not thread-safe.
class ShmMessages {
 public:
  ShmMessages(const ShmWindow& window, int64_t rank);

  ShmTransferPtr send(const at::Tensor& tensor, int64_t peer, int tag);
  ShmTransferPtr recv(const at::Tensor& tensor, int64_t peer, int tag);
  void pump();
  bool pending() const {
    return pending_ > 0;
  }

 private:
  struct Header {
    uint64_t bytes;
    int64_t dtype;
    int64_t tag;
  };
  struct Message { // arrived without a posted receive
    Header header;
    std::vector<std::byte> data; // grows as they arrive
  };
  struct Peer {
    std::deque<ShmTransferPtr> sends;
    std::deque<ShmTransferPtr> receives;
    std::deque<Message> kept;
    bool inside =
        false; // a message whose header was read, but not all of its elements
    Header header{};
    uint64_t done = 0; // its bytes read
    ShmTransferPtr target; // null: it goes to kept.back()
  };

  uint64_t bytes_in(int64_t from, int64_t to) const;
  bool push(int64_t peer);
  bool pull(int64_t peer);
  bool open_message(int64_t peer);
  bool match_kept(int64_t peer, const ShmTransferPtr& transfer);
  void deliver_last_kept(int64_t peer);
  bool check(ShmTransfer& transfer, const Header& header) const;
  void complete(const ShmTransferPtr& transfer);
  void ring_doorbell(int64_t peer);

  const ShmWindow& window_;
  int64_t rank_;
  std::vector<Peer> peers_;
  int64_t pending_ = 0;
};

} // namespace tessera
