// The arena: one range of addresses in which the live weights of a device lie, a
// second range of the same layout, and the flip between the two.
//
//   loading       every segment has a handle of its own, so what is freed is freed
//   consolidated  few large handles, at the addresses the small ones had
//   paired        as many handles again, at the second range
//   suspended     addresses only: asleep, all memory is given back
//
// A flip gives the live addresses the memory of the other set; what it costs goes by
// the number of handles. The second range follows at leisure (settle). Until then it
// is stale: it shows the memory that has become live, and a write to it goes there.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "memory.h"
#include "pages.h"
#include "runs.h"

namespace inflight {

enum class Phase { kLoading, kConsolidated, kPaired, kSuspended, kTorn, kClosed };

constexpr const char* kPhaseNames[] = {"loading",   "consolidated", "paired",
                                       "suspended", "torn",         "closed"};

constexpr std::pair<Phase, Phase> kMoves[] = {
    {Phase::kLoading, Phase::kConsolidated}, {Phase::kLoading, Phase::kTorn},
    {Phase::kLoading, Phase::kClosed},       {Phase::kConsolidated, Phase::kPaired},
    {Phase::kConsolidated, Phase::kClosed},  {Phase::kPaired, Phase::kTorn},
    {Phase::kPaired, Phase::kClosed},        {Phase::kTorn, Phase::kClosed},
    {Phase::kPaired, Phase::kConsolidated},  {Phase::kConsolidated, Phase::kSuspended},
    {Phase::kLoading, Phase::kSuspended},    {Phase::kSuspended, Phase::kConsolidated},
    {Phase::kSuspended, Phase::kLoading},    {Phase::kConsolidated, Phase::kTorn},
    {Phase::kSuspended, Phase::kClosed}};

// Safe to call from any thread. A call in the wrong phase throws std::logic_error, a
// wrong address std::out_of_range, what fails below throws Fault.
class Arena {
 public:
  struct Stats {
    Phase phase;
    bool settled;
    Address base;
    uint64_t live_bytes, backed_bytes, wasted_bytes, num_handles, num_segments;
  };
  struct Twin {
    Address run;
    uint64_t run_bytes, offset;
  };

  Arena(std::unique_ptr<Memory> memory, uint64_t reserve_bytes);

  Memory& memory() { return pages_.memory(); }

  // The next piece of the range, with a handle of its own.
  Address allocate(uint64_t bytes);

  // A segment its allocator is through with: memory is released while loading, later
  // it is bookkeeping. Pointers from elsewhere are none of the arena's business.
  void free(Address address);

  // A segment its allocator keeps but does not use, and must not use again: memory
  // is released, and the `free` still to come is bookkeeping.
  void drop(Address address);

  // Few large handles instead of many small ones; no address changes. After a
  // failure every run has its old handles or its new one: call again, or close.
  void consolidate();

  // A second set of handles at a second range, with the bytes of the live set. After
  // a failure all is as before.
  void pair();

  // Gives the second set's memory back; its addresses stay what they were, without
  // memory, until the next `pair`. After a failure the phase tells: all is as before,
  // or done but for a handle that the driver would not take back.
  void unpair();

  // Gives the live set's memory back, where there is no second one; what was in it
  // is gone. The addresses stay. A failure is as one of `unpair`.
  void suspend();

  // Memory at the live addresses again; what is in it is nobody's. After a failure
  // there is none.
  void resume();

  // Exchanges the two sets at the live addresses, and returns the seconds it took.
  // What reads them must be through: nothing is waited for. Twice is nothing.
  double flip();

  // Lets the second range show the set that is not live. Nothing may be using it.
  void settle();

  // Where the other set has the bytes that the live set has here.
  Twin twin(Address address, uint64_t bytes) const;

  bool contains(Address address, uint64_t bytes) const;

  // Stretches that have one handle each, in each of the sets.
  std::vector<Run> runs() const;

  Stats stats() const;

  // Gives everything back, whatever fails on the way, and then throws the first
  // failure. Waits for all work of the device; whoever still holds a tensor of this
  // arena must not touch it again.
  void close();

 private:
  struct Segment {
    uint64_t bytes;
    bool dropped;
  };
  struct Mapping {
    uint64_t bytes;
    Handle live;        // 0 while suspended
    Handle other = 0;   // of the second set
    Handle second = 0;  // what the second range shows; 0 is nothing
  };
  using Mappings = std::map<Address, Mapping>;

  uint64_t rounded(uint64_t bytes) const;
  Address second_of(Address address) const { return second_ + (address - base_); }
  void require(Phase phase, const char* call) const;
  void move_to(Phase phase);
  bool settled() const;
  Mappings::const_iterator around(Address address, uint64_t bytes) const;
  std::vector<Run> runs_now() const;
  Stats stats_now() const;

  template <class Work>
  void or_torn(Work work);
  void discard(Address address, uint64_t bytes);
  void merge(const Run& run);
  void add_second();
  void remove_second(std::optional<Fault>& first);
  void back_live();
  void unback_live();
  void swap(Mappings::value_type& entry);

  mutable std::mutex mutex_;  // over everything below
  Pages pages_;
  Phase phase_ = Phase::kLoading;
  Phase awake_ = Phase::kLoading;  // the phase before it was suspended
  uint64_t reserved_;
  uint64_t used_ = 0;  // addresses are never given out twice
  Address base_ = 0;
  Address second_ = 0;
  Mappings mappings_;
  std::map<Address, Segment> segments_;  // given out and not yet freed
};

}  // namespace inflight
