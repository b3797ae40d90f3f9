// SPDX-License-Identifier: Apache-2.0
// What goes wrong between ranks that are threads. process_test.cc has the same
// for processes.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/comm/run_ranks.h>

#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace tessera {
namespace {

using Counts = std::vector<int64_t>;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

// Rank 0 does one thing and the others another; everyone must get a PeerError
// whose text matches: over shm, and over gloo in the debug mode.
template <typename Matcher>
void expect_mismatch(
    int64_t n,
    const std::function<void(const Group&)>& here,
    const std::function<void(const Group&)>& there,
    const Matcher& matcher) {
  const auto fn = [&](World world) {
    const auto& mine = world.rank() == 0 ? here : there;
    EXPECT_THAT(
        [&] { mine(world.group()); }, ThrowsMessage<PeerError>(matcher));
    // The group is dead and says so.
    EXPECT_THAT(
        [&] { world.group().barrier()->wait(); },
        ThrowsMessage<PeerError>(
            AllOf(HasSubstr("the group is dead"), matcher)));
  };
  run_ranks(n, fn);
  run_ranks(n, fn, {.backend = "gloo", .debug_collectives = true});
}

TEST(Mismatch, Shapes) { // nccl 1394
  for (const int64_t n : {2, 4}) {
    expect_mismatch(
        n,
        [](const Group& group) {
          group.all_reduce(at::ones({100}), ReduceOp::kSum)->wait();
        },
        [](const Group& group) {
          group.all_reduce(at::ones({200}), ReduceOp::kSum)->wait();
        },
        AllOf(
            HasSubstr("all_reduce [rank"),
            HasSubstr("[100]"),
            HasSubstr("[200]"),
            HasSubstr("shapes must match"),
            HasSubstr("seq 1")));
  }
}

TEST(Mismatch, Dtypes) { // nccl 1417
  expect_mismatch(
      2,
      [](const Group& group) {
        group.all_reduce(at::ones({100}), ReduceOp::kSum)->wait();
      },
      [](const Group& group) {
        group.all_reduce(at::ones({100}, at::kInt), ReduceOp::kSum)->wait();
      },
      AllOf(
          HasSubstr("Float"),
          HasSubstr("Int"),
          HasSubstr("dtypes must match")));
}

TEST(Mismatch, Operations) { // speechbrain 1166
  expect_mismatch(
      3,
      [](const Group& group) { group.broadcast(at::ones({100}), 0)->wait(); },
      [](const Group& group) {
        group.all_reduce(at::ones({100}), ReduceOp::kSum)->wait();
      },
      AllOf(
          HasSubstr("broadcast"),
          HasSubstr("all_reduce"),
          HasSubstr("operations must match")));
}

TEST(Mismatch, ReductionsRootsAndCounts) {
  expect_mismatch(
      2,
      [](const Group& group) {
        group.all_reduce(at::ones({9}), ReduceOp::kSum)->wait();
      },
      [](const Group& group) {
        group.all_reduce(at::ones({9}), ReduceOp::kMax)->wait();
      },
      AllOf(
          HasSubstr("(sum)"),
          HasSubstr("(max)"),
          HasSubstr("reductions must match")));
  expect_mismatch(
      2,
      [](const Group& group) { group.broadcast(at::ones({9}), 0)->wait(); },
      [](const Group& group) { group.broadcast(at::ones({9}), 1)->wait(); },
      HasSubstr("roots must match"));
  expect_mismatch(
      2,
      [](const Group& group) {
        group.all_gather(at::ones({4}), at::ones({9}), Counts{4, 5})->wait();
      },
      [](const Group& group) {
        group.all_gather(at::ones({5}), at::ones({8}), Counts{3, 5})->wait();
      },
      AllOf(
          HasSubstr("[4,5]"),
          HasSubstr("[3,5]"),
          HasSubstr("counts must match")));
}

TEST(Mismatch, CountsOfAPairInAnAllToAllFailEveryRank) {
  expect_mismatch(
      3,
      [](const Group& group) {
        group
            .all_to_all(
                at::ones({4}), at::ones({2}), Counts{0, 3, 1}, Counts{0, 1, 1})
            ->wait();
      },
      [](const Group& group) {
        const Counts gives =
            group.rank() == 1 ? Counts{1, 0, 1} : Counts{1, 1, 0};
        const Counts takes = group.rank() == 1
            ? Counts{2, 0, 1}
            : Counts{1, 1, 0}; // rank 0 gives rank 1 three
        const auto total = [](const Counts& counts) {
          return counts[0] + counts[1] + counts[2];
        };
        group
            .all_to_all(
                at::ones({total(gives)}),
                at::ones({total(takes)}),
                gives,
                takes)
            ->wait();
      },
      AllOf(HasSubstr("gives 3"), HasSubstr("takes 2")));
}

TEST(Mismatch, ErrorNamesTheAsker) {
  const AskerScope scope("unused: scopes belong to a thread");
  const auto fn = [](World world) {
    const AskerScope inner(world.rank() == 0 ? "mm" : "optimizer.step");
    EXPECT_THAT(
        [&] {
          world.group()
              .all_reduce(at::ones({1 + world.rank()}), ReduceOp::kSum)
              ->wait();
        },
        ThrowsMessage<PeerError>(AllOf(
            HasSubstr("asked by mm"), HasSubstr("asked by optimizer.step"))));
  };
  run_ranks(2, fn);
  run_ranks(2, fn, {.backend = "gloo", .debug_collectives = true});
}

TEST(Mismatch, MessagesOfDifferentSizeFailBothEnds) {
  run_ranks(2, [](World world) {
    EXPECT_THAT(
        [&] {
          if (world.rank() == 0) {
            world.group().send(at::ones({100}), 1, 3)->wait();
            world.group().barrier()->wait(); // a small message is gone before
                                             // its receiver looks at it
          } else {
            world.group().recv(at::ones({50}), 0, 3)->wait();
          }
        },
        ThrowsMessage<PeerError>(AllOf(
            HasSubstr("400 bytes of Float arrived"), HasSubstr("tag 3"))));
  });
}

// In the debug mode both ends of a message get a PeerError that matches.
template <typename Matcher>
void expect_message_mismatch(
    const std::function<void(const Group&)>& here,
    const std::function<void(const Group&)>& there,
    const Matcher& matcher) {
  run_ranks(
      2,
      [&](World world) {
        const auto& mine = world.rank() == 0 ? here : there;
        EXPECT_THAT(
            [&] { mine(world.group()); }, ThrowsMessage<PeerError>(matcher));
        EXPECT_THAT(
            [&] { world.group().barrier()->wait(); },
            ThrowsMessage<PeerError>(HasSubstr("the group is dead")));
      },
      {.backend = "gloo",
       .timeout = std::chrono::milliseconds(500),
       .debug_collectives = true});
}

TEST(Mismatch, ShapesOfAMessageInTheDebugMode) {
  expect_message_mismatch(
      [](const Group& group) {
        group.send(at::ones({7}), 1, 3)->wait();
        group.send(at::ones({100}), 1, 3)->wait();
      },
      [](const Group& group) {
        group.recv(at::ones({7}), 0, 3)->wait();
        group.recv(at::ones({50}), 0, 3)->wait();
      },
      AllOf(
          HasSubstr("tag 3: "),
          HasSubstr("seq 2]"),
          HasSubstr("send of Float [100]"),
          HasSubstr("recv of Float [50]"),
          HasSubstr("(pid "),
          HasSubstr("shapes must match")));
}

TEST(Mismatch, DtypesOfAMessageInTheDebugMode) {
  expect_message_mismatch(
      [](const Group& group) { group.send(at::ones({6}), 1)->wait(); },
      [](const Group& group) {
        group.recv(at::ones({6}, at::kInt), 0)->wait();
      },
      AllOf(
          HasSubstr("send of Float [6]"),
          HasSubstr("recv of Int [6]"),
          HasSubstr("dtypes must match")));
}

TEST(Mismatch, DirectionsOfAMessageInTheDebugMode) {
  for (const bool sends : {true, false}) {
    const auto same = [sends](const Group& group) {
      const int64_t peer = 1 - group.rank();
      (sends ? group.send(at::ones({6}), peer, 2)
             : group.recv(at::ones({6}), peer, 2))
          ->wait();
    };
    expect_message_mismatch(
        same,
        same,
        AllOf(
            HasSubstr(
                sends ? "send of Float [6] here, send of Float [6] on rank"
                      : "recv of Float [6] here, recv of Float [6] on rank"),
            HasSubstr("directions must match")));
  }
}

// Each waits for one of its calls before it waits for the other; none may hold
// up what the peer waits for.
TEST(DebugMode, MessagesGoOnThoughNobodyWaitsForThem) {
  run_ranks(
      3,
      [](World world) {
        const Group& group = world.group();
        const int64_t next = (group.rank() + 1) % 3;
        const int64_t previous = (group.rank() + 2) % 3;
        std::vector<at::Tensor> received;
        std::vector<WorkPtr> works;
        for (int64_t i = 0; i < 8; ++i) {
          const at::Tensor x = at::full({1000}, 10 * group.rank() + i);
          works.push_back(group.send(x, next, static_cast<int>(i % 2)));
        }
        group.barrier()->wait();
        for (int64_t i = 0; i < 8; ++i) {
          received.push_back(at::empty({1000}, at::kLong));
          works.push_back(
              group.recv(received.back(), previous, static_cast<int>(i % 2)));
        }
        const bool backwards = group.rank() == 1;
        for (std::size_t i = 0; i < works.size(); ++i) {
          works[backwards ? works.size() - 1 - i : i]->wait();
        }
        for (int64_t i = 0; i < 8; ++i) {
          EXPECT_TRUE(received[static_cast<std::size_t>(i)]
                          .eq(10 * previous + i)
                          .all()
                          .item<bool>());
        }
      },
      {.backend = "gloo", .debug_collectives = true});
}

TEST(DebugMode, ASenderThatLeavesIsNamed) {
  run_ranks(
      2,
      [](World world) {
        if (world.rank() == 0) {
          EXPECT_THAT(
              [&] { world.group().recv(at::ones({5}), 1, 9)->wait(); },
              ThrowsMessage<PeerError>(AllOf(
                  HasSubstr("from rank 1, tag 9: rank 1 (pid "),
                  HasSubstr("has left the world"))));
        }
      },
      {.backend = "gloo", .debug_collectives = true});
}

TEST(Timeout, NamesTheRankThatStaysAway) {
  run_ranks(
      3,
      [](World world) {
        const Group& group = world.group();
        if (world.rank() != 1) {
          EXPECT_THAT(
              [&] { group.all_reduce(at::ones({5}), ReduceOp::kSum)->wait(); },
              ThrowsMessage<TimeoutError>(AllOf(
                  HasSubstr("rank 1 (pid "),
                  HasSubstr("did not arrive within 200 ms"),
                  HasSubstr("seq 1"))));
          world.store()->set("seen by " + std::to_string(world.rank()), "1");
        } else {
          world.store()->wait({"seen by 0", "seen by 2"});
        }
      },
      {.timeout = std::chrono::milliseconds(200)});
}

TEST(Timeout, NamesTheSenderThatStaysAway) {
  run_ranks(
      2,
      [](World world) {
        if (world.rank() == 0) {
          EXPECT_THAT(
              [&] { world.group().recv(at::ones({5}), 1, 9)->wait(); },
              ThrowsMessage<TimeoutError>(
                  AllOf(HasSubstr("recv from rank 1"), HasSubstr("tag 9"))));
          world.store()->set("seen", "1");
        } else {
          world.store()->wait({"seen"});
        }
      },
      {.timeout = std::chrono::milliseconds(200)});
}

TEST(Death, ARankThatLeavesFailsThoseWhoWaitForIt) {
  run_ranks(3, [](World world) {
    if (world.rank() == 2) {
      return; // its world ends
    }
    EXPECT_THAT(
        [&] {
          world.group().all_reduce(at::ones({5}), ReduceOp::kSum)->wait();
        },
        ThrowsMessage<PeerError>(
            AllOf(HasSubstr("rank 2 (pid "), HasSubstr("has left the world"))));
  });
}

TEST(Death, ARankThatThrowsTellsTheOthersWhy) {
  for (const char* backend : {"shm", "gloo"}) {
    std::string text;
    try {
      run_ranks(
          3,
          [](World world) {
            if (world.rank() == 1) {
              throw std::runtime_error("out of cheese");
            }
            world.group()
                .all_reduce(at::ones({300'000}), ReduceOp::kSum)
                ->wait();
          },
          {.backend = backend});
    } catch (const Error& error) {
      text = error.what();
    }
    EXPECT_THAT(text, HasSubstr("rank 1: out of cheese"));
    EXPECT_THAT(text, HasSubstr("rank 0: all_reduce [rank 0/3"));
    EXPECT_THAT(text, HasSubstr("rank 2: all_reduce [rank 2/3"));
  }
}

TEST(Death, AMessageFromARankThatLeftStillArrives) {
  run_ranks(2, [](World world) {
    at::Tensor x = at::full({100}, 1 - world.rank(), at::kFloat);
    if (world.rank() == 0) {
      world.group().send(x, 1)->wait();
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(
        30)); // rank 0 is gone by now, or else the test is merely easier
    world.group().recv(x, 0)->wait();
    EXPECT_TRUE(x.eq(1).all().item<bool>());
  });
}

TEST(RunRanks, ReportsEachRanksLastCollectiveAtItsDeadline) {
  EXPECT_THAT(
      [] {
        run_ranks(
            2,
            [](World world) {
              const AskerScope scope("the test");
              world.group().barrier()->wait();
              if (world.rank() == 0) {
                world.group().barrier()->wait();
              } else {
                world.store()->wait({"never"}, std::chrono::seconds(2));
              }
            },
            {.deadline = std::chrono::milliseconds(300)});
      },
      ThrowsMessage<Error>(AllOf(
          HasSubstr("not done within 300 ms"),
          HasSubstr("last collective: barrier on world asked by 'the test'"))));
}

TEST(RunRanks, StopsRanksThatCallOnPastItsDeadline) {
  for (const std::string backend : {"shm", "gloo"}) {
    for (const int ms : {1, 200}) { // before the ranks have a world, and after
      EXPECT_THAT(
          [&] {
            run_ranks(
                2,
                [](World world) {
                  const at::Tensor x = at::ones({10});
                  while (true) {
                    world.group().all_reduce(x, ReduceOp::kMax)->wait();
                  }
                },
                {.backend = backend,
                 .deadline = std::chrono::milliseconds(ms)});
          },
          ThrowsMessage<Error>(AllOf(
              HasSubstr("not done within"), Not(HasSubstr("still running")))));
    }
  }
}

TEST(RunRanks, RefusesNonsense) {
  EXPECT_THROW(run_ranks(0, [](World) {}), UsageError);
  EXPECT_THROW(run_ranks(2, [](World) {}, {.backend = "pigeon"}), UsageError);
}

struct Counter {
  int value = 0;
};

TEST(World, StateIsMadeOncePerRank) {
  run_ranks(2, [](World world) {
    EXPECT_EQ(++world.state<Counter>().value, 1);
    EXPECT_EQ(++World(world).state<Counter>().value, 2);
    EXPECT_TRUE(world.unowned() == world);
  });
}

} // namespace
} // namespace tessera
