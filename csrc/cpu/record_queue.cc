#include "csrc/cpu/record_queue.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>

#include "csrc/cpu/wait.h"

namespace hybridkv::cpu {

RecordQueue::RecordQueue(std::unique_ptr<FileQueue> files, RecordQueueOptions options)
    : options_(options), files_(std::move(files)), flights_(files_->max_in_flight()) {
  for (std::size_t slot = flights_.size(); slot-- > 0;) free_slots_.push_back(slot);
  thread_ = std::thread([this] { run(); });
}

RecordQueue::~RecordQueue() {
  close(kForeverS);
  thread_.join();
}

bool RecordQueue::submit(RecordRequest record) {
  bool must_wake = false;
  {
    const std::lock_guard lock(mutex_);
    if (is_closing_) return false;
    (record.is_store ? stores_ : loads_).push_back(std::move(record));
    ++num_open_;
    must_wake = can_be_woken_;
    can_be_woken_ = false;
  }
  submitted_.notify_one();
  if (must_wake) files_->wake();
  return true;
}

std::vector<RecordCompletion> RecordQueue::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(completions_, {});
}

bool RecordQueue::wait_until_idle(double timeout_s) {
  std::unique_lock lock(mutex_);
  return ended_.wait_for(lock, wait_of(timeout_s), [this] { return num_open_ == 0; });
}

bool RecordQueue::close(double timeout_s) {
  std::unique_lock lock(mutex_);
  is_closing_ = true;
  // Keeps `alone_`: those records were started before, and some of their bytes may be in the file.
  for (std::deque<RecordRequest>* waiting : {&loads_, &stores_}) {
    cancel({std::make_move_iterator(waiting->begin()), std::make_move_iterator(waiting->end())});
    waiting->clear();
  }
  if (prepared_ != nullptr) cancel(std::exchange(prepared_, nullptr)->records());
  submitted_.notify_one();
  return ended_.wait_for(lock, wait_of(timeout_s), [this] { return has_ended_; });
}

std::int64_t RecordQueue::num_transfers() const {
  const std::lock_guard lock(mutex_);
  return num_transfers_;
}

void RecordQueue::run() {
  while (true) {
    start_waiting();
    if (files_->num_in_flight() == 0) {
      if (!wait_for_records()) return;
      continue;
    }
    prepare_store();
    const std::vector<FileCompletion> reaped = files_->reap(1, flights_.size(), kForeverS);
    std::vector<Flight> ended;
    for (const FileCompletion& completion : reaped) {
      const auto slot = static_cast<std::size_t>(completion.tag);
      ended.push_back(std::move(flights_[slot]));
      free_slots_.push_back(slot);
    }
    // First start requests for the device, then do the work of this thread.
    start_waiting();
    for (std::size_t number = 0; number < ended.size(); ++number) end(std::move(ended[number]), reaped[number]);
  }
}

void RecordQueue::start_waiting() {
  while (!free_slots_.empty()) {
    if (start_sync()) continue;
    std::unique_ptr<RecordBatch> batch = next_batch();
    if (batch == nullptr) return;
    if (!batch->is_ready()) {
      fail(*batch, ENOMEM);
      continue;
    }
    const auto failed = failed_syncs_.find(batch->front().fd);
    const std::uint64_t num_failed_syncs = failed == failed_syncs_.end() ? 0 : failed->second.count;
    Flight flight{{}, false};
    flight.batches.push_back({std::move(batch), num_failed_syncs});
    start(std::move(flight));
  }
}

// Starts a sync of the first waiting descriptor without one in flight, for all that was written to it. False if there
// is none.
bool RecordQueue::start_sync() {
  const auto is_free = [this](const Begun& begun) { return syncing_.count(begun.batch->front().fd) == 0; };
  const auto first = std::find_if(unsynced_.begin(), unsynced_.end(), is_free);
  if (first == unsynced_.end()) return false;
  const int fd = first->batch->front().fd;
  Flight flight{{}, true};
  std::deque<Begun> others;
  for (Begun& begun : unsynced_) {
    if (begun.batch->front().fd == fd) {
      flight.batches.push_back(std::move(begun));
    } else {
      others.push_back(std::move(begun));
    }
  }
  unsynced_ = std::move(others);
  syncing_.insert(fd);
  start(std::move(flight));
  return true;
}

void RecordQueue::start(Flight flight) {
  const std::size_t slot = free_slots_.back();
  free_slots_.pop_back();
  FileRequest request = flight.batches.front().batch->request(static_cast<std::int64_t>(slot));
  if (flight.is_syncing) {
    request.operation = FileOperation::kSyncData;
    request.extents.clear();
  }
  flights_[slot] = std::move(flight);
  files_->submit(std::move(request));
}

void RecordQueue::end(Flight flight, const FileCompletion& completion) {
  if (flight.is_syncing) return end_sync(std::move(flight.batches), completion.error);
  RecordBatch& batch = *flight.batches.front().batch;
  if (completion.error != 0) {
    give_up(batch, completion.error);
  } else if (batch.front().is_store && batch.front().syncs) {
    unsynced_.push_back(std::move(flight.batches.front()));
  } else {
    complete(batch.finish());
  }
}

void RecordQueue::end_sync(std::vector<Begun> batches, int error) {
  const int fd = batches.front().batch->front().fd;
  syncing_.erase(fd);
  if (error != 0) failed_syncs_[fd] = {failed_syncs_[fd].count + 1, error};
  const auto found = failed_syncs_.find(fd);
  const FailedSyncs failed = found == failed_syncs_.end() ? FailedSyncs{} : found->second;
  for (Begun& begun : batches) {
    if (begun.num_failed_syncs == failed.count) {
      complete(begun.batch->finish());
    } else {
      give_up(*begun.batch, failed.error);
    }
  }
}

// Tries the records of a batch again one by one: one bad sector must not fail the others.
void RecordQueue::give_up(RecordBatch& batch, int error) {
  if (batch.size() == 1) return fail(batch, error);
  const std::lock_guard lock(mutex_);
  for (RecordRequest& record : batch.take_records()) alone_.push_back(std::move(record));
}

void RecordQueue::fail(const RecordBatch& batch, int error) {
  std::vector<RecordCompletion> completions;
  for (const RecordRequest& record : batch.records()) {
    completions.push_back({record.tag, RecordOutcome::kFailed, error, {}, {}});
  }
  complete(std::move(completions));
}

void RecordQueue::complete(std::vector<RecordCompletion> completions) {
  const std::lock_guard lock(mutex_);
  num_open_ -= completions.size();
  for (RecordCompletion& completion : completions) completions_.push_back(std::move(completion));
  if (num_open_ == 0) ended_.notify_all();
}

// Batch of the first waiting record and those adjacent to it. Null if none waits; `submit` then wakes the thread.
std::unique_ptr<RecordBatch> RecordQueue::next_batch() {
  std::vector<RecordRequest> records;
  {
    const std::lock_guard lock(mutex_);
    can_be_woken_ = !has_waiting();
    if (can_be_woken_) return nullptr;
    ++num_transfers_;
    if (!alone_.empty()) {
      records.push_back(std::move(alone_.front()));
      alone_.pop_front();
    } else {
      const bool has_stores = prepared_ != nullptr || !stores_.empty();
      const bool is_load = !loads_.empty() && (!has_stores || loads_in_a_row_ < kMaxLoadsBeforeAStore);
      loads_in_a_row_ = is_load ? loads_in_a_row_ + 1 : 0;
      if (!is_load && prepared_ != nullptr) return std::move(prepared_);
      records = take_neighbours(is_load ? loads_ : stores_);
    }
  }
  return std::make_unique<RecordBatch>(std::move(records), options_.digest_at);
}

// Computes the digests of the next stores while the device is busy.
void RecordQueue::prepare_store() {
  std::vector<RecordRequest> records;
  {
    const std::lock_guard lock(mutex_);
    if (prepared_ != nullptr || stores_.empty() || !loads_.empty()) return;
    records = take_neighbours(stores_);
  }
  auto batch = std::make_unique<RecordBatch>(std::move(records), options_.digest_at);
  const std::lock_guard lock(mutex_);
  if (is_closing_) {
    cancel(batch->records());
  } else {
    prepared_ = std::move(batch);
  }
}

std::vector<RecordRequest> RecordQueue::take_neighbours(std::deque<RecordRequest>& waiting) const {
  std::vector<RecordRequest> records;
  std::size_t num_bytes = 0;
  while (!waiting.empty() && num_bytes < options_.batch_bytes) {
    if (!records.empty() && !waiting.front().continues(records.back())) break;
    num_bytes += waiting.front().num_bytes();
    records.push_back(std::move(waiting.front()));
    waiting.pop_front();
  }
  return records;
}

void RecordQueue::cancel(const std::vector<RecordRequest>& records) {
  for (const RecordRequest& record : records) {
    completions_.push_back({record.tag, RecordOutcome::kCancelled, 0, {}, {}});
  }
  num_open_ -= records.size();
  if (num_open_ == 0) ended_.notify_all();
}

// False after `close`, when nothing is left to do.
bool RecordQueue::wait_for_records() {
  std::unique_lock lock(mutex_);
  submitted_.wait(lock, [this] { return is_closing_ || has_waiting(); });
  can_be_woken_ = false;
  if (has_waiting()) return true;
  has_ended_ = true;
  ended_.notify_all();
  return false;
}

}  // namespace hybridkv::cpu
