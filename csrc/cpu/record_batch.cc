#include "csrc/cpu/record_batch.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "csrc/cpu/copy.h"
#include "csrc/cpu/extents.h"
#include "hybridkv/canonical_digest.h"

namespace hybridkv::cpu {
namespace {

std::size_t round_up(std::size_t num_bytes) {
  return (num_bytes + kRecordPageBytes - 1) / kRecordPageBytes * kRecordPageBytes;
}

// True if O_DIRECT can use this memory, except for the end of the last part.
bool is_aligned(const std::vector<iovec>& payload) {
  for (const iovec& part : payload) {
    if (reinterpret_cast<std::uintptr_t>(part.iov_base) % kRecordPageBytes != 0) return false;
    if (&part != &payload.back() && part.iov_len % kRecordPageBytes != 0) return false;
  }
  return true;
}

}  // namespace

std::size_t RecordRequest::payload_bytes() const {
  std::size_t sum = 0;
  for (const iovec& part : payload) sum += part.iov_len;
  return sum;
}

std::size_t RecordRequest::num_bytes() const { return kRecordPageBytes + round_up(payload_bytes()); }

bool RecordRequest::continues(const RecordRequest& before) const {
  return fd == before.fd && is_store == before.is_store && is_direct == before.is_direct && syncs == before.syncs &&
         offset == before.offset + static_cast<std::int64_t>(before.num_bytes());
}

void RecordBatch::Free::operator()(unsigned char* memory) const { std::free(memory); }

RecordBatch::RecordBatch(std::vector<RecordRequest> records, std::size_t digest_at)
    : records_(std::move(records)), digest_at_(digest_at) {
  std::size_t needed = 0;
  for (const RecordRequest& record : records_) needed += bounce_bytes(record);
  bounce_.reset(static_cast<unsigned char*>(std::aligned_alloc(kRecordPageBytes, needed)));
  if (bounce_ == nullptr) return;
  for (const RecordRequest& record : records_) {
    lay_out(record);
    if (record.is_store) write_header(record, pages_.back());
  }
}

// Bytes to copy through the batch: the header's page, and the last page or the whole payload.
std::size_t RecordBatch::bounce_bytes(const RecordRequest& record) const {
  const std::size_t payload_bytes = record.payload_bytes();
  if (record.is_direct && !is_aligned(record.payload)) return kRecordPageBytes + round_up(payload_bytes);
  return payload_bytes % kRecordPageBytes == 0 ? kRecordPageBytes : 2 * kRecordPageBytes;
}

void RecordBatch::lay_out(const RecordRequest& record) {
  pages_.push_back(take(kRecordPageBytes));
  extents_.push_back({pages_.back(), kRecordPageBytes});
  const std::size_t payload_bytes = record.payload_bytes();
  const std::size_t rest = payload_bytes % kRecordPageBytes;
  if (!record.is_direct) {
    extents_.insert(extents_.end(), record.payload.begin(), record.payload.end());
    if (rest != 0) extents_.push_back({take(kRecordPageBytes), kRecordPageBytes - rest});
  } else if (!is_aligned(record.payload)) {
    unsigned char* inside = take(round_up(payload_bytes));
    extents_.push_back({inside, round_up(payload_bytes)});
    for (const iovec& part : record.payload) {
      move_through(part.iov_base, part.iov_len, inside);
      inside += part.iov_len;
    }
  } else {
    for (iovec part : record.payload) {
      part.iov_len = part.iov_len / kRecordPageBytes * kRecordPageBytes;
      if (part.iov_len != 0) extents_.push_back(part);
    }
    if (rest != 0) {
      const iovec& last = record.payload.back();
      unsigned char* inside = take(kRecordPageBytes);
      extents_.push_back({inside, kRecordPageBytes});
      move_through(static_cast<unsigned char*>(last.iov_base) + last.iov_len - rest, rest, inside);
    }
  }
}

// Zeros, because the bytes after a header or a payload are written too.
unsigned char* RecordBatch::take(std::size_t num_bytes) {
  unsigned char* taken = bounce_.get() + bounce_used_;
  bounce_used_ += num_bytes;
  std::memset(taken + num_bytes - kRecordPageBytes, 0, kRecordPageBytes);
  return taken;
}

void RecordBatch::move_through(const void* memory, std::size_t num_bytes, unsigned char* inside) {
  if (front().is_store) {
    std::memcpy(inside, memory, num_bytes);
  } else {
    copies_.push_back({inside, const_cast<void*>(memory), num_bytes});
  }
}

void RecordBatch::write_header(const RecordRequest& record, unsigned char* page) {
  digests_.push_back(digest(record.payload));
  std::memcpy(page, record.header.data(), record.header.size());
  write_canonical(digests_.back(), page + digest_at_);
  write_canonical(digest(page, record.header.size()), page + record.header.size());
}

FileRequest RecordBatch::request(std::int64_t tag) const {
  const FileOperation operation = front().is_store ? FileOperation::kWrite : FileOperation::kRead;
  return {tag, operation, front().fd, front().offset, extents_, false};
}

std::vector<RecordCompletion> RecordBatch::finish() {
  std::vector<RecordCompletion> completions;
  for (const Copy& copy : copies_) std::memcpy(copy.outside, copy.inside, copy.num_bytes);
  for (std::size_t record = 0; record < records_.size(); ++record) {
    if (records_[record].is_store) {
      completions.push_back({records_[record].tag, RecordOutcome::kDone, 0, digests_[record], {}});
    } else {
      completions.push_back(verified(records_[record], pages_[record]));
    }
  }
  return completions;
}

RecordCompletion RecordBatch::verified(const RecordRequest& record, const unsigned char* page) const {
  RecordCompletion completion{record.tag, RecordOutcome::kDone, 0, {}, {}};
  const std::size_t size = record.header.size();
  const std::size_t behind = digest_at_ + kDigestBytes;
  unsigned char header_digest[kDigestBytes];
  write_canonical(digest(page, size), header_digest);
  if (std::memcmp(page, record.header.data(), digest_at_) != 0 ||
      std::memcmp(page + behind, record.header.data() + behind, size - behind) != 0 ||
      std::memcmp(page + size, header_digest, kDigestBytes) != 0) {
    completion.outcome = RecordOutcome::kOtherHeader;
    completion.page.assign(page, page + kRecordPageBytes);
    return completion;
  }
  unsigned char payload_digest[kDigestBytes];
  completion.digest = digest(record.payload);
  write_canonical(completion.digest, payload_digest);
  if (std::memcmp(page + digest_at_, payload_digest, kDigestBytes) != 0) {
    completion.outcome = RecordOutcome::kOtherPayload;
  }
  return completion;
}

}  // namespace hybridkv::cpu
