// Stores and loads records of files, verified, without keeping anybody waiting.
//
// One thread of its own drives a file queue: it makes requests of records that wait (neighbours in a file together),
// keeps as many in flight as the file queue takes, and looks at what has come when the next ones are on their way.
// Loads go before stores, since somebody waits for them; a store does not wait for ever. It opens no file, knows no
// format but where a digest stands, and decides nothing about what is stored.
//
// A descriptor is synced once at a time, for all batches that were written by then. The kernel says once for each
// descriptor that writing back went wrong, to whom it syncs then: so a sync that fails is also one of every batch that
// was begun before it ended, whatever a later sync says.
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
  std::size_t batch_bytes;  // neighbours are moved together up to about as many
  std::size_t digest_at;    // where in a header the payload's digest stands
};

// A store that waits is overtaken by no more calls for loads.
inline constexpr std::size_t kMaxLoadsBeforeAStore = 8;

// Any thread may call anything at any time, but for the end: close it before it is destroyed.
class RecordQueue {
 public:
  // std::system_error where the system gives no thread.
  RecordQueue(std::unique_ptr<FileQueue> files, RecordQueueOptions options);
  // Waits for what is in flight.
  ~RecordQueue();
  RecordQueue(const RecordQueue&) = delete;
  RecordQueue& operator=(const RecordQueue&) = delete;

  FileBackend backend() const { return files_->backend(); }

  // False after `close`: nothing was taken.
  bool submit(RecordRequest record);
  // What has ended since the last call, each record once.
  std::vector<RecordCompletion> take();
  // False when there still is something that has not ended.
  bool wait_until_idle(double timeout_s);
  // Cancels what was not begun, and waits for the rest. False when some of it has not ended in time: its memory may
  // still be written to.
  bool close(double timeout_s);

  // Calls that moved records so far.
  std::int64_t num_transfers() const;

 private:
  // A batch, and how many syncs of its descriptor had failed when it was begun.
  struct Begun {
    std::unique_ptr<RecordBatch> batch;
    std::uint64_t num_failed_syncs;
  };
  struct Flight {
    std::vector<Begun> batches;  // one, or all of those that are being forced to the device
    bool is_syncing;
  };
  struct FailedSyncs {
    std::uint64_t count = 0;
    int error = 0;  // of the last one
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
  // These with the mutex held.
  std::vector<RecordRequest> take_neighbours(std::deque<RecordRequest>& waiting) const;
  void cancel(const std::vector<RecordRequest>& records);
  bool has_waiting() const { return !alone_.empty() || !loads_.empty() || !stores_.empty() || prepared_ != nullptr; }

  const RecordQueueOptions options_;
  // The thread's alone, but for waking it.
  std::unique_ptr<FileQueue> files_;
  std::vector<Flight> flights_;  // by slot, which is the file queue's tag
  std::vector<std::size_t> free_slots_;
  std::deque<Begun> unsynced_;  // written, and to be forced to the device
  std::unordered_set<int> syncing_;
  std::unordered_map<int, FailedSyncs> failed_syncs_;

  mutable std::mutex mutex_;
  std::condition_variable submitted_;
  std::condition_variable ended_;
  std::deque<RecordRequest> alone_;  // records of batches that failed, to be tried one by one
  std::deque<RecordRequest> loads_;
  std::deque<RecordRequest> stores_;
  std::unique_ptr<RecordBatch> prepared_;  // stores whose digests were taken while there was nothing else to do
  std::size_t loads_in_a_row_ = 0;
  std::size_t num_open_ = 0;  // submitted and not ended
  std::int64_t num_transfers_ = 0;
  std::vector<RecordCompletion> completions_;
  bool can_be_woken_ = false;  // the thread waits for the file queue, and could start more
  bool is_closing_ = false;
  bool has_ended_ = false;
  std::thread thread_;
};

}  // namespace hybridkv::cpu

#endif  // HYBRIDKV_CPU_RECORD_QUEUE_H_
