#include "csrc/cpu/file_progress.h"

#include <cerrno>
#include <climits>
#include <utility>

#include "csrc/cpu/extents.h"

namespace hybridkv::cpu {

FileProgress::FileProgress(FileRequest request) : request_(std::move(request)), left_(request_.extents) {
  while (first_ < left_.size() && left_[first_].iov_len == 0) ++first_;
}

std::span<iovec> FileProgress::next() {
  const std::size_t count = left_.size() - first_;
  return {left_.data() + first_, count < IOV_MAX ? count : IOV_MAX};
}

bool FileProgress::advance(std::int64_t result) {
  if (result == -EINTR || result == -EAGAIN) return false;
  if (result < 0) {
    error_ = static_cast<int>(-result);
    return true;
  }
  if (request_.operation == FileOperation::kSyncData || first_ == left_.size()) return true;
  if (result == 0) {
    error_ = ENODATA;
    return true;
  }
  num_bytes_ += result;
  auto moved = static_cast<std::size_t>(result);
  while (first_ < left_.size() && moved >= left_[first_].iov_len) moved -= left_[first_++].iov_len;
  if (first_ == left_.size()) return true;
  left_[first_].iov_base = static_cast<char*>(left_[first_].iov_base) + moved;
  left_[first_].iov_len -= moved;
  return false;
}

FileCompletion FileProgress::completion() const {
  FileCompletion completion{request_.tag, error_, num_bytes_, {}};
  if (!request_.wants_digest || error_ != 0 || request_.operation != FileOperation::kRead) return completion;
  completion.digest = digest(request_.extents);
  return completion;
}

}  // namespace hybridkv::cpu
