// Progress of a request. It may need several system calls: one takes at most IOV_MAX extents and 2 GiB, and may move
// fewer bytes than requested. Private to the backends.
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

  // Arguments of the next system call: at most IOV_MAX of the remaining extents, and the offset in the file.
  std::span<iovec> next();
  std::int64_t next_offset() const { return request_.offset + num_bytes_; }

  // Takes the result of a system call: a number of bytes, or a negative errno. True if the request is complete.
  bool advance(std::int64_t result);

  // Outcome of the request, with its digest.
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
