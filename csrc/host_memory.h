// The host's version of a GPU's address space: handles are files in memory, mapping is
// mmap. With it the arena is tested without a GPU. So it is as strict as the driver,
// has a budget that can run out, and fails on demand.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <string>
#include <system_error>

#include "memory.h"

namespace inflight {

class HostMemory : public Memory {
 public:
  ~HostMemory() override {
    for (const auto& [handle, bytes] : handles_) ::close(file_of(handle));
  }

  void set_budget(uint64_t bytes) { budget_ = bytes; }

  // After `skip` more calls of this name ("": of any name), the next `times` calls
  // fail.
  void inject(const std::string& call, uint64_t skip, uint64_t times) {
    injected_ = {call, skip, times};
  }

  uint64_t granularity() const override { return uint64_t(::sysconf(_SC_PAGESIZE)); }

  uint64_t available() override { return budget_ > used_ ? budget_ - used_ : 0; }

  Address reserve(uint64_t bytes) override {
    trip("reserve");
    return nowhere(nullptr, bytes, 0, "reserve");
  }

  void give_back(Address address, uint64_t bytes) override {
    trip("give_back");
    if (overlaps(address, bytes)) fail("give_back", EBUSY);
    if (::munmap(at(address), bytes) != 0) fail("give_back", errno);
  }

  Handle create(uint64_t bytes) override {
    trip("create");
    if (bytes > available()) fail("create", ENOMEM);
    const int file = memory_file();
    if (file < 0) fail("create", errno);
    if (::ftruncate(file, off_t(bytes)) != 0) {
      const int code = errno;
      ::close(file);
      fail("create", code);
    }
    const Handle handle = Handle(file) + 1;  // a descriptor may be 0
    handles_[handle] = bytes;
    used_ += bytes;
    return handle;
  }

  void release(Handle handle) override {
    trip("release");
    const auto found = handles_.find(handle);
    if (found == handles_.end()) fail("release", EINVAL);
    ::close(file_of(handle));
    used_ -= found->second;
    handles_.erase(found);
  }

  void map(Address address, uint64_t bytes, Handle handle) override {
    trip("map");
    const auto found = handles_.find(handle);
    if (found == handles_.end() || found->second != bytes) fail("map", EINVAL);
    if (overlaps(address, bytes)) fail("map", EEXIST);
    if (::mmap(at(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file_of(handle),
               0) == MAP_FAILED)
      fail("map", errno);
    mapped_[address] = bytes;
  }

  void unmap(Address address, uint64_t bytes) override {
    trip("unmap");
    require_mapped("unmap", address, bytes);
    nowhere(at(address), bytes, MAP_FIXED, "unmap");
    mapped_.erase(address);
  }

  void set_access(Address address, uint64_t bytes) override {
    trip("set_access");
    require_mapped("set_access", address, bytes);
    if (::mprotect(at(address), bytes, PROT_READ | PROT_WRITE) != 0)
      fail("set_access", errno);
  }

  void copy(Address to, Address from, uint64_t bytes) override {
    trip("copy");
    std::memcpy(at(to), at(from), bytes);
  }

  void synchronize() override { trip("synchronize"); }

 private:
  struct Injected {
    std::string call;
    uint64_t skip, times;
  };

  static void* at(Address address) { return reinterpret_cast<void*>(address); }

  static int file_of(Handle handle) { return int(handle - 1); }

  [[noreturn]] static void fail(const char* call, int code) {
    throw Fault(code == ENOMEM ? Fault::kOutOfMemory : Fault::kFailed,
                std::string(call) + " failed: " + std::generic_category().message(code),
                call, code);
  }

  static int memory_file() {
#ifdef MFD_CLOEXEC
    return ::memfd_create("inflight-arena", MFD_CLOEXEC);
#else
    std::FILE* file = std::tmpfile();  // has no name, and ends with its last descriptor
    if (file == nullptr) return -1;
    const int own = ::dup(::fileno(file));
    std::fclose(file);
    return own;
#endif
  }

  static Address nowhere(void* address, uint64_t bytes, int flags, const char* call) {
    flags |= MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* got = ::mmap(address, bytes, PROT_NONE, flags, -1, 0);
    if (got == MAP_FAILED) fail(call, errno);
    return reinterpret_cast<Address>(got);
  }

  void trip(const char* call) {
    if (injected_.times == 0) return;
    if (!injected_.call.empty() && injected_.call != call) return;
    if (injected_.skip != 0) {
      --injected_.skip;
      return;
    }
    --injected_.times;
    fail(call, EIO);
  }

  bool overlaps(Address address, uint64_t bytes) const {
    const auto after = mapped_.lower_bound(address + bytes);
    if (after == mapped_.begin()) return false;
    const auto last = std::prev(after);
    return last->first + last->second > address;
  }

  void require_mapped(const char* call, Address address, uint64_t bytes) const {
    const auto found = mapped_.find(address);
    if (found == mapped_.end() || found->second != bytes) fail(call, EINVAL);
  }

  std::map<Handle, uint64_t> handles_;   // bytes of each
  std::map<Address, uint64_t> mapped_;   // bytes of each
  uint64_t budget_ = uint64_t(1) << 40;  // more than any test uses
  uint64_t used_ = 0;
  Injected injected_{"", 0, 0};
};

}  // namespace inflight
