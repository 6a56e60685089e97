// The calls of the arena, one after the other; their steps are in arena_steps.cpp.
#include "arena.h"

#include <chrono>
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

Arena::Twin Arena::twin(Address address, uint64_t bytes) const {
  const Lock lock(mutex_);
  require(Phase::kPaired, "twin");
  if (!settled())
    throw std::logic_error(
        "twin: the second range still shows what has become live; settle first");
  const auto found = around(address, bytes);
  if (found == mappings_.end())
    throw std::out_of_range("twin: not within one run of this arena");
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

}  // namespace inflight
