// Asynchronous queue that stores and loads records of files, and verifies them.
//
// Its thread drives a file queue: it joins waiting records that are adjacent in a file into one request, keeps as many
// requests in flight as the file queue permits, and verifies loaded records after it has started the next requests.
// Loads go before stores, because requests of the engine wait for them, but only a bounded number of loads may overtake
// a store. It opens no file, depends on no format except the place of the digest, and does not choose the records.
//
// It runs one sync for each descriptor at a time, for all batches written by then. The kernel reports a failed
// write-back only once for each descriptor, to the next sync. So a failed sync fails every batch that was started
// before the sync ended, whatever a later sync returns.
#ifndef HYBRIDKV_CPU_RECORD_QUEUE_H_
#define HYBRIDKV_CPU_RECORD_QUEUE_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "csrc/cpu/file_queue.h"
#include "csrc/cpu/record_batch.h"

namespace hybridkv::cpu {

struct RecordQueueOptions {
  std::size_t batch_bytes;  // approximate limit for one request of adjacent records
  std::size_t digest_at;    // offset of the payload's digest in a header
};

// Limit for the requests of loads that overtake a waiting store.
inline constexpr std::size_t kMaxLoadsBeforeAStore = 8;

// Any thread may call any function at any time. Close the queue before its destructor runs.
class RecordQueue {
 public:
  // Throws std::system_error if the system permits no thread.
  RecordQueue(std::unique_ptr<FileQueue> files, RecordQueueOptions options);
  // Waits for requests in flight.
  ~RecordQueue();
  RecordQueue(const RecordQueue&) = delete;
  RecordQueue& operator=(const RecordQueue&) = delete;

  FileBackend backend() const { return files_->backend(); }

  // Queues a record. False after `close`, without any effect.
  bool submit(RecordRequest record);
  // Records that ended since the last call, each once.
  std::vector<RecordCompletion> take();
  // False on timeout.
  bool wait_until_idle(double timeout_s);
  // Cancels records that were not started, and waits for the others. False on timeout: the kernel may then still write
  // to the memory of some records.
  bool close(double timeout_s);

  // Number of requests so far.
  std::int64_t num_transfers() const;

 private:
  // A batch, and the number of failed syncs of its descriptor when it was started.
  struct Begun {
    std::unique_ptr<RecordBatch> batch;
    std::uint64_t num_failed_syncs;
  };
  struct Flight {
    std::vector<Begun> batches;  // one, or all that wait for the sync
    bool is_syncing;
  };
  struct FailedSyncs {
    std::uint64_t count = 0;
    int error = 0;  // errno of the last failure
  };

  void run();
  void start_waiting();
  bool start_sync();
  void start(Flight flight);
  void end(Flight flight, const FileCompletion& completion);
  void end_sync(std::vector<Begun> batches, int error);
  void give_up(RecordBatch& batch, int error);
  void fail(const RecordBatch& batch, int error);
  void complete(std::vector<RecordCompletion> completions);
  std::unique_ptr<RecordBatch> next_batch();
  void prepare_store();
  bool wait_for_records();
  // The caller holds the mutex.
  std::vector<RecordRequest> take_neighbours(std::deque<RecordRequest>& waiting) const;
  void cancel(const std::vector<RecordRequest>& records);
  bool has_waiting() const { return !alone_.empty() || !loads_.empty() || !stores_.empty() || prepared_ != nullptr; }

  const RecordQueueOptions options_;
  // Used by the thread only, except for `files_->wake()`.
  std::unique_ptr<FileQueue> files_;
  std::vector<Flight> flights_;  // by slot, which is the file queue's tag
  std::vector<std::size_t> free_slots_;
  std::deque<Begun> unsynced_;  // written, waiting for a sync
  std::unordered_set<int> syncing_;
  std::unordered_map<int, FailedSyncs> failed_syncs_;

  mutable std::mutex mutex_;
  std::condition_variable submitted_;
  std::condition_variable ended_;
  std::deque<RecordRequest> alone_;  // records of failed batches, to be tried one by one
  std::deque<RecordRequest> loads_;
  std::deque<RecordRequest> stores_;
  std::unique_ptr<RecordBatch> prepared_;  // next stores; their digests were computed while the device was busy
  std::size_t loads_in_a_row_ = 0;
  std::size_t num_open_ = 0;  // records that have not ended
  std::int64_t num_transfers_ = 0;
  std::vector<RecordCompletion> completions_;
  bool can_be_woken_ = false;  // the thread waits for the file queue and could start more requests
  bool is_closing_ = false;
  bool has_ended_ = false;
  std::thread thread_;
};

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_RECORD_QUEUE_H_
