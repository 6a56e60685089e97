// Handles and their mappings; each change is complete or undone.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memory.h"

namespace inflight {

// A handle at an address.
struct Placed {
  Address address;
  uint64_t bytes;
  Handle handle;
};

// Runs `work`. If it throws, runs `undo` and throws the error again.
template <class Work, class Undo>
void or_undo(Work work, Undo undo) {
  try {
    work();
  } catch (...) {
    undo();
    throw;
  }
}

// For undoing: a second failure is dropped, since the first one is reported.
template <class Work>
void quietly(Work work) {
  try {
    work();
  } catch (const Fault&) {
  }
}

// For releasing: goes on after failures, and keeps the first one.
template <class Work>
void attempt(std::optional<Fault>& first, Work work) {
  try {
    work();
  } catch (const Fault& why) {
    if (!first) first.emplace(why);
  }
}

class Pages {
 public:
  explicit Pages(std::unique_ptr<Memory> memory) : memory_(std::move(memory)) {}

  Memory& memory() { return *memory_; }
  uint64_t granularity() const { return memory_->granularity(); }
  uint64_t num_handles() const { return num_handles_; }
  uint64_t backed_bytes() const { return backed_bytes_; }

  Handle create(uint64_t bytes) {
    try {
      const Handle handle = memory_->create(bytes);
      ++num_handles_;
      backed_bytes_ += bytes;
      return handle;
    } catch (Fault& why) {
      const uint64_t free = memory_->available();
      if (why.kind == Fault::kOutOfMemory && bytes > free) why.missing = bytes - free;
      throw;
    }
  }

  void release(Handle handle, uint64_t bytes) {
    memory_->release(handle);
    --num_handles_;
    backed_bytes_ -= bytes;
  }

  void place(const Placed& placed) {
    memory_->map(placed.address, placed.bytes, placed.handle);
    or_undo([&] { memory_->set_access(placed.address, placed.bytes); },
            [&] { quietly([&] { lift(placed); }); });
  }

  void lift(const Placed& placed) { memory_->unmap(placed.address, placed.bytes); }

  // Maps all or none. If undoing fails too, the Fault is kTorn.
  void lift_all(const std::vector<Placed>& placed) {
    size_t num_lifted = 0;
    try {
      for (const Placed& each : placed) {
        lift(each);
        ++num_lifted;
      }
    } catch (const Fault& why) {
      put_back(why, placed, num_lifted);
      throw;
    }
  }

  // Replaces `before` by `now`, or leaves `before`. If undoing fails too, the Fault is
  // kTorn.
  void exchange(const std::vector<Placed>& before, const Placed& now) {
    lift_all(before);
    try {
      place(now);
    } catch (const Fault& why) {
      put_back(why, before, before.size());
      throw;
    }
  }

  static Fault torn(const Fault& why, const Fault& again) {
    return {Fault::kTorn,
            std::string(why.what()) +
                "; the memory that was mapped before cannot be put back either: " +
                again.what(),
            why.call, why.code};
  }

 private:
  void put_back(const Fault& why, const std::vector<Placed>& placed, size_t count) {
    try {
      for (size_t i = 0; i < count; ++i) place(placed[i]);
    } catch (const Fault& again) {
      throw torn(why, again);
    }
  }

  const std::unique_ptr<Memory> memory_;
  uint64_t num_handles_ = 0;
  uint64_t backed_bytes_ = 0;
};

}  // namespace inflight
