#include "hybridkv/copy_run.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

void expect(bool holds, const char* claim) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", claim);
  std::exit(EXIT_FAILURE);
}

}  // namespace

int main() {
  using hybridkv::CopyRun;
  const CopyRun run{0x0102030405060708, 0x1112131415161718, 0x2122232425262728};
  unsigned char bytes[sizeof run];
  std::memcpy(bytes, &run, sizeof run);
  expect(bytes[0] == 0x08 && bytes[8] == 0x18 && bytes[16] == 0x28, "three little-endian words in order");

  const CopyRun first{100, 500, 16};
  expect(continues(first, {116, 516, 8}), "runs that are adjacent on both sides are joined");
  expect(!continues(first, {116, 520, 8}), "runs with a gap at the destination are not joined");
  expect(!continues(first, {120, 516, 8}), "runs with a gap at the source are not joined");
  expect(!continues({116, 516, 8}, first), "order matters");
}
