// SPDX-License-Identifier: Apache-2.0
// The code of debug_messages.h, for debug_collectives.cc alone.
#pragma once

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/debug_messages.h>
#include <tessera/comm/peer_watch.h>
#include <tessera/comm/rank_text.h>
#include <tessera/comm/rendezvous.h>

#include <cstring>
#include <set>
#include <stdexcept>
#include <utility>

namespace tessera {

struct DebugMessages::Message {
  CallCard card; // as it was announced
  Ends ends;
  std::string where; // begins the messages of errors
  std::string theirs; // the store's name for its counterpart
  at::Tensor tensor; // the transport's
  at::Tensor on_device; // where the user's is another
  DebugMessages* owner; // ends no sooner than it posts this, or fails it
  // Of Shared::mutex.
  bool matched = false;
  WorkPtr posted;
  std::exception_ptr error;

  CollectiveKind kind() const {
    return std::get<0>(ends);
  }
  int64_t peer() const {
    return std::get<1>(ends);
  }
};

class DebugMessages::Handle : public c10d::Work {
 public:
  Handle(std::shared_ptr<Shared> shared, std::shared_ptr<Message> message)
      : shared_(std::move(shared)), message_(std::move(message)) {}

  bool isCompleted() override {
    const std::scoped_lock lock(shared_->mutex);
    return message_->error || (message_->posted && posted_is_done());
  }
  bool isSuccess() const override {
    const std::scoped_lock lock(shared_->mutex);
    return !message_->error && message_->posted &&
        message_->posted->isSuccess();
  }
  std::exception_ptr exception() const override {
    const std::scoped_lock lock(shared_->mutex);
    return message_->error;
  }
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  // What lies on a device still has to be copied there.
  bool posted_is_done() {
    return !message_->on_device.defined() && message_->posted->isCompleted();
  }

  std::shared_ptr<Shared> shared_;
  std::shared_ptr<Message> message_;
};

inline bool DebugMessages::Handle::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(shared_->mutex);
  Message& message = *message_;
  const auto went = [&] {
    return message.error || message.posted ||
        (message.matched && shared_->waits_post);
  };
  if (!went()) { // its owner lives
    DebugMessages& owner = *message.owner;
    const auto limit = timeout == kNoTimeout ? owner.timeout_ : timeout;
    if (!shared_->changed.wait_for(lock, limit, went)) {
      lock.unlock();
      owner.time_out(message, limit);
    }
  }
  if (!message.error && !message.posted) {
    lock.unlock();
    message.owner->post_matched();
    lock.lock();
  }
  if (message.error) {
    std::rethrow_exception(message.error);
  }
  const WorkPtr posted = message.posted;
  lock.unlock();
  const bool done = posted->wait(timeout);
  if (message.kind() == CollectiveKind::kRecv && message.on_device.defined()) {
    message.on_device.copy_(message.tensor);
  }
  return done;
}

inline DebugMessages::DebugMessages(
    const GroupSetup& setup, Collectives& transport)
    : group_store_(setup.store),
      transport_(transport),
      rank_(setup.rank),
      world_ranks_(setup.world_ranks),
      name_(setup.name),
      host_(host_name()),
      timeout_(setup.timeout),
      peers_(setup.peers),
      failure_(setup, "debug mode") {
  if (peers_) {
    listener_ = peers_->add_listener([this](int64_t world_rank) {
      if (failure_.in_group(world_rank)) {
        die(failure_.end_of(world_rank));
      }
    });
  }
}

inline DebugMessages::~DebugMessages() {
  if (peers_) {
    peers_->remove_listener(listener_);
  }
  die("the group ended");
  {
    const std::scoped_lock lock(shared_->mutex);
    shared_->stopping = true;
  }
  shared_->changed.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

inline WorkPtr DebugMessages::start(
    CollectiveKind kind, const at::Tensor& tensor, int64_t peer, int tag) {
  const bool sends = kind == CollectiveKind::kSend;
  const auto message = std::make_shared<Message>();
  message->ends = {kind, peer, tag};
  message->tensor = tensor;
  message->owner = this;
  if (!tensor.is_cpu()) {
    message->on_device = tensor;
    message->tensor = sends
        ? tensor.cpu()
        : at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  }
  const std::scoped_lock in_order(start_mutex_);
  const uint64_t number = numbers_[message->ends] + 1;
  message->where = fmt::format(
      "{} [rank {}/{}, group {}, seq {}] {} rank {}, tag {}",
      name_of(kind),
      rank_,
      world_ranks_.size(),
      name_,
      number,
      sends ? "to" : "from",
      peer,
      tag);
  const std::string dead = this->dead();
  if (!dead.empty()) {
    throw PeerError(
        message->where + ": the group is dead; first error: " + dead);
  }
  message->card = card_of(
      {.kind = kind, .dtype = tensor.scalar_type(), .shape = tensor.sizes()},
      number,
      host_);
  message->theirs = key_of(opposite(kind), peer, rank_, tag, number);
  try {
    if (!store_) {
      store_ = group_store_->clone();
      thread_ = std::thread([this] { run(); });
    }
    std::vector<uint8_t> bytes(sizeof(CallCard));
    std::memcpy(bytes.data(), &message->card, bytes.size());
    store_->set(key_of(kind, rank_, peer, tag, number), bytes);
  } catch (const std::exception& error) {
    std::rethrow_exception(explain(*message, error));
  }
  numbers_[message->ends] = number;
  {
    const std::scoped_lock lock(shared_->mutex);
    shared_->pending.push_back(message);
  }
  shared_->changed.notify_all();
  return c10::make_intrusive<Handle>(shared_, message);
}

inline void DebugMessages::run() {
  constexpr auto kPause = std::chrono::microseconds(200);
  Shared& shared = *shared_;
  std::unique_lock lock(shared.mutex);
  while (true) {
    shared.changed.wait(
        lock, [&] { return shared.stopping || !shared.pending.empty(); });
    if (shared.stopping) {
      return;
    }
    const auto pending = shared.pending;
    lock.unlock();
    std::set<Ends> behind; // of a message whose counterpart is not there yet
    for (const auto& message : pending) {
      if (!behind.contains(message->ends) && !look_at(*message)) {
        behind.insert(message->ends);
      }
    }
    lock.lock();
    std::erase_if(shared.pending, [](const auto& message) {
      return message->posted || message->error;
    });
    shared.changed.wait_for(lock, kPause, [&] { return shared.stopping; });
  }
}

// Whether it has gone on: to the transport, to its wait, or to its error.
inline bool DebugMessages::look_at(Message& message) {
  {
    const std::scoped_lock lock(shared_->mutex);
    if (message.matched || message.error) {
      return true;
    }
  }
  try {
    // Asked first: what a rank has announced before its end counts.
    const bool is_done = peers_ && peers_->is_done(world_rank(message.peer()));
    const auto theirs = announced(message.theirs);
    if (!theirs) {
      if (is_done) {
        fail(message, explain(message, PeerError("no counterpart was called")));
      }
      return is_done;
    }
    compare(message, *theirs);
    store_->deleteKey(message.theirs);
    post(message);
  } catch (const PeerError&) {
    fail(message, std::current_exception());
  } catch (const std::exception& error) {
    fail(message, explain(message, error));
  }
  return true;
}

inline void DebugMessages::compare(
    const Message& message, const CallCard& theirs) const {
  CallHeader turned = theirs.header; // as its counterpart would look here
  turned.kind = message.card.header.kind;
  const char* mismatch = !is_sound(theirs.header)
      ? "bytes"
      : find_mismatch({message.card.header, {}, {}}, {turned, {}, {}});
  if (mismatch != nullptr) {
    throw PeerError(fmt::format(
        "{}: {} here, {}; {} must match",
        message.where,
        describe({message.card.header, {}, {}}),
        told_by(message.peer(), theirs),
        mismatch));
  }
}

// MPI that was initialised for one thread refuses this one: then the program's
// thread posts, in wait().
inline void DebugMessages::post(Message& message) {
  WorkPtr posted;
  bool refused = false;
  try {
    posted = hand_over(message);
  } catch (const UsageError&) {
    refused = true;
  }
  {
    const std::scoped_lock lock(shared_->mutex);
    message.matched = true;
    message.posted = std::move(posted);
    shared_->waits_post = shared_->waits_post || refused;
  }
  shared_->changed.notify_all();
}

inline WorkPtr DebugMessages::hand_over(const Message& message) {
  const int tag = std::get<2>(message.ends);
  return message.kind() == CollectiveKind::kSend
      ? transport_.send(message.tensor, message.peer(), tag)
      : transport_.recv(message.tensor, message.peer(), tag);
}

inline void DebugMessages::post_matched() {
  const std::scoped_lock in_order(post_mutex_);
  std::deque<std::shared_ptr<Message>> pending;
  {
    const std::scoped_lock lock(shared_->mutex);
    pending = shared_->pending;
  }
  for (const auto& message : pending) {
    {
      const std::scoped_lock lock(shared_->mutex);
      if (!message->matched || message->posted || message->error) {
        continue;
      }
    }
    try {
      WorkPtr posted = hand_over(*message);
      const std::scoped_lock lock(shared_->mutex);
      message->posted = std::move(posted);
    } catch (...) {
      const std::scoped_lock lock(shared_->mutex);
      message->error = std::current_exception();
    }
  }
}

inline void DebugMessages::fail(
    Message& message, const std::exception_ptr& error) {
  {
    const std::scoped_lock lock(shared_->mutex);
    message.error = message.error ? message.error : error;
  }
  die(message_of(error));
}

inline void DebugMessages::die(const std::string& reason) {
  {
    const std::scoped_lock lock(shared_->mutex);
    std::string& dead = shared_->dead;
    dead = dead.empty() ? reason : dead;
    for (const auto& message : shared_->pending) {
      if (!message->posted && !message->error) {
        message->error = std::make_exception_ptr(PeerError(
            message->where + ": the group is dead; first error: " + dead));
      }
    }
  }
  shared_->changed.notify_all();
}

inline std::string DebugMessages::dead() const {
  const std::scoped_lock lock(shared_->mutex);
  return shared_->dead;
}

inline std::exception_ptr DebugMessages::explain(
    const Message& message, const std::exception& error) const {
  return failure_.explain(
      {.where = message.where,
       .seq = message.card.header.seq,
       .suspect = message.peer(),
       .message = true},
      error);
}

// A caller that only looks in for a while blames nobody.
inline void DebugMessages::time_out(
    Message& message, std::chrono::milliseconds limit) {
  if (limit < timeout_) {
    throw TimeoutError(
        fmt::format("{}: not done within {} ms", message.where, limit.count()));
  }
  const auto& [kind, peer, tag] = message.ends;
  std::exception_ptr error;
  try {
    const std::scoped_lock in_order(start_mutex_);
    const auto number = numbers_[{opposite(kind), peer, tag}] + 1;
    const auto theirs = announced(key_of(kind, peer, rank_, tag, number));
    if (theirs && is_sound(theirs->header)) {
      error = std::make_exception_ptr(PeerError(fmt::format(
          "{}: {} here, {}, and neither has called the other half within {} "
          "ms; directions must match",
          message.where,
          describe({message.card.header, {}, {}}),
          told_by(peer, *theirs),
          limit.count())));
    }
  } catch (const std::exception&) { // the store has gone
    error = nullptr;
  }
  if (!error) {
    error = explain(message, std::runtime_error("timed out"));
  }
  fail(message, error);
  std::rethrow_exception(error);
}

inline std::string DebugMessages::told_by(
    int64_t rank, const CallCard& card) const {
  return fmt::format(
      "{} on {}",
      is_sound(card.header) ? describe({card.header, {}, {}})
                            : "bytes that describe no call",
      rank_text(rank, world_rank(rank), card.pid, card.host.data()));
}

inline std::string DebugMessages::key_of(
    CollectiveKind kind, int64_t by, int64_t peer, int tag, uint64_t number) {
  return fmt::format("{}/{}/{}/{}/{}", name_of(kind), by, peer, tag, number);
}

// What the store holds under that name, if it holds it.
inline std::optional<CallCard> DebugMessages::announced(
    const std::string& key) const {
  if (!store_->check({key})) {
    return std::nullopt;
  }
  std::vector<uint8_t> bytes = store_->get(key);
  bytes.resize(sizeof(CallCard)); // it comes from a peer
  return read_card(reinterpret_cast<const std::byte*>(bytes.data()));
}

} // namespace tessera
