// Divides the arena into runs, which get one handle each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace inflight {

struct Run {
  uint64_t offset, bytes;
};

// Joins `pieces`, which are in order of their offsets: neighbours without a hole, and
// across the smallest holes while these add up to at most `spare` bytes.
inline std::vector<Run> plan_runs(const std::vector<Run>& pieces, uint64_t spare) {
  const auto hole_before = [&](size_t i) {
    return pieces[i].offset - pieces[i - 1].offset - pieces[i - 1].bytes;
  };
  std::vector<size_t> order;
  for (size_t i = 1; i < pieces.size(); ++i) order.push_back(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return hole_before(a) < hole_before(b); });
  std::vector<bool> joined(pieces.size());
  for (const size_t i : order) {
    if (hole_before(i) > spare) break;
    spare -= hole_before(i);
    joined[i] = true;
  }
  std::vector<Run> runs;
  for (size_t i = 0; i < pieces.size(); ++i)
    if (joined[i])
      runs.back().bytes += hole_before(i) + pieces[i].bytes;
    else
      runs.push_back(pieces[i]);
  return runs;
}

}  // namespace inflight
