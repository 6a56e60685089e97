// The arenas of this process, by device, for callers that have no more than that.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "arena.h"

namespace inflight {

// A GPU has at most one, under its ordinal; host twins count down from -1.
class Arenas {
 public:
  static Arenas& of_process() {
    // Never destroyed: at exit torch may free after static objects are gone.
    static Arenas* const arenas = new Arenas;
    return *arenas;
  }

  // Enters what `make` returns, unless the device has one.
  template <class Make>
  std::shared_ptr<Arena> open(int device, Make make) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (arenas_.count(device) != 0)
      throw std::logic_error("open: device " + std::to_string(device) +
                             " has an arena already; close that first");
    last_errors_.erase(device);
    return arenas_[device] = make();
  }

  int next_host() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return next_host_--;
  }

  std::shared_ptr<Arena> find(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = arenas_.find(device);
    return found == arenas_.end() ? nullptr : found->second;
  }

  void forget(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    arenas_.erase(device);
  }

  // What a callback could not throw.
  void set_last_error(int device, const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    last_errors_[device] = text;
  }

  std::string last_error(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return last_errors_[device];
  }

 private:
  std::mutex mutex_;
  std::map<int, std::shared_ptr<Arena>> arenas_;
  std::map<int, std::string> last_errors_;
  int next_host_ = -1;
};

}  // namespace inflight
