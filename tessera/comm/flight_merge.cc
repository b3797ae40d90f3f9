// SPDX-License-Identifier: Apache-2.0
// Finding where ranks part.
//
// The collectives of a group are numbered alike on all its ranks, so the calls
// of one number are laid side by side, from the first that every file still
// holds. Three things can be wrong at a number, in this order of weight:
//   The calls do not go together. That is an error of the program, whatever
//     came of it.
//   Some ranks have called and others, whose files are there, have not. Those
//     are who the first ones wait for.
//   All have called, but the call did not end well everywhere. It is where a
//     rank without a file died or was stopped, when there is one; therefore it
//     goes before a missing call that comes after it.
// Only the first of a group is told: what follows it follows from it. Among
// groups the one whose difference began first, by the wall clock, comes first.
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/base/text.h>
#include <tessera/comm/flight_merge.h>

#include <algorithm>
#include <map>
#include <set>

namespace tessera {
namespace {

bool is_message(const FlightCall& call) {
  return call.header.kind == CollectiveKind::kSend ||
      call.header.kind == CollectiveKind::kRecv;
}

Announcement announcement(const FlightCall& call) {
  return {call.header, call.counts.kept(), call.out_counts.kept()};
}

std::string text_of(FlightCall call) { // without the asker
  call.header.asker[0] = '\0';
  std::string text = describe(announcement(call));
  if (call.counts.size > FlightCounts::kKept) {
    text += fmt::format(" (the first of {} counts)", call.counts.size);
  }
  return text;
}

// What one rank of a group has called.
struct Member {
  int64_t rank = 0; // of the world
  bool has_file = false;
  bool has_group = false;
  uint64_t calls = 0;
  std::map<uint64_t, const FlightCall*> by_seq;

  const FlightCall* at(uint64_t seq) const {
    const auto found = by_seq.find(seq);
    return found == by_seq.end() ? nullptr : found->second;
  }
};

class GroupCalls {
 public:
  GroupCalls(const FlightGroup& group, const std::vector<FlightFile>& files)
      : group_(group) {
    for (const int64_t rank : group.world_ranks) {
      members_.push_back(member(rank, files));
      const Member& last = members_.back();
      last_ = std::max(last_, last.calls);
      if (!last.by_seq.empty()) {
        first_ = std::max(first_, last.by_seq.begin()->first);
      }
    }
  }

  std::optional<FlightDifference> first_difference() const {
    std::optional<FlightDifference> absent;
    std::optional<FlightDifference> failed;
    std::optional<FlightDifference> unfinished;
    for (uint64_t seq = first_; seq <= last_; ++seq) {
      const std::string mismatch = mismatch_at(seq);
      if (!mismatch.empty()) {
        return difference(seq, mismatch);
      }
      const auto gone = ranks_at(seq, [](const Member& m, const FlightCall* c) {
        return m.has_file && c == nullptr;
      });
      if (!absent && !gone.empty()) {
        absent = difference(seq, named("did not call it", gone));
      }
      const auto ended = [&](CallState state) {
        return ranks_at(seq, [&](const Member& /*m*/, const FlightCall* c) {
          return c != nullptr && c->state == state;
        });
      };
      if (!failed && !ended(CallState::kFailed).empty()) {
        failed =
            difference(seq, unended("failed on", ended(CallState::kFailed)));
      }
      if (!unfinished && !ended(CallState::kIssued).empty()) {
        unfinished = difference(
            seq, unended("did not end on", ended(CallState::kIssued)));
      }
    }
    const bool failed_first =
        failed && absent && failed->seq < absent->seq && !unknown().empty();
    if (absent && !failed_first) {
      return absent;
    }
    return failed ? failed : unfinished;
  }

 private:
  Member member(int64_t rank, const std::vector<FlightFile>& files) const {
    Member member{.rank = rank, .by_seq = {}};
    for (const FlightFile& file : files) {
      if (file.owner.rank != rank) {
        continue;
      }
      member.has_file = true;
      for (const FlightCall& call : file.calls) {
        if (file.groups[call.group].id == group_.id && !is_message(call)) {
          member.by_seq[call.header.seq] = &call;
        }
      }
      for (const FlightGroup& group : file.groups) {
        if (group.id != group_.id) {
          continue;
        }
        if (group.world_ranks != group_.world_ranks) {
          throw CorruptionError(fmt::format(
              "comm dump [{}]: group {} has ranks {}, another file says {}",
              file.path,
              group.id,
              bracketed(group.world_ranks),
              bracketed(group_.world_ranks)));
        }
        member.has_group = true;
        member.calls = group.calls;
      }
    }
    return member;
  }

  template <typename Matches>
  std::vector<int64_t> ranks_at(uint64_t seq, const Matches& matches) const {
    std::vector<int64_t> ranks;
    for (const Member& member : members_) {
      if (matches(member, member.at(seq))) {
        ranks.push_back(member.rank);
      }
    }
    return ranks;
  }

  std::vector<int64_t> unknown() const {
    return ranks_at(0, [](const Member& member, const FlightCall* /*call*/) {
      return !member.has_file;
    });
  }

  static std::string named(
      const char* verb, const std::vector<int64_t>& ranks) {
    return fmt::format(
        "{} {} {}",
        ranks.size() == 1 ? "rank" : "ranks",
        ranks.size() == 1 ? std::to_string(ranks[0]) : bracketed(ranks),
        verb);
  }

  std::string unended(
      const char* verb, const std::vector<int64_t>& ranks) const {
    std::string text = fmt::format("it {} {}", verb, named("", ranks));
    text.pop_back();
    const auto without = unknown();
    return without.empty() ? text
                           : text + "; " + named("left no file", without);
  }

  std::string mismatch_at(uint64_t seq) const {
    const FlightCall* first = nullptr;
    for (const Member& member : members_) {
      const FlightCall* call = member.at(seq);
      first = first == nullptr ? call : first;
      if (call == nullptr || call == first) {
        continue;
      }
      const char* what =
          find_mismatch(announcement(*first), announcement(*call));
      if (what == nullptr && call->header.ndim < 0 &&
          call->header.kind != CollectiveKind::kAllToAll &&
          call->counts != first->counts) {
        what = "counts";
      }
      if (what != nullptr) {
        return fmt::format("{} must match", what);
      }
    }
    return pair_mismatch_at(seq);
  }

  // What one rank gives another must be what that one takes.
  std::string pair_mismatch_at(uint64_t seq) const {
    for (std::size_t from = 0; from < members_.size(); ++from) {
      for (std::size_t to = 0; to < members_.size(); ++to) {
        const FlightCall* gives = members_[from].at(seq);
        const FlightCall* takes = members_[to].at(seq);
        if (gives == nullptr || takes == nullptr ||
            gives->header.kind != CollectiveKind::kAllToAll ||
            to >= gives->counts.kept().size() ||
            from >= takes->out_counts.kept().size()) {
          continue;
        }
        const int64_t given = gives->counts.first[to];
        const int64_t taken = takes->out_counts.first[from];
        if (given != taken) {
          return fmt::format(
              "counts must match: rank {} gives {} elements to rank {}, which "
              "takes {}",
              members_[from].rank,
              given,
              members_[to].rank,
              taken);
        }
      }
    }
    return {};
  }

  FlightDifference difference(uint64_t seq, const std::string& what) const {
    FlightDifference difference{
        .group = group_.name,
        .world_ranks = group_.world_ranks,
        .seq = seq,
        .what = what,
        .places = {}};
    for (const Member& member : members_) {
      difference.places.push_back(place(member, seq));
    }
    return difference;
  }

  static FlightPlace place(const Member& member, uint64_t seq) {
    FlightPlace place{.rank = member.rank};
    if (const FlightCall* call = member.at(seq)) {
      place.call = text_of(*call);
      place.asker = call->header.asker.data();
      place.state = call->state;
      place.start_ns = call->start_ns;
    } else if (!member.has_file) {
      place.remark = "no file";
    } else if (!member.has_group) {
      place.remark = "did not make this group";
    } else if (member.by_seq.empty()) {
      place.remark = "none of its last calls was in this group";
    } else {
      const FlightCall& last = *member.by_seq.rbegin()->second;
      place.remark = fmt::format(
          "did not call; its last here: seq {}, {}, {}",
          last.header.seq,
          text_of(last),
          name_of(last.state));
    }
    return place;
  }

  const FlightGroup& group_;
  std::vector<Member> members_;
  uint64_t first_ = 1;
  uint64_t last_ = 0;
};

void check_together(const std::vector<FlightFile>& files) {
  if (files.empty()) {
    throw UsageError("comm dump: got no file, expected one per rank");
  }
  const FlightFile& first = files.front();
  std::map<int64_t, std::string> paths;
  for (const FlightFile& file : files) {
    if (file.owner.job != first.owner.job ||
        file.owner.size != first.owner.size) {
      throw UsageError(fmt::format(
          "comm dump: {} is of job {} with {} ranks, {} of job {} with {}; "
          "give the files of one job",
          first.path,
          first.owner.job,
          first.owner.size,
          file.path,
          file.owner.job,
          file.owner.size));
    }
    const auto [other, fresh] = paths.emplace(file.owner.rank, file.path);
    if (!fresh) {
      throw UsageError(fmt::format(
          "comm dump: {} and {} are both of rank {}; give one file per rank",
          other->second,
          file.path,
          file.owner.rank));
    }
  }
}

int64_t began(const FlightDifference& difference) {
  int64_t start = INT64_MAX;
  for (const FlightPlace& place : difference.places) {
    start = place.call.empty() ? start : std::min(start, place.start_ns);
  }
  return start;
}

} // namespace

FlightReport merge_flights(const std::vector<FlightFile>& files) {
  check_together(files);
  FlightReport report;
  report.job = files.front().owner.job;
  report.size = files.front().owner.size;
  std::map<std::string, const FlightGroup*> groups;
  std::map<int64_t, const FlightFile*> by_rank;
  for (const FlightFile& file : files) {
    by_rank[file.owner.rank] = &file;
    for (const FlightGroup& group : file.groups) {
      groups.emplace(group.id, &group);
    }
  }
  for (int64_t rank = 0; rank < report.size; ++rank) {
    if (by_rank.count(rank) == 0) {
      report.missing.push_back(rank);
    }
  }
  for (const auto& [rank, file] : by_rank) {
    report.reasons.push_back(fmt::format(
        "rank {} (pid {}, host {}): {}",
        rank,
        file->owner.pid,
        file->owner.host,
        file->reason));
  }
  for (const auto& [id, group] : groups) {
    if (auto difference = GroupCalls(*group, files).first_difference()) {
      report.differences.push_back(std::move(*difference));
    }
  }
  std::ranges::stable_sort(report.differences, {}, began);
  return report;
}

} // namespace tessera
