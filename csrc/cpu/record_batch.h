// Records that lie one behind the other in a file, as one request of a file queue.
//
// A record is a page that begins with its header, and its payload in whole pages. Of the header this knows no more than
// where the payload's digest stands, and that the digest of the header follows it; the rest of the page is zeros. With
// O_DIRECT memory is used as it is where every part begins on a page and is whole pages long, but for the end of the
// last one; the rest goes through memory of the batch. Starts nothing and waits for nothing.
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

// `header` has zeros where the payload's digest belongs. `payload` must stay valid until the record has ended; no part
// is empty. What is loaded into it is good only when the outcome says so.
struct RecordRequest {
  std::int64_t tag;  // comes back; means nothing here
  bool is_store;
  bool is_direct;  // the file was opened with O_DIRECT
  bool syncs;      // of a store: not over before its bytes are on the device
  int fd;
  std::int64_t offset;  // of the header's page
  std::vector<unsigned char> header;
  std::vector<iovec> payload;

  std::size_t payload_bytes() const;
  // With its header's page.
  std::size_t num_bytes() const;
  // Whether one call can move it together with one that ends where it begins.
  bool continues(const RecordRequest& before) const;
};

enum class RecordOutcome : std::int32_t {
  kDone = 0,
  kFailed = 1,        // `error` says why
  kOtherHeader = 2,   // what was read begins with another header than the one expected: `page`
  kOtherPayload = 3,  // the payload is not the one whose digest stands in the header
  kCancelled = 4,     // nothing was begun
};

struct RecordCompletion {
  std::int64_t tag;
  RecordOutcome outcome;
  int error;         // an errno, ENODATA when the file ended before the record did
  Digest128 digest;  // the payload's, where it is kDone
  std::vector<unsigned char> page;
};

class RecordBatch {
 public:
  // At least one record, each continuing the one before. `digest_at`: where in a header the payload's digest stands.
  RecordBatch(std::vector<RecordRequest> records, std::size_t digest_at);

  // False when there was no memory for it: then only the records are there.
  bool is_ready() const { return bounce_ != nullptr; }
  // What moves them. Of stores all that is written is there now, digests included.
  FileRequest request(std::int64_t tag) const;
  // The outcome of each record by what the request has moved. Not after an error.
  std::vector<RecordCompletion> finish();

  const std::vector<RecordRequest>& records() const { return records_; }
  const RecordRequest& front() const { return records_.front(); }
  std::size_t size() const { return records_.size(); }
  // The records again, for who wants to try them one by one.
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
  std::vector<unsigned char*> pages_;  // of headers
  std::vector<Digest128> digests_;     // of stores
  std::vector<iovec> extents_;
  std::vector<Copy> copies_;
};

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_RECORD_BATCH_H_
