// What the arena asks of an address space: the driver of a GPU (cuda_memory.h), or
// the operating system as its twin on the host (host_memory.h).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace inflight {

using Address = uint64_t;
using Handle = uint64_t;  // a piece of physical memory; never 0

// A call that failed, or what its failure has led to.
class Fault : public std::runtime_error {
 public:
  enum Kind {
    kFailed,       // nothing was changed
    kOutOfMemory,  // nothing was changed, `missing` bytes are
    kTorn          // some addresses have lost their memory
  };

  Fault(Kind kind, const std::string& message, std::string call = "", long code = 0,
        uint64_t missing = 0)
      : std::runtime_error(message),
        kind(kind),
        call(std::move(call)),
        code(code),
        missing(missing) {}

  Kind kind;
  std::string call;  // the one that failed, and the code it returned
  long code;
  uint64_t missing;
};

// Sizes and addresses are multiples of the granularity. What fails throws Fault and
// has changed nothing.
class Memory {
 public:
  virtual ~Memory() = default;

  virtual uint64_t granularity() const = 0;
  virtual uint64_t available() = 0;  // bytes that `create` might still give

  // Addresses without memory, and their end.
  virtual Address reserve(uint64_t bytes) = 0;
  virtual void give_back(Address address, uint64_t bytes) = 0;

  // Memory without an address. Released while mapped, it lives until unmapped.
  virtual Handle create(uint64_t bytes) = 0;
  virtual void release(Handle handle) = 0;

  // A whole handle at an address, and at several if wanted. Not accessible before
  // set_access; no call waits for work that still uses what it unmaps.
  virtual void map(Address address, uint64_t bytes, Handle handle) = 0;
  virtual void unmap(Address address, uint64_t bytes) = 0;
  virtual void set_access(Address address, uint64_t bytes) = 0;

  // Copies may run on until `synchronize`, which waits for all work of the device.
  virtual void copy(Address to, Address from, uint64_t bytes) = 0;
  virtual void synchronize() = 0;

  // What the calling thread needs for the calls above, and had before.
  virtual uint64_t enter() { return 0; }
  virtual void leave(uint64_t) noexcept {}
};

// Brackets the calls of one thread.
class Entered {
 public:
  explicit Entered(Memory& memory) : memory_(memory), before_(memory.enter()) {}
  ~Entered() { memory_.leave(before_); }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

 private:
  Memory& memory_;
  uint64_t before_;
};

}  // namespace inflight
