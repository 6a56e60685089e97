// The address space of an NVIDIA GPU: virtual memory management of the driver.
//
// The driver's library is opened with the first arena, and the needed parts of cuda.h
// are written out below. So the build needs no CUDA toolkit, and loading needs no GPU.
// The layouts are those of cuda.h since CUDA 11.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "memory.h"

namespace inflight {
namespace cuda {

using Result = int;  // CUresult
constexpr Result kSuccess = 0;
constexpr Result kErrorOutOfMemory = 2;

using Device = int;
using Context = void*;
using Stream = void*;

struct Location {  // CUmemLocation
  int type;
  int id;
};
constexpr int kLocationDevice = 1;

struct AllocationProp {  // CUmemAllocationProp
  int type;
  int requested_handle_types;
  Location location;
  void* win32_handle_meta_data;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
constexpr int kAllocationPinned = 1;
static_assert(sizeof(AllocationProp) == 32 && offsetof(AllocationProp, flags) == 24,
              "CUmemAllocationProp has another layout");

struct AccessDesc {  // CUmemAccessDesc
  Location location;
  int flags;
};
constexpr int kAccessReadWrite = 3;
static_assert(sizeof(AccessDesc) == 12, "CUmemAccessDesc has another layout");

constexpr int kGranularityMinimum = 0;
constexpr int kAttributeVirtualMemory = 102;
constexpr int kAttributeRdmaWithVirtualMemory = 110;

#define INFLIGHT_DRIVER(X)                                                        \
  X(cuInit, (unsigned))                                                           \
  X(cuGetErrorName, (Result, const char**))                                       \
  X(cuDeviceGet, (Device*, int))                                                  \
  X(cuDeviceGetAttribute, (int*, int, Device))                                    \
  X(cuDevicePrimaryCtxRetain, (Context*, Device))                                 \
  X(cuDevicePrimaryCtxRelease_v2, (Device))                                       \
  X(cuCtxGetCurrent, (Context*))                                                  \
  X(cuCtxSetCurrent, (Context))                                                   \
  X(cuCtxSynchronize, ())                                                         \
  X(cuMemGetInfo_v2, (size_t*, size_t*))                                          \
  X(cuMemGetAllocationGranularity, (size_t*, const AllocationProp*, int))         \
  X(cuMemAddressReserve, (Address*, size_t, size_t, Address, unsigned long long)) \
  X(cuMemAddressFree, (Address, size_t))                                          \
  X(cuMemCreate, (Handle*, size_t, const AllocationProp*, unsigned long long))    \
  X(cuMemRelease, (Handle))                                                       \
  X(cuMemMap, (Address, size_t, size_t, Handle, unsigned long long))              \
  X(cuMemUnmap, (Address, size_t))                                                \
  X(cuMemSetAccess, (Address, size_t, const AccessDesc*, size_t))                 \
  X(cuMemcpyDtoDAsync_v2, (Address, Address, size_t, Stream))

// The functions of libcuda.so.1.
struct Driver {
#define INFLIGHT_DECLARE(name, arguments) Result(*name) arguments = nullptr;
  INFLIGHT_DRIVER(INFLIGHT_DECLARE)
#undef INFLIGHT_DECLARE

  Driver() {
    // Never closed: torch keeps it open too, as long as the process lives.
    void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
      throw Fault(Fault::kFailed, "no NVIDIA driver: libcuda.so.1 does not load",
                  "dlopen");
#define INFLIGHT_FIND(name, arguments)                                             \
  name = reinterpret_cast<decltype(name)>(::dlsym(library, #name));                \
  if (name == nullptr)                                                             \
    throw Fault(Fault::kFailed, "this NVIDIA driver is too old: it has no " #name, \
                #name);
    INFLIGHT_DRIVER(INFLIGHT_FIND)
#undef INFLIGHT_FIND
  }

  void check(const char* call, Result code) const {
    if (code == kSuccess) return;
    const char* name = nullptr;
    if (cuGetErrorName(code, &name) != kSuccess || name == nullptr) name = "unknown";
    throw Fault(
        code == kErrorOutOfMemory ? Fault::kOutOfMemory : Fault::kFailed,
        std::string(call) + " failed: " + name + " (" + std::to_string(code) + ")",
        call, code);
  }
};

#undef INFLIGHT_DRIVER

}  // namespace cuda

#define INFLIGHT_CHECK(name, ...) driver_.check(#name, driver_.name(__VA_ARGS__))

class CudaMemory : public Memory {
 public:
  // `ordinal` counts as the CUDA runtime does, CUDA_VISIBLE_DEVICES included.
  explicit CudaMemory(int ordinal) {
    INFLIGHT_CHECK(cuInit, 0);
    INFLIGHT_CHECK(cuDeviceGet, &device_, ordinal);
    if (attribute(cuda::kAttributeVirtualMemory) == 0)
      throw Fault(Fault::kFailed, "this GPU has no virtual memory management",
                  "cuDeviceGetAttribute");
    access_ = {{cuda::kLocationDevice, ordinal}, cuda::kAccessReadWrite};
    prop_.type = cuda::kAllocationPinned;
    prop_.location = access_.location;
    // So that a network card may write into the shadow weights.
    prop_.flags.gpu_direct_rdma_capable =
        attribute(cuda::kAttributeRdmaWithVirtualMemory) != 0;
    INFLIGHT_CHECK(cuMemGetAllocationGranularity, &granularity_, &prop_,
                   cuda::kGranularityMinimum);
    // The context of the runtime, which torch uses too.
    INFLIGHT_CHECK(cuDevicePrimaryCtxRetain, &context_, device_);
  }

  ~CudaMemory() override { driver_.cuDevicePrimaryCtxRelease_v2(device_); }

  uint64_t granularity() const override { return granularity_; }

  uint64_t available() override {
    size_t free = 0, total = 0;
    INFLIGHT_CHECK(cuMemGetInfo_v2, &free, &total);
    return free;
  }

  Address reserve(uint64_t bytes) override {
    Address address = 0;
    INFLIGHT_CHECK(cuMemAddressReserve, &address, bytes, 0, 0, 0);
    return address;
  }

  void give_back(Address address, uint64_t bytes) override {
    INFLIGHT_CHECK(cuMemAddressFree, address, bytes);
  }

  Handle create(uint64_t bytes) override {
    Handle handle = 0;
    cuda::Result code = driver_.cuMemCreate(&handle, bytes, &prop_, 0);
    if (code != cuda::kSuccess && code != cuda::kErrorOutOfMemory &&
        prop_.flags.gpu_direct_rdma_capable) {
      // Some hosts report this ability and do not have it.
      prop_.flags.gpu_direct_rdma_capable = 0;
      code = driver_.cuMemCreate(&handle, bytes, &prop_, 0);
    }
    driver_.check("cuMemCreate", code);
    return handle;
  }

  void release(Handle handle) override { INFLIGHT_CHECK(cuMemRelease, handle); }

  void map(Address address, uint64_t bytes, Handle handle) override {
    INFLIGHT_CHECK(cuMemMap, address, bytes, 0, handle, 0);
  }

  void unmap(Address address, uint64_t bytes) override {
    INFLIGHT_CHECK(cuMemUnmap, address, bytes);
  }

  void set_access(Address address, uint64_t bytes) override {
    INFLIGHT_CHECK(cuMemSetAccess, address, bytes, &access_, 1);
  }

  void copy(Address to, Address from, uint64_t bytes) override {
    INFLIGHT_CHECK(cuMemcpyDtoDAsync_v2, to, from, bytes, nullptr);
  }

  void synchronize() override { INFLIGHT_CHECK(cuCtxSynchronize); }

  // The thread may have no context, or that of another GPU.
  uint64_t enter() override {
    cuda::Context before = nullptr;
    INFLIGHT_CHECK(cuCtxGetCurrent, &before);
    if (before != context_) INFLIGHT_CHECK(cuCtxSetCurrent, context_);
    return reinterpret_cast<uint64_t>(before);
  }

  void leave(uint64_t before) noexcept override {
    const auto context = reinterpret_cast<cuda::Context>(before);
    if (context != context_) driver_.cuCtxSetCurrent(context);
  }

 private:
  int attribute(int which) {
    int value = 0;
    INFLIGHT_CHECK(cuDeviceGetAttribute, &value, which, device_);
    return value;
  }

  const cuda::Driver driver_;
  cuda::Device device_ = 0;
  cuda::Context context_ = nullptr;
  cuda::AllocationProp prop_{};
  cuda::AccessDesc access_{};
  size_t granularity_ = 0;
};

#undef INFLIGHT_CHECK

}  // namespace inflight
