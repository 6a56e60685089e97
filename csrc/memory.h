// The interface of an address space: of a GPU's driver (cuda_memory.h), or of the
// operating system on the host (host_memory.h).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace inflight {

using Address = uint64_t;
using Handle = uint64_t;  // a piece of physical memory; never 0

// A failed call, and its consequence.
class Fault : public std::runtime_error {
 public:
  enum Kind {
    kFailed,       // nothing was changed
    kOutOfMemory,  // nothing was changed; `missing` bytes are needed
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
  std::string call;  // the failed call, and the code that it returned
  long code;
  uint64_t missing;
};

// Sizes and addresses are multiples of the granularity. A call that fails throws Fault
// and changes nothing.
class Memory {
 public:
  virtual ~Memory() = default;

  virtual uint64_t granularity() const = 0;
  virtual uint64_t available() = 0;  // bytes that `create` could still allocate

  // Reserves addresses without memory, and releases them.
  virtual Address reserve(uint64_t bytes) = 0;
  virtual void give_back(Address address, uint64_t bytes) = 0;

  // Allocates and releases memory without an address. Memory that is released while
  // mapped lives until it is unmapped.
  virtual Handle create(uint64_t bytes) = 0;
  virtual void release(Handle handle) = 0;

  // Maps a whole handle at one or several addresses. It is not accessible before
  // set_access. No call waits for work that still uses the memory that it unmaps.
  virtual void map(Address address, uint64_t bytes, Handle handle) = 0;
  virtual void unmap(Address address, uint64_t bytes) = 0;
  virtual void set_access(Address address, uint64_t bytes) = 0;

  // A copy may run until `synchronize`, which waits for all work of the device.
  virtual void copy(Address to, Address from, uint64_t bytes) = 0;
  virtual void synchronize() = 0;

  // Sets up the calling thread for the calls above, and restores its state.
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
