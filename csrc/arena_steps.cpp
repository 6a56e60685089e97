// The steps and queries of the arena's calls. The caller holds the lock.
#include <algorithm>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>

#include "arena.h"

namespace inflight {

uint64_t Arena::rounded(uint64_t bytes) const {
  const uint64_t unit = pages_.granularity();
  if (bytes > std::numeric_limits<uint64_t>::max() - unit)
    throw std::out_of_range("no address space has " + std::to_string(bytes) + " bytes");
  return std::max<uint64_t>(1, (bytes + unit - 1) / unit) * unit;
}

void Arena::require(Phase phase, const char* call) const {
  if (phase_ == phase) return;
  throw std::logic_error(std::string(call) + ": the arena must be " +
                         kPhaseNames[int(phase)] + ", and it is " +
                         kPhaseNames[int(phase_)]);
}

void Arena::move_to(Phase phase) {
  if (std::find(std::begin(kMoves), std::end(kMoves), std::make_pair(phase_, phase)) ==
      std::end(kMoves))
    throw std::logic_error(std::string("an arena that is ") + kPhaseNames[int(phase_)] +
                           " cannot become " + kPhaseNames[int(phase)]);
  phase_ = phase;
}

bool Arena::settled() const {
  return std::all_of(mappings_.begin(), mappings_.end(), [](const auto& entry) {
    return entry.second.second == entry.second.other;
  });
}

// The mapping that contains all of these bytes, or end().
Arena::Mappings::const_iterator Arena::around(Address address, uint64_t bytes) const {
  const auto after = mappings_.upper_bound(address);
  if (after == mappings_.begin()) return mappings_.end();
  const auto found = std::prev(after);
  const uint64_t offset = address - found->first;
  const uint64_t whole = found->second.bytes;
  return offset < whole && bytes <= whole - offset ? found : mappings_.end();
}

std::vector<Run> Arena::runs_now() const {
  std::vector<Run> runs;
  for (const auto& [address, mapping] : mappings_)
    runs.push_back({address - base_, mapping.bytes});
  return runs;
}

Arena::Stats Arena::stats_now() const {
  Stats stats{phase_,
              phase_ == Phase::kPaired && settled(),
              base_,
              0,
              pages_.backed_bytes(),
              0,
              pages_.num_handles(),
              0};
  for (const auto& [address, segment] : segments_) {
    if (segment.dropped) continue;
    stats.live_bytes += segment.bytes;
    ++stats.num_segments;
  }
  for (const auto& [address, mapping] : mappings_) stats.wasted_bytes += mapping.bytes;
  stats.wasted_bytes -= stats.live_bytes;
  return stats;
}

// Releases the memory of a segment, unless it has become part of a run.
void Arena::discard(Address address, uint64_t bytes) {
  const auto found = mappings_.find(address);
  if (found == mappings_.end() || found->second.bytes != bytes) return;
  const Placed live{address, bytes, found->second.live};
  const Entered entered(pages_.memory());
  pages_.memory().synchronize();  // unmapping does not wait for readers
  pages_.lift(live);
  mappings_.erase(found);
  pages_.release(live.handle, live.bytes);
}

// Replaces the handles that are mapped within a run by one handle.
void Arena::merge(const Run& run) {
  const Address start = base_ + run.offset;
  const auto first = mappings_.find(start);
  const auto end = mappings_.lower_bound(start + run.bytes);
  std::vector<Placed> before;
  for (auto at = first; at != end; ++at)
    before.push_back({at->first, at->second.bytes, at->second.live});
  if (before.size() == 1) return;

  Memory& memory = pages_.memory();
  const uint64_t bytes = run.bytes;
  const Handle handle = pages_.create(bytes);
  Placed scratch{0, bytes, handle};
  or_undo(
      [&] {
        scratch.address = memory.reserve(bytes);
        pages_.place(scratch);
        for (const Placed& old : before)
          memory.copy(scratch.address + (old.address - start), old.address, old.bytes);
        memory.synchronize();
        pages_.exchange(before, {start, bytes, handle});
      },
      [&] {
        quietly([&] { memory.synchronize(); });  // a copy may be running
        if (scratch.address != 0) {
          quietly([&] { pages_.lift(scratch); });
          quietly([&] { memory.give_back(scratch.address, bytes); });
        }
        quietly([&] { pages_.release(handle, bytes); });
      });

  first->second = {bytes, handle};
  mappings_.erase(std::next(first), end);
  std::optional<Fault> failure;
  for (const Placed& old : before)
    attempt(failure, [&] { pages_.release(old.handle, old.bytes); });
  attempt(failure, [&] { pages_.lift(scratch); });
  attempt(failure, [&] { memory.give_back(scratch.address, bytes); });
  if (failure) throw Fault(*failure);
}

void Arena::add_second() {
  Memory& memory = pages_.memory();
  // Shadow parameters point there, so the addresses are those of the first time.
  if (used_ != 0 && second_ == 0) second_ = memory.reserve(used_);
  for (auto& [address, mapping] : mappings_) {
    mapping.other = pages_.create(mapping.bytes);
    pages_.place({second_of(address), mapping.bytes, mapping.other});
    mapping.second = mapping.other;
  }
  for (const auto& [address, mapping] : mappings_)
    memory.copy(second_of(address), address, mapping.bytes);
  memory.synchronize();
}

void Arena::remove_second(std::optional<Fault>& first) {
  for (auto& [address, mapping] : mappings_) {
    const Placed second{second_of(address), mapping.bytes, mapping.second};
    if (second.handle != 0) attempt(first, [&] { pages_.lift(second); });
    const Handle other = std::exchange(mapping.other, 0);
    if (other != 0) attempt(first, [&] { pages_.release(other, second.bytes); });
    mapping.second = 0;
  }
}

void Arena::back_live() {
  for (auto& [address, mapping] : mappings_) {
    const Handle handle = pages_.create(mapping.bytes);
    or_undo([&] { pages_.place({address, mapping.bytes, handle}); },
            [&] { quietly([&] { pages_.release(handle, mapping.bytes); }); });
    mapping.live = handle;
  }
}

void Arena::unback_live() {
  for (auto& [address, mapping] : mappings_) {
    const Handle live = std::exchange(mapping.live, 0);
    if (live == 0) continue;
    quietly([&] { pages_.lift({address, mapping.bytes, live}); });
    quietly([&] { pages_.release(live, mapping.bytes); });
  }
}

void Arena::swap(Mappings::value_type& entry) {
  auto& [address, mapping] = entry;
  pages_.exchange({{address, mapping.bytes, mapping.live}},
                  {address, mapping.bytes, mapping.other});
  std::swap(mapping.live, mapping.other);
}

}  // namespace inflight
