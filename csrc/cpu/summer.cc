#include "csrc/cpu/summer.h"

#include <algorithm>

namespace hybridkv::cpu {

RecordShape::RecordShape(std::uint64_t size)
    : num_bytes(size), body_bytes(0), end_start(0), body_has_last(size > 0 && size % xxh3::kBlockBytes == 0) {
  if (size == 0) return;
  body_bytes = body_has_last ? size : xxh3::num_folded_blocks(size) * xxh3::kBlockBytes;
  if (body_bytes > 0) end_start = body_bytes - xxh3::kStripeBytes;
}

std::size_t Summer::take() {
  const std::size_t entry = (first_ + num_entries_) % kRingEntries;
  ++num_entries_;
  return entry;
}

std::size_t Summer::begin_blocks(std::size_t num_blocks, bool has_last) {
  const std::size_t number = take();
  Entry& entry = entries_[number];
  entry.is_finished = false;
  entry.digest = nullptr;
  entry.num_blocks = num_blocks;
  entry.has_last = has_last;
  return number;
}

void Summer::end_record(const RecordShape& shape, const Byte* end, Digest128* digest) {
  const std::size_t number = take();
  Entry& entry = entries_[number];
  entry.shape = shape;
  entry.end = end == nullptr ? entry.end_bytes.data() : end;
  entry.digest = digest;
  finish(number);
}

void Summer::finish(std::size_t entry) {
  entries_[entry].is_finished = true;
  while (num_entries_ > 0 && entries_[first_].is_finished) {
    retire(entries_[first_]);
    first_ = (first_ + 1) % kRingEntries;
    --num_entries_;
  }
}

void Summer::reset() { std::copy_n(xxh3::kTables.accumulators, xxh3::kLanes, accumulators_.begin()); }

void Summer::retire(const Entry& entry) {
  if (entry.digest == nullptr) {
    retire_blocks(entry);
    return;
  }
  *entry.digest = digest_of(entry);
  reset();
}

void Summer::retire_blocks(const Entry& entry) {
  const std::size_t num_folded = entry.num_blocks - (entry.has_last ? 1 : 0);
  kernels_.fold(accumulators_.data(), entry.sums.data(), num_folded);
  if (!entry.has_last) return;
  const Word* last = entry.sums.data() + num_folded * xxh3::kLanes;
  for (std::size_t lane = 0; lane < xxh3::kLanes; ++lane) accumulators_[lane] += last[lane];
}

Digest128 Summer::digest_of(const Entry& entry) {
  const RecordShape& shape = entry.shape;
  if (shape.num_bytes <= xxh3::kMaxShortBytes) return xxh3::digest_of_short(entry.end, shape.num_bytes);
  const Byte* last_stripe = entry.end + shape.end_bytes() - xxh3::kStripeBytes;
  if (shape.body_has_last) {
    Word summed[xxh3::kLanes] = {};
    xxh3::add_stripe(summed, last_stripe, (xxh3::kStripesPerBlock - 1) * 8);
    for (std::size_t lane = 0; lane < xxh3::kLanes; ++lane) accumulators_[lane] -= summed[lane];
  } else {
    const Byte* last_block = entry.end + (shape.body_bytes - shape.end_start);
    const std::size_t num_stripes = (shape.num_bytes - shape.body_bytes - 1) / xxh3::kStripeBytes;
    kernels_.add_stripes(accumulators_.data(), last_block, num_stripes);
  }
  xxh3::add_stripe(accumulators_.data(), last_stripe, xxh3::kLastStripeSecret);
  return xxh3::digest_of_accumulators(accumulators_.data(), shape.num_bytes);
}

}  // namespace hybridkv::cpu
