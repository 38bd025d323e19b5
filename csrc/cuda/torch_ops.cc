// torch.ops.hybridkv_cuda: what Python calls. Registered through torch's stable ABI, so that one
// build serves every torch from 2.9 on. An operator enqueues on the stream that it is given and
// returns; a CUDA call that fails becomes an exception with the call's name.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "batch_copy.h"
#include "kernels.h"

namespace {

using hybridkv::cuda::FragmentRun;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Raised by one when an operator or a table's row changes its meaning.
constexpr std::int64_t kInterfaceVersion = 1;

void require(const hybridkv::cuda::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

void require_table(const Tensor& tensor, std::int64_t columns, const char* name) {
  const bool fits = tensor.dim() == 2 && tensor.size(1) == columns && tensor.is_contiguous() &&
                    tensor.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(fits, name, ": expected a contiguous int64 tensor of shape (n, ", columns, ")");
}

void require_column(const Tensor& tensor, std::int64_t length, const char* name) {
  const bool fits = tensor.dim() == 1 && tensor.size(0) == length && tensor.is_contiguous() &&
                    tensor.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(fits, name, ": expected a contiguous int64 tensor of ", length, " elements");
}

cudaStream_t stream_of(std::int64_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

void copy_fragments(const Tensor& table, std::int64_t num_tiles, std::int64_t tile_bytes, std::int64_t num_blocks,
                    std::int64_t stream) {
  require_table(table, sizeof(FragmentRun) / sizeof(std::int64_t), "table");
  STD_TORCH_CHECK(num_tiles >= 0 && tile_bytes > 0 && num_blocks > 0, "expected tiles, a tile size and thread blocks");
  require(hybridkv::cuda::launch_copy(static_cast<const FragmentRun*>(table.data_ptr()), table.size(0), num_tiles,
                                      tile_bytes, static_cast<std::uint32_t>(num_blocks), stream_of(stream)));
}

void checksums(const Tensor& ranges, const Tensor& digests, std::int64_t num_blocks, std::int64_t stream) {
  require_table(ranges, 2, "ranges");
  require_table(digests, 2, "digests");
  STD_TORCH_CHECK(ranges.size(0) == digests.size(0), "expected a digest for each range");
  STD_TORCH_CHECK(num_blocks > 0, "expected thread blocks");
  require(hybridkv::cuda::launch_checksums(static_cast<const std::uint64_t*>(ranges.data_ptr()), ranges.size(0),
                                           static_cast<std::uint64_t*>(digests.data_ptr()),
                                           static_cast<std::uint32_t>(num_blocks), stream_of(stream)));
}

void copy_batch(const Tensor& sources, const Tensor& destinations, const Tensor& num_bytes, std::int64_t stream) {
  const std::int64_t count = sources.numel();
  require_column(sources, count, "sources");
  require_column(destinations, count, "destinations");
  require_column(num_bytes, count, "num_bytes");
  require(hybridkv::cuda::copy_batch(static_cast<const std::uint64_t*>(sources.data_ptr()),
                                     static_cast<const std::uint64_t*>(destinations.data_ptr()),
                                     static_cast<const std::uint64_t*>(num_bytes.data_ptr()), count,
                                     stream_of(stream)));
}

void load_kernels() { require(hybridkv::cuda::load_kernels()); }

std::int64_t interface_version() { return kInterfaceVersion; }

bool has_batch_copy() { return hybridkv::cuda::has_batch_copy(); }

}  // namespace

STABLE_TORCH_LIBRARY(hybridkv_cuda, library) {
  library.def("copy_fragments(Tensor table, int num_tiles, int tile_bytes, int num_blocks, int stream) -> ()");
  library.def("checksums(Tensor ranges, Tensor(a!) digests, int num_blocks, int stream) -> ()");
  library.def("copy_batch(Tensor sources, Tensor destinations, Tensor num_bytes, int stream) -> ()");
  library.def("load_kernels() -> ()");
  library.def("interface_version() -> int");
  library.def("has_batch_copy() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(hybridkv_cuda, CUDA, library) {
  library.impl("copy_fragments", TORCH_BOX(&copy_fragments));
  library.impl("checksums", TORCH_BOX(&checksums));
}

// The arrays of a batch lie in host memory; what they point to need not.
STABLE_TORCH_LIBRARY_IMPL(hybridkv_cuda, CPU, library) { library.impl("copy_batch", TORCH_BOX(&copy_batch)); }

STABLE_TORCH_LIBRARY_IMPL(hybridkv_cuda, CompositeExplicitAutograd, library) {
  library.impl("load_kernels", TORCH_BOX(&load_kernels));
  library.impl("interface_version", TORCH_BOX(&interface_version));
  library.impl("has_batch_copy", TORCH_BOX(&has_batch_copy));
}
