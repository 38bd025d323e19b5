// Scheduler for the lanes of a kernel: takes pieces of any length one by one, and advances several together.
#ifndef HYBRIDKV_CPU_LANES_H_
#define HYBRIDKV_CPU_LANES_H_

#include <algorithm>
#include <array>
#include <cstddef>

#include "csrc/cpu/kernels.h"

namespace hybridkv::cpu {

// `Advance` is called as `advance(lanes, num_lanes, num_units)`, with lanes that all have that many units left;
// `Finish` as `finish(tag)` once a piece is done.
template <typename Advance, typename Finish>
class Lanes {
 public:
  Lanes(Advance advance, Finish finish) : advance_(advance), finish_(finish) {}

  // Begins a piece. If no lane is idle, it first advances the lanes until a piece is finished.
  void add(const Lane& lane, std::size_t num_units, std::size_t tag) {
    if (num_active_ == kNumLanes) advance_together();
    lanes_[num_active_] = lane;
    left_[num_active_] = num_units;
    tags_[num_active_] = tag;
    ++num_active_;
  }

  // Finishes all pieces.
  void drain() {
    while (num_active_ > 0) advance_together();
  }

 private:
  void advance_together() {
    const std::size_t step = *std::min_element(left_.begin(), left_.begin() + num_active_);
    advance_(lanes_.data(), num_active_, step);
    for (std::size_t lane = num_active_; lane-- > 0;) {
      left_[lane] -= step;
      if (left_[lane] > 0) continue;
      const std::size_t tag = tags_[lane];
      --num_active_;
      lanes_[lane] = lanes_[num_active_];
      left_[lane] = left_[num_active_];
      tags_[lane] = tags_[num_active_];
      finish_(tag);
    }
  }

  Advance advance_;
  Finish finish_;
  std::array<Lane, kNumLanes> lanes_;
  std::array<std::size_t, kNumLanes> left_;
  std::array<std::size_t, kNumLanes> tags_;
  std::size_t num_active_ = 0;
};

template <typename Advance, typename Finish>
Lanes(Advance, Finish) -> Lanes<Advance, Finish>;

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_LANES_H_
