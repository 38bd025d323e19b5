// Kernels in portable C++: the fallback, and the reference for tests of the others.
#include <cstring>

#include "csrc/cpu/kernels.h"

namespace hybridkv::cpu {
namespace {

void copy(Lane* lanes, std::size_t num_lanes, std::size_t num_bytes, Stores) {
  for (std::size_t lane = 0; lane < num_lanes; ++lane) {
    std::memcpy(lanes[lane].destination, lanes[lane].source, num_bytes);
    lanes[lane].source += num_bytes;
    lanes[lane].destination += num_bytes;
  }
}

void sum(Lane* lanes, std::size_t num_lanes, std::size_t num_blocks) {
  for (std::size_t lane = 0; lane < num_lanes; ++lane) {
    for (std::size_t block = 0; block < num_blocks; ++block) {
      xxh3::block_sum(lanes[lane].sums, lanes[lane].source);
      lanes[lane].source += xxh3::kBlockBytes;
      lanes[lane].sums += xxh3::kLanes;
    }
  }
}

void copy_and_sum(Lane* lanes, std::size_t num_lanes, std::size_t num_blocks, Stores) {
  for (std::size_t lane = 0; lane < num_lanes; ++lane) {
    for (std::size_t block = 0; block < num_blocks; ++block) {
      std::memcpy(lanes[lane].destination, lanes[lane].source, xxh3::kBlockBytes);
      lanes[lane].destination += xxh3::kBlockBytes;
      sum(&lanes[lane], 1, 1);
    }
  }
}

void fold(Word* accumulators, const Word* sums, std::size_t num_blocks) {
  for (std::size_t block = 0; block < num_blocks; ++block) {
    xxh3::fold_block(accumulators, sums + block * xxh3::kLanes);
  }
}

void add_stripes(Word* accumulators, const Byte* stripes, std::size_t num_stripes) {
  for (std::size_t stripe = 0; stripe < num_stripes; ++stripe) {
    xxh3::add_stripe(accumulators, stripes + stripe * xxh3::kStripeBytes, stripe * 8);
  }
}

void fence() {}

}  // namespace

const Kernels detail::kScalarKernels{Level::kScalar, false, copy, copy_and_sum, sum, fold, add_stripes, fence};

}  // namespace hybridkv::cpu
