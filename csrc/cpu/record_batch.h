// Adjacent records of a file, as one request of a file queue.
//
// A record is a page with its header, and its payload in whole pages. The batch uses only two fields of the header:
// the digest of the payload at `digest_at`, and the digest of the header after the header. The rest of the page is
// zeros. With O_DIRECT it uses the caller's memory if each part is aligned to pages and of whole pages, except for the
// end of the last one; otherwise it copies through memory of the batch. It starts nothing and waits for nothing.
#ifndef HYBRIDKV_CPU_RECORD_BATCH_H_
#define HYBRIDKV_CPU_RECORD_BATCH_H_

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/cpu/file_queue.h"
#include "hybridkv/xxh3.h"

namespace hybridkv::cpu {

inline constexpr std::size_t kRecordPageBytes = 4096;
inline constexpr std::size_t kDigestBytes = 16;

// `header` has zeros in place of the payload's digest. `payload` must stay valid until the record has ended; no part is
// empty. Loaded bytes are valid only if the outcome is kDone.
struct RecordRequest {
  std::int64_t tag;  // the completion returns it
  bool is_store;
  bool is_direct;  // the file was opened with O_DIRECT
  bool syncs;      // stores: complete only when the bytes are on the device
  int fd;
  std::int64_t offset;  // offset of the header's page
  std::vector<unsigned char> header;
  std::vector<iovec> payload;

  std::size_t payload_bytes() const;
  // Includes the header's page.
  std::size_t num_bytes() const;
  // True if one call can move both records; `before` ends where this one begins.
  bool continues(const RecordRequest& before) const;
};

enum class RecordOutcome : std::int32_t {
  kDone = 0,
  kFailed = 1,        // with `error`
  kOtherHeader = 2,   // the header read is not the expected one; `page` has the bytes read
  kOtherPayload = 3,  // the payload does not match the digest in the header
  kCancelled = 4,     // not started
};

struct RecordCompletion {
  std::int64_t tag;
  RecordOutcome outcome;
  int error;         // an errno; ENODATA if the file ends before the record
  Digest128 digest;  // digest of the payload, for kDone
  std::vector<unsigned char> page;
};

class RecordBatch {
 public:
  // At least one record, each adjacent to the one before. `digest_at`: offset of the payload's digest in a header.
  RecordBatch(std::vector<RecordRequest> records, std::size_t digest_at);

  // False if there was no memory for the batch. Then only the records are valid.
  bool is_ready() const { return bounce_ != nullptr; }
  // The request for the file queue. Computes the digests of stores.
  FileRequest request(std::int64_t tag) const;
  // The outcome of each record, after a request without an error.
  std::vector<RecordCompletion> finish();

  const std::vector<RecordRequest>& records() const { return records_; }
  const RecordRequest& front() const { return records_.front(); }
  std::size_t size() const { return records_.size(); }
  // Hands the records back, to try them one by one.
  std::vector<RecordRequest> take_records() { return std::move(records_); }

 private:
  struct Copy {
    unsigned char* inside;
    void* outside;
    std::size_t num_bytes;
  };
  struct Free {
    void operator()(unsigned char* memory) const;
  };

  std::size_t bounce_bytes(const RecordRequest& record) const;
  void lay_out(const RecordRequest& record);
  unsigned char* take(std::size_t num_bytes);
  void move_through(const void* memory, std::size_t num_bytes, unsigned char* inside);
  void write_header(const RecordRequest& record, unsigned char* page);
  RecordCompletion verified(const RecordRequest& record, const unsigned char* page) const;

  std::vector<RecordRequest> records_;
  std::size_t digest_at_;
  std::unique_ptr<unsigned char, Free> bounce_;
  std::size_t bounce_used_ = 0;
  std::vector<unsigned char*> pages_;  // header pages
  std::vector<Digest128> digests_;     // stores only
  std::vector<iovec> extents_;
  std::vector<Copy> copies_;
};

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_RECORD_BATCH_H_
