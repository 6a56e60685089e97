// The arenas of this process by device, for callers that know only the device.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "arena.h"

namespace inflight {

// A GPU's arenas are under its ordinal; torch fills the newest. Arenas in host memory
// count down from -2.
class Arenas {
 public:
  static Arenas& of_process() {
    // Never destroyed: at exit torch may free after the end of static objects.
    static Arenas* const arenas = new Arenas;
    return *arenas;
  }

  void enter(int device, const std::shared_ptr<Arena>& arena) {
    const std::lock_guard<std::mutex> lock(mutex_);
    last_errors_.erase(device);
    arenas_[device].push_back(arena);
  }

  // From now on torch's allocations come from this arena.
  void fill(int device, const Arena* arena) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& all = arenas_[device];
    const auto found = std::find_if(
        all.begin(), all.end(), [&](const auto& one) { return one.get() == arena; });
    if (found == all.end()) throw std::logic_error("fill: the arena is closed");
    std::rotate(found, found + 1, all.end());
  }

  void forget(int device, const Arena* arena) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& all = arenas_[device];
    all.erase(std::remove_if(all.begin(), all.end(),
                             [&](const auto& one) { return one.get() == arena; }),
              all.end());
  }

  int next_host() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return next_host_--;
  }

  std::vector<std::shared_ptr<Arena>> of_device(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return arenas_[device];
  }

  // The failure of a callback, which cannot throw.
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
  std::map<int, std::vector<std::shared_ptr<Arena>>> arenas_;
  std::map<int, std::string> last_errors_;
  int next_host_ = -2;
};

}  // namespace inflight
