// How far a request has come. One system call need not do all of it: it takes at most IOV_MAX extents and 2 GiB, and
// may do less than it was asked. Private to the backends.
#ifndef HYBRIDKV_CPU_FILE_PROGRESS_H_
#define HYBRIDKV_CPU_FILE_PROGRESS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "csrc/cpu/file_queue.h"

namespace hybridkv::cpu {

class FileProgress {
 public:
  explicit FileProgress(FileRequest request);

  const FileRequest& request() const { return request_; }

  // What the next system call is asked for: at most IOV_MAX extents of what is left, and where in the file.
  std::span<iovec> next();
  std::int64_t next_offset() const { return request_.offset + num_bytes_; }

  // Takes a system call's result: bytes, or an errno below 0. Whether the request is over.
  bool advance(std::int64_t result);

  // What became of it, with its digest.
  FileCompletion completion() const;

 private:
  FileRequest request_;
  std::vector<iovec> left_;  // the first may be cut
  std::size_t first_ = 0;
  std::int64_t num_bytes_ = 0;
  int error_ = 0;
};

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_FILE_PROGRESS_H_
