// The arena: an address range with the live weights of a device, a second range of
// the same layout with the shadow weights, and the flip between the two.
//
//   loading       every segment has its own handle, so a free gives memory back
//   consolidated  few large handles, at the addresses of the small ones
//   paired        as many handles again, at the second range
//   suspended     addresses without memory: the engine sleeps
//
// A flip maps the shadow weights' memory at the live addresses; its time grows with
// the number of handles. The second range is remapped later (settle). Until then it is
// stale: it shows the memory that is live now, and a write to it changes live weights.
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
// wrong address std::out_of_range, a failed call of the memory Fault.
class Arena {
 public:
  struct Stats {
    Phase phase;
    bool settled;
    Address base;
    uint64_t live_bytes, backed_bytes, wasted_bytes, num_handles, num_segments;
  };
  struct ShadowAddress {
    Address run;
    uint64_t run_bytes, offset;
  };

  Arena(std::unique_ptr<Memory> memory, uint64_t reserve_bytes);

  Memory& memory() { return pages_.memory(); }

  // Allocates the next segment of the range, with its own handle.
  Address allocate(uint64_t bytes);

  // Frees a segment. While loading this releases memory, later it is bookkeeping.
  // Pointers that the arena did not allocate are ignored.
  void free(Address address);

  // Releases the memory of a segment that its allocator keeps but will not use again.
  // The later `free` is bookkeeping.
  void drop(Address address);

  // Replaces many small handles by few large ones; no address changes. After a
  // failure every run has its old handles or its new one: call again, or close.
  void consolidate();

  // Adds shadow handles at the second range, with the bytes of the live ones. After a
  // failure nothing has changed.
  void pair();

  // Releases the shadow memory. The addresses stay reserved, without memory, until the
  // next `pair`. After a failure the phase says which of two is true: nothing has
  // changed, or only a handle that the driver did not take back is left.
  void unpair();

  // Releases the live memory, if there is no shadow memory; its contents are lost. The
  // addresses stay reserved. A failure is like one of `unpair`.
  void suspend();

  // Maps memory at the live addresses again, with undefined contents. After a failure
  // there is none.
  void resume();

  // Maps the shadow memory at the live addresses, and returns the seconds it took. It
  // does not wait for readers: they must be done. Two flips restore the first state.
  double flip();

  // Maps the memory that is not live at the second range, which must not be in use.
  void settle();

  // The address in the second range for an address in the live range.
  ShadowAddress shadow_address(Address address, uint64_t bytes) const;

  bool contains(Address address, uint64_t bytes) const;

  // The runs; live and shadow weights have one handle for each.
  std::vector<Run> runs() const;

  Stats stats() const;

  // Releases everything, goes on after failures, and throws the first one at the end.
  // Waits for all work of the device. Tensors of this arena must not be used again.
  void close();

 private:
  struct Segment {
    uint64_t bytes;
    bool dropped;
  };
  struct Mapping {
    uint64_t bytes;
    Handle live;        // 0 while suspended
    Handle other = 0;   // of the shadow weights
    Handle second = 0;  // mapped at the second range; 0: none
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

  mutable std::mutex mutex_;  // guards all members below
  Pages pages_;
  Phase phase_ = Phase::kLoading;
  Phase awake_ = Phase::kLoading;  // the phase before it was suspended
  uint64_t reserved_;
  uint64_t used_ = 0;  // no address is allocated twice
  Address base_ = 0;
  Address second_ = 0;
  Mappings mappings_;
  std::map<Address, Segment> segments_;  // allocated and not yet freed
};

}  // namespace inflight
