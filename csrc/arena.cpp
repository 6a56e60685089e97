// The calls of the arena in their order, then the steps that they are made of.
#include "arena.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>

namespace inflight {

namespace {

constexpr uint64_t kWasteDivisor = 100;  // holes may take 1 % of the weights' memory

using Lock = std::lock_guard<std::mutex>;

}  // namespace

template <class Work>
void Arena::or_torn(Work work) {
  try {
    work();
  } catch (const Fault& why) {
    if (why.kind == Fault::kTorn) move_to(Phase::kTorn);
    throw;
  }
}

Arena::Arena(std::unique_ptr<Memory> memory, uint64_t reserve_bytes)
    : pages_(std::move(memory)), reserved_(rounded(reserve_bytes)) {
  const Entered entered(pages_.memory());
  base_ = pages_.memory().reserve(reserved_);
}

Address Arena::allocate(uint64_t bytes) {
  const Lock lock(mutex_);
  require(Phase::kLoading, "allocate");
  const uint64_t size = rounded(bytes), left = reserved_ - used_;
  if (size > left)
    throw Fault(Fault::kOutOfMemory,
                "the arena has too few addresses left of the " +
                    std::to_string(reserved_) + " bytes reserved",
                "allocate", 0, size - left);
  const Entered entered(pages_.memory());
  const Address address = base_ + used_;
  const Handle handle = pages_.create(size);
  or_undo([&] { pages_.place({address, size, handle}); },
          [&] { quietly([&] { pages_.release(handle, size); }); });
  mappings_[address] = {size, handle};
  segments_[address] = {size, false};
  used_ += size;
  return address;
}

void Arena::free(Address address) {
  const Lock lock(mutex_);
  const auto found = segments_.find(address);
  if (found == segments_.end()) return;
  const Segment segment = found->second;
  segments_.erase(found);
  if (phase_ == Phase::kLoading && !segment.dropped) discard(address, segment.bytes);
}

void Arena::drop(Address address) {
  const Lock lock(mutex_);
  require(Phase::kLoading, "drop");
  const auto found = segments_.find(address);
  if (found == segments_.end() || found->second.dropped)
    throw std::out_of_range("drop: no segment of this arena begins there");
  found->second.dropped = true;
  discard(address, found->second.bytes);
}

void Arena::consolidate() {
  const Lock lock(mutex_);
  require(Phase::kLoading, "consolidate");
  const Entered entered(pages_.memory());
  pages_.memory().synchronize();  // the memory unmapped below must not be in use
  const Stats now = stats_now();
  const uint64_t allowed = now.live_bytes / kWasteDivisor;
  const uint64_t spare = allowed > now.wasted_bytes ? allowed - now.wasted_bytes : 0;
  or_torn([&] {
    for (const Run& run : plan_runs(runs_now(), spare)) merge(run);
  });
  move_to(Phase::kConsolidated);
}

void Arena::pair() {
  const Lock lock(mutex_);
  require(Phase::kConsolidated, "pair");
  const Entered entered(pages_.memory());
  const uint64_t needed = pages_.backed_bytes();
  const uint64_t free = pages_.memory().available();
  try {
    or_undo([&] { add_second(); },
            [&] {
              std::optional<Fault> ignored;  // the first failure is reported
              attempt(ignored, [&] { pages_.memory().synchronize(); });
              remove_second(ignored);
            });
  } catch (Fault& why) {
    if (why.kind == Fault::kOutOfMemory && needed > free) why.missing = needed - free;
    throw;
  }
  move_to(Phase::kPaired);
}

void Arena::unpair() {
  const Lock lock(mutex_);
  require(Phase::kPaired, "unpair");
  const Entered entered(pages_.memory());
  pages_.memory().synchronize();  // the memory unmapped below must not be in use
  std::vector<Placed> shown;
  for (const auto& [address, mapping] : mappings_)
    if (mapping.second != 0)
      shown.push_back({second_of(address), mapping.bytes, mapping.second});
  or_torn([&] { pages_.lift_all(shown); });
  for (auto& entry : mappings_) entry.second.second = 0;
  std::optional<Fault> first;
  remove_second(first);
  move_to(Phase::kConsolidated);
  if (first) throw Fault(*first);
}

void Arena::suspend() {
  const Lock lock(mutex_);
  if (phase_ != Phase::kLoading) require(Phase::kConsolidated, "suspend");
  const Entered entered(pages_.memory());
  pages_.memory().synchronize();
  std::vector<Placed> live;
  for (const auto& [address, mapping] : mappings_)
    live.push_back({address, mapping.bytes, mapping.live});
  or_torn([&] { pages_.lift_all(live); });
  std::optional<Fault> first;
  for (auto& [address, mapping] : mappings_) {
    const Handle handle = std::exchange(mapping.live, 0);
    attempt(first, [&] { pages_.release(handle, mapping.bytes); });
  }
  awake_ = phase_;
  move_to(Phase::kSuspended);
  if (first) throw Fault(*first);
}

void Arena::resume() {
  const Lock lock(mutex_);
  require(Phase::kSuspended, "resume");
  const Entered entered(pages_.memory());
  uint64_t needed = 0;
  for (const auto& entry : mappings_) needed += entry.second.bytes;
  const uint64_t free = pages_.memory().available();
  try {
    or_undo([&] { back_live(); }, [&] { unback_live(); });
  } catch (Fault& why) {
    if (why.kind == Fault::kOutOfMemory && needed > free) why.missing = needed - free;
    throw;
  }
  move_to(awake_);
}

double Arena::flip() {
  const Lock lock(mutex_);
  require(Phase::kPaired, "flip");
  const Entered entered(pages_.memory());
  const auto start = std::chrono::steady_clock::now();
  or_torn([&] {
    auto at = mappings_.begin();
    try {
      for (; at != mappings_.end(); ++at) swap(*at);
    } catch (const Fault& why) {
      if (why.kind == Fault::kTorn) throw;
      try {
        while (at != mappings_.begin()) swap(*--at);
      } catch (const Fault& again) {
        throw Pages::torn(why, again);  // runs are whole, but not of one version
      }
      throw;
    }
  });
  const auto took = std::chrono::steady_clock::now() - start;
  return std::chrono::duration<double>(took).count();
}

void Arena::settle() {
  const Lock lock(mutex_);
  require(Phase::kPaired, "settle");
  const Entered entered(pages_.memory());
  for (auto& [address, mapping] : mappings_) {
    if (mapping.second == mapping.other) continue;
    const Address second = second_of(address);
    if (mapping.second != 0) pages_.lift({second, mapping.bytes, mapping.second});
    mapping.second = 0;  // if the next call fails, the next settle continues here
    pages_.place({second, mapping.bytes, mapping.other});
    mapping.second = mapping.other;
  }
}

Arena::ShadowAddress Arena::shadow_address(Address address, uint64_t bytes) const {
  const Lock lock(mutex_);
  require(Phase::kPaired, "shadow_address");
  if (!settled())
    throw std::logic_error(
        "shadow_address: the second range still shows the live memory; settle first");
  const auto found = around(address, bytes);
  if (found == mappings_.end())
    throw std::out_of_range("shadow_address: not within one run of this arena");
  return {second_of(found->first), found->second.bytes, address - found->first};
}

bool Arena::contains(Address address, uint64_t bytes) const {
  const Lock lock(mutex_);
  return around(address, bytes) != mappings_.end();
}

std::vector<Run> Arena::runs() const {
  const Lock lock(mutex_);
  return runs_now();
}

Arena::Stats Arena::stats() const {
  const Lock lock(mutex_);
  return stats_now();
}

void Arena::close() {
  const Lock lock(mutex_);
  if (phase_ == Phase::kClosed) return;
  const Entered entered(pages_.memory());
  std::optional<Fault> first;
  attempt(first, [&] { pages_.memory().synchronize(); });
  remove_second(first);
  if (second_ != 0) attempt(first, [&] { pages_.memory().give_back(second_, used_); });
  second_ = 0;
  for (const auto& [address, mapping] : mappings_) {
    if (mapping.live == 0) continue;
    const Placed live{address, mapping.bytes, mapping.live};
    attempt(first, [&] { pages_.lift(live); });
    attempt(first, [&] { pages_.release(live.handle, live.bytes); });
  }
  // A pointer that is not freed yet may be freed when another arena exists, which must
  // not own that address. So addresses with such pointers stay reserved.
  if (segments_.empty())
    attempt(first, [&] { pages_.memory().give_back(base_, reserved_); });
  const bool was_torn = phase_ == Phase::kTorn;
  mappings_.clear();
  segments_.clear();
  move_to(Phase::kClosed);
  // The mappings of a torn arena are not known, so some calls will fail.
  if (first && !was_torn) throw Fault(*first);
}

// ------------------------------------------------- steps, with the lock held
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
