// Reads of files that are under way while the caller goes on; `_read_queue.py` calls it.
//
// A read that does not end as expected is reported as not done: the caller repeats it, one by one,
// and says what is wrong.

#include <deque>
#include <mutex>
#include <vector>

namespace {

constexpr unsigned kDepth = 128;  // reads in flight; disks gain nothing from more
constexpr int kMaxTries = 3;      // of a read that the kernel asks to repeat

struct Request {
  int64_t offset;  // of the file
  int64_t address;
  int64_t num_bytes;
};

struct Batch;

struct Read {
  Batch* batch;
  Request rest;
  int number;  // of the request
  int tries;
};

struct Batch {
  int fd;
  int64_t alignment;
  int64_t num_left;
  std::vector<uint8_t> done;
};

class Queue {
 public:
  explicit Queue(std::unique_ptr<Ring> ring) : ring_(std::move(ring)), flights_(kDepth) {
    for (int i = kDepth - 1; i >= 0; --i) free_.push_back(i);
  }

  void start(Batch& batch, const Request* requests) {
    const auto count = static_cast<int>(batch.done.size());
    for (int i = 0; i < count; ++i) waiting_.push_back({&batch, requests[i], i, 0});
    send();
    enter(false);
  }

  void take_results() {
    uint64_t tag = 0;
    int result = 0;
    while (ring_->pop(tag, result)) {
      free_.push_back(static_cast<int>(tag));
      take_result(flights_[tag], result);
    }
    send();
  }

  // Return whether a read may have ended; not so after a signal.
  bool wait_for_one() { return enter(true); }

  std::mutex mutex;  // held while it is used

 private:
  void take_result(Read read, int result) {
    Batch& batch = *read.batch;
    if (result > 0) {
      read.rest.offset += result;
      read.rest.address += result;
      read.rest.num_bytes -= result;
    }
    const bool is_whole = read.rest.num_bytes == 0;
    const bool is_repeated = result == -EINTR || result == -EAGAIN;
    // Direct reads go on from multiples of the alignment only.
    const bool goes_on = result > 0 && !is_whole && read.rest.offset % batch.alignment == 0;
    if (goes_on || (is_repeated && ++read.tries < kMaxTries)) {
      waiting_.push_front(read);
      return;
    }
    batch.done[static_cast<size_t>(read.number)] = is_whole;
    --batch.num_left;
  }

  void send() {
    while (!waiting_.empty() && !free_.empty()) {
      const int place = free_.back();
      free_.pop_back();
      flights_[static_cast<size_t>(place)] = waiting_.front();
      waiting_.pop_front();
      const Read& read = flights_[static_cast<size_t>(place)];
      ring_->push(read.batch->fd, reinterpret_cast<char*>(read.rest.address), read.rest.num_bytes,
                  read.rest.offset, static_cast<uint64_t>(place));
    }
  }

  // Tell the kernel of new reads, and maybe wait for one. A kernel that refuses takes them later.
  bool enter(bool waits) {
    const int error = ring_->enter(waits ? 1 : 0);
    if (error != 0 && error != EINTR) usleep(100);
    return error == 0;
  }

  std::unique_ptr<Ring> ring_;
  std::vector<Read> flights_;  // by place, which is the tag of a read
  std::vector<int> free_;      // places
  std::deque<Read> waiting_;
};

}  // namespace

extern "C" {

// Return a queue, which lives as long as the process; null where the kernel allows none.
void* penstock_read_queue() {
  std::unique_ptr<Ring> ring = Ring::open(kDepth);
  return ring == nullptr ? nullptr : new Queue(std::move(ring));
}

// Start a batch of reads. The caller has the batch before the first read is under way: an exception
// of a signal's handler, right after the call, finds it there.
void penstock_reads_start(void* queue, int fd, const Request* requests, int64_t count,
                          int64_t alignment, void** batch) {
  auto* all = static_cast<Queue*>(queue);
  auto* reads = new Batch{fd, alignment, count, std::vector<uint8_t>(static_cast<size_t>(count))};
  *batch = reads;
  std::lock_guard<std::mutex> lock(all->mutex);
  all->start(*reads, requests);
}

// Return whether all reads of a batch have ended, after waiting for some of any batch if wanted.
int penstock_reads_have_ended(void* queue, const void* batch, int waits) {
  auto* all = static_cast<Queue*>(queue);
  const auto* reads = static_cast<const Batch*>(batch);
  std::lock_guard<std::mutex> lock(all->mutex);
  all->take_results();
  while (waits && reads->num_left > 0) {
    if (!all->wait_for_one()) break;
    all->take_results();
  }
  return reads->num_left == 0;
}

// Set which reads of a batch that has ended were whole, and forget it.
void penstock_reads_finish(void* batch, uint8_t* done) {
  auto* reads = static_cast<Batch*>(batch);
  std::copy(reads->done.begin(), reads->done.end(), done);
  delete reads;
}

}  // extern "C"
