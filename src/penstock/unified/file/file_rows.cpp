// Rows of a table in a file, read with many reads in flight.
//
// One call reads one batch. It sorts the rows by their place in the file, joins those that lie
// close together into one read, keeps as many reads in flight as it has slots, and copies each row
// to all its places in the result as soon as its read has ended. The reads go through io_uring
// where the kernel allows it, and through a few threads elsewhere.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace {

constexpr int kMaxTries = 4;  // of a read that fails with EIO, EAGAIN or EINTR

// The first error, as reported to Python.
enum Status : int64_t { kDone = 0, kOutOfRange = 1, kReadFailed = 2, kTooShort = 3 };

struct Outcome {
  int64_t status;
  int64_t position;  // in the index (kOutOfRange), else the row whose bytes are missing
  int64_t offset = 0;  // in the file
  int64_t number = 0;  // errno
  int64_t num_reads = 0;
  int64_t bytes_read = 0;
  int64_t num_hits = 0;  // different rows that were in the cache
  int64_t num_misses = 0;
};

// Row r lies at offset + (r / per_block) * block_stride + (r % per_block) * row_bytes.
struct Layout {
  int64_t offset;
  int64_t num_rows;
  int64_t row_bytes;
  int64_t per_block;
  int64_t block_stride;

  int64_t at(int64_t row) const {
    return offset + row / per_block * block_stride + row % per_block * row_bytes;
  }
};

struct Request {
  int64_t row;
  int64_t position;
};

struct Read {
  int64_t offset;
  int64_t length;
  int64_t first;  // of the rows in it, in their sorted order
  int64_t last;
};

struct Batch {
  int fd;
  int64_t alignment;  // of offsets and lengths, if reads go past the page cache; else 1
  Layout layout;
  char* out;
  std::vector<Request> requests;
  std::vector<Read> reads;
};

// Copies the rows of a read that has ended to their places in the result.
void deliver(const Batch& batch, const Read& read, const char* bytes) {
  for (int64_t i = read.first; i < read.last; ++i) {
    const Request& request = batch.requests[static_cast<size_t>(i)];
    std::memcpy(batch.out + request.position * batch.layout.row_bytes,
                bytes + (batch.layout.at(request.row) - read.offset),
                static_cast<size_t>(batch.layout.row_bytes));
  }
}

// A read that is under way.
struct Flight {
  int64_t read = -1;
  int64_t got = 0;  // bytes so far
  int tries = 0;
};

enum Next { kAnotherCall, kWhole, kFailed };

// Takes the result of a call for some bytes of a read: their number, or minus errno.
Next advance(const Batch& batch, Flight& flight, int64_t result, Outcome& outcome) {
  const Read& read = batch.reads[static_cast<size_t>(flight.read)];
  if (result < 0) {
    const bool is_worth_it = result == -EINTR || result == -EAGAIN || result == -EIO;
    if (is_worth_it && ++flight.tries < kMaxTries) return kAnotherCall;
    const Request& first = batch.requests[static_cast<size_t>(read.first)];
    outcome = {kReadFailed, first.row, read.offset + flight.got, -result};
    return kFailed;
  }
  flight.got += result;
  // The last row has to be whole; the file may end behind it.
  const Request& last = batch.requests[static_cast<size_t>(read.last - 1)];
  const int64_t end = batch.layout.at(last.row) + batch.layout.row_bytes;
  if (read.offset + flight.got >= end) return kWhole;
  // Only at the end of the file do direct reads stop between two multiples of the alignment.
  if (result != 0 && flight.got % batch.alignment == 0) return kAnotherCall;
  outcome = {kTooShort, last.row, read.offset + flight.got, 0};
  return kFailed;
}

// Fills in the requests, in the order of the file. False, and a position, if an index is out of range.
template <class Index>
bool resolve(Batch& batch, const Index* index, int64_t num_indices, bool negative, int64_t& bad) {
  batch.requests.resize(static_cast<size_t>(num_indices));
  for (int64_t at = 0; at < num_indices; ++at) {
    int64_t row = index[at];
    if (negative && row < 0) row += batch.layout.num_rows;
    if (row < 0 || row >= batch.layout.num_rows) {
      bad = at;
      return false;
    }
    batch.requests[static_cast<size_t>(at)] = {row, at};
  }
  std::sort(batch.requests.begin(), batch.requests.end(),
            [](const Request& a, const Request& b) { return a.row < b.row; });
  return true;
}

// Joins rows into reads that end at multiples of `alignment`. A gap between two rows is read
// with them if it is at most `max_gap` bytes.
void join(Batch& batch, int64_t max_read_bytes, int64_t max_gap) {
  const int64_t alignment = batch.alignment;
  const int64_t count = static_cast<int64_t>(batch.requests.size());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = batch.layout.at(batch.requests[static_cast<size_t>(i)].row);
    const int64_t begin = at / alignment * alignment;
    const int64_t end =
        (at + batch.layout.row_bytes + alignment - 1) / alignment * alignment;
    if (!batch.reads.empty()) {
      Read& read = batch.reads.back();
      const int64_t length = std::max(end - read.offset, read.length);
      if (begin <= read.offset + read.length + max_gap && length <= max_read_bytes) {
        read.length = length;
        read.last = i + 1;
        continue;
      }
    }
    batch.reads.push_back({begin, end - begin, i, i + 1});
  }
}

// --------------------------------------------------------------------------------- memory

constexpr int64_t kPage = 4096;

struct FreeMemory {
  void operator()(char* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, FreeMemory>;

Memory aligned(int64_t num_bytes) {
  char* memory = static_cast<char*>(std::aligned_alloc(kPage, static_cast<size_t>(num_bytes)));
  if (memory == nullptr) throw std::bad_alloc();
  return Memory(memory);
}

// Rows that were read before, as many as the budget allows. A row that is read again is spared
// once by the hand of the clock (second chance), so that hot rows stay.
class Cache {
 public:
  Cache(int64_t capacity, int64_t row_bytes)
      : row_bytes_(row_bytes),
        row_of_(static_cast<size_t>(capacity), -1),
        spared_(static_cast<size_t>(capacity), 0) {
    size_t num_buckets = 16;
    while (num_buckets < 2 * row_of_.size()) num_buckets *= 2;
    buckets_.assign(num_buckets, -1);
    rows_ = aligned((capacity * row_bytes + kPage - 1) / kPage * kPage);
  }

  const char* find(int64_t row) {
    const int64_t slot = buckets_[bucket_of(row)];
    if (slot < 0) return nullptr;
    spared_[static_cast<size_t>(slot)] = 1;
    return rows_.get() + slot * row_bytes_;
  }

  // Keeps a row that is not here yet.
  void keep(int64_t row, const char* bytes) {
    while (spared_[hand_]) {
      spared_[hand_] = 0;
      hand_ = (hand_ + 1) % row_of_.size();
    }
    const size_t slot = hand_;
    hand_ = (hand_ + 1) % row_of_.size();
    if (row_of_[slot] >= 0) forget(row_of_[slot]);
    row_of_[slot] = row;
    buckets_[bucket_of(row)] = static_cast<int64_t>(slot);
    std::memcpy(rows_.get() + static_cast<int64_t>(slot) * row_bytes_, bytes,
                static_cast<size_t>(row_bytes_));
  }

  // Drops all rows.
  void clear() {
    std::fill(row_of_.begin(), row_of_.end(), -1);
    std::fill(spared_.begin(), spared_.end(), 0);
    std::fill(buckets_.begin(), buckets_.end(), -1);
  }

  // Replaces the bytes of a row that is here.
  void update(int64_t row, const char* bytes) {
    const int64_t slot = buckets_[bucket_of(row)];
    if (slot >= 0) {
      std::memcpy(rows_.get() + slot * row_bytes_, bytes, static_cast<size_t>(row_bytes_));
    }
  }

  // Held while the cache is used.
  std::mutex& turn() { return turn_; }

 private:
  size_t home_of(int64_t row) const {
    return static_cast<size_t>((static_cast<uint64_t>(row) * 0x9e3779b97f4a7c15u) >> 20) &
           (buckets_.size() - 1);
  }

  // Where the row is, or where it would be put.
  size_t bucket_of(int64_t row) const {
    size_t bucket = home_of(row);
    while (buckets_[bucket] >= 0 && row_of_[static_cast<size_t>(buckets_[bucket])] != row) {
      bucket = (bucket + 1) & (buckets_.size() - 1);
    }
    return bucket;
  }

  // Takes a row out and closes the gap in the chain of buckets behind it.
  void forget(int64_t row) {
    const size_t mask = buckets_.size() - 1;
    size_t hole = bucket_of(row);
    for (size_t next = (hole + 1) & mask; buckets_[next] >= 0; next = (next + 1) & mask) {
      const size_t home = home_of(row_of_[static_cast<size_t>(buckets_[next])]);
      if (((next - home) & mask) >= ((next - hole) & mask)) {
        buckets_[hole] = buckets_[next];
        hole = next;
      }
    }
    buckets_[hole] = -1;
  }

  std::mutex turn_;
  int64_t row_bytes_;
  Memory rows_;
  std::vector<int64_t> row_of_;   // by slot; -1: empty
  std::vector<uint8_t> spared_;   // by slot
  std::vector<int64_t> buckets_;  // slots by hash of the row, with linear probing
  size_t hand_ = 0;
};

// ------------------------------------------------------------------------------- threads

constexpr int kMaxThreads = 16;     // of a process, whatever the number of its tables
constexpr int kMaxEngines = 4;      // of a process: as many batches are under way at once
constexpr int kDepth = 128;         // reads in flight of an engine; disks gain nothing from more
constexpr int kMinDepth = 4;        // of an engine whose reads are long
constexpr int64_t kEngineBytes = 64 << 20;  // for its reads, if it has more than the fewest

// Threads that read where there is no io_uring. One batch at a time has all of them.
class Threads {
 public:
  // Calls `work` with the number of each thread, in that thread, and waits for all.
  void run(const std::function<void(int)>& work) {
    std::lock_guard<std::mutex> turn(turn_);
    std::unique_lock<std::mutex> lock(mutex_);
    start();
    work_ = &work;
    num_working_ = static_cast<int>(threads_.size());
    ++generation_;
    changed_.notify_all();
    ended_.wait(lock, [&] { return num_working_ == 0; });
    work_ = nullptr;
  }

 private:
  // Fewer threads than there should be will do; none is an error.
  void start() {
    while (static_cast<int>(threads_.size()) < kMaxThreads) {
      const int number = static_cast<int>(threads_.size());
      try {
        threads_.emplace_back([this, number] { serve(number); });
      } catch (...) {
        if (threads_.empty()) throw;
        return;
      }
    }
  }

  void serve(int number) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return work_ != nullptr && generation_ != seen; });
      seen = generation_;
      const std::function<void(int)>& work = *work_;
      lock.unlock();
      work(number);
      lock.lock();
      if (--num_working_ == 0) ended_.notify_one();
    }
  }

  std::mutex turn_;
  std::mutex mutex_;  // of all that follows
  std::condition_variable changed_;
  std::condition_variable ended_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  uint64_t generation_ = 0;
  int num_working_ = 0;
};

// -------------------------------------------------------------------------------- engine

// Memory for the reads of one batch at a time, and a ring where the kernel allows one.
class Engine {
 public:
  Engine(bool allow_ring, Threads& threads) : threads_(threads) {
    if (allow_ring) ring_ = Ring::open(kDepth);
  }

  bool has_ring() const { return ring_ != nullptr; }

  Outcome run(const Batch& batch, int64_t max_read_bytes) {
    const int64_t slot_bytes = (max_read_bytes + kPage - 1) / kPage * kPage;
    if (slot_bytes > slot_bytes_) make_slots(slot_bytes);
    return ring_ != nullptr ? run_ring(batch) : run_threads(batch);
  }

 private:
  void make_slots(int64_t slot_bytes) {
    const int depth = static_cast<int>(
        std::clamp<int64_t>(kEngineBytes / slot_bytes, kMinDepth, kDepth));
    slots_.reset();
    slot_bytes_ = 0;
    slots_ = aligned(slot_bytes * depth);
    slot_bytes_ = slot_bytes;
    depth_ = depth;
  }

  char* slot(int number) const { return slots_.get() + number * slot_bytes_; }

  Outcome run_threads(const Batch& batch) {
    const int64_t num_reads = static_cast<int64_t>(batch.reads.size());
    std::atomic<int64_t> next{0};
    std::mutex mutex;  // of the outcome
    Outcome outcome{};
    threads_.run([&](int number) {
      if (number >= depth_) return;
      char* memory = slot(number);
      for (Flight flight{next++}; flight.read < num_reads; flight = Flight{next++}) {
        const Read& read = batch.reads[static_cast<size_t>(flight.read)];
        Outcome failure{};
        Next then = kAnotherCall;
        while (then == kAnotherCall) {
          const ssize_t result =
              pread(batch.fd, memory + flight.got, static_cast<size_t>(read.length - flight.got),
                    read.offset + flight.got);
          then = advance(batch, flight, result < 0 ? -errno : result, failure);
        }
        if (then == kWhole) {
          deliver(batch, read, memory);
        } else {
          next.store(num_reads);
          std::lock_guard<std::mutex> lock(mutex);
          if (outcome.status == kDone) outcome = failure;
        }
      }
    });
    return outcome;
  }

  Outcome run_ring(const Batch& batch) {
    std::vector<Flight> flights(static_cast<size_t>(depth_));
    const int64_t num_reads = static_cast<int64_t>(batch.reads.size());
    Outcome outcome{};
    int64_t next = 0;
    int in_flight = 0;
    const auto send = [&](int number) {
      const Flight& flight = flights[static_cast<size_t>(number)];
      const Read& read = batch.reads[static_cast<size_t>(flight.read)];
      ring_->push(batch.fd, slot(number) + flight.got, read.length - flight.got,
                  read.offset + flight.got, static_cast<uint64_t>(number));
      ++in_flight;
    };
    const auto start = [&](int number) {
      if (next == num_reads || outcome.status != kDone) return;
      flights[static_cast<size_t>(number)] = Flight{next++, 0, 0};
      send(number);
    };
    for (int number = 0; number < depth_; ++number) start(number);
    while (in_flight > 0) {  // after an error, too: the kernel still writes into the slots
      if (const int number = ring_->submit_and_wait()) {
        // The kernel may still write to this memory, so it is never used again.
        static_cast<void>(slots_.release());
        slots_ = aligned(slot_bytes_ * depth_);
        ring_.reset();
        return {kReadFailed, 0, 0, number};
      }
      uint64_t tag = 0;
      int result = 0;
      while (ring_->pop(tag, result)) {
        const int number = static_cast<int>(tag);
        Flight& flight = flights[static_cast<size_t>(number)];
        --in_flight;
        if (outcome.status != kDone) continue;
        switch (advance(batch, flight, result, outcome)) {
          case kAnotherCall: send(number); break;
          case kWhole:
            deliver(batch, batch.reads[static_cast<size_t>(flight.read)], slot(number));
            start(number);
            break;
          case kFailed: break;
        }
      }
    }
    return outcome;
  }

  Threads& threads_;
  std::unique_ptr<Ring> ring_;
  Memory slots_;
  int64_t slot_bytes_ = 0;
  int depth_ = 0;
};

// The engines of a process, for all its tables: a batch takes one that is free, or waits. They are
// never given back, because reads may be under way when the process ends.
class Engines {
 public:
  ~Engines() {
    for (Engine* engine : idle_) delete engine;
  }

  explicit Engines(bool allow_ring) : allow_ring_(allow_ring) {
    idle_.reserve(kMaxEngines);
    idle_.push_back(new Engine(allow_ring_, threads_));
    num_engines_ = 1;
    has_ring_ = idle_.back()->has_ring();
  }

  bool has_ring() const { return has_ring_; }

  Outcome run(const Batch& batch, int64_t max_read_bytes) {
    const auto put_back = [this](Engine* used) { give_back(used); };
    const std::unique_ptr<Engine, decltype(put_back)> engine(take(), put_back);
    return engine->run(batch, max_read_bytes);
  }

 private:
  Engine* take() {
    std::unique_lock<std::mutex> lock(mutex_);
    // Threads read for one batch at a time anyway.
    if (idle_.empty() && has_ring_ && num_engines_ < kMaxEngines) {
      Engine* engine = new Engine(allow_ring_, threads_);
      ++num_engines_;
      return engine;
    }
    changed_.wait(lock, [&] { return !idle_.empty(); });
    Engine* engine = idle_.back();
    idle_.pop_back();
    return engine;
  }

  void give_back(Engine* engine) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      idle_.push_back(engine);
    }
    changed_.notify_one();
  }

  const bool allow_ring_;
  bool has_ring_ = false;
  Threads threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Engine*> idle_;
  int num_engines_ = 0;
};

// Delivers what is in the cache and takes it off the list; returns how many different rows.
int64_t take_from_cache(Cache& cache, Batch& batch) {
  int64_t num_hits = 0;
  size_t kept = 0;
  for (size_t i = 0; i < batch.requests.size();) {
    const int64_t row = batch.requests[i].row;
    const char* bytes = cache.find(row);
    num_hits += bytes != nullptr;
    for (; i < batch.requests.size() && batch.requests[i].row == row; ++i) {
      if (bytes == nullptr) {
        batch.requests[kept++] = batch.requests[i];
      } else {
        std::memcpy(batch.out + batch.requests[i].position * batch.layout.row_bytes, bytes,
                    static_cast<size_t>(batch.layout.row_bytes));
      }
    }
  }
  batch.requests.resize(kept);
  return num_hits;
}

void keep(Cache& cache, const Batch& batch) {
  int64_t last = -1;
  for (const Request& request : batch.requests) {
    if (request.row == last) continue;
    last = request.row;
    cache.keep(last, batch.out + request.position * batch.layout.row_bytes);
  }
}

// Reads the requested rows. One batch at a time has the cache, if there is one.
Outcome read_batch(Engines& engines, Cache* cache, Batch& batch, int64_t max_read_bytes,
                   int64_t max_gap, int64_t& num_hits) {
  std::unique_lock<std::mutex> turn;
  if (cache != nullptr) {
    turn = std::unique_lock<std::mutex>(cache->turn());
    num_hits = take_from_cache(*cache, batch);
  }
  join(batch, max_read_bytes, max_gap);
  if (batch.reads.empty()) return {};
  const Outcome outcome = engines.run(batch, max_read_bytes);
  if (cache != nullptr && outcome.status == kDone) keep(*cache, batch);
  return outcome;
}

// Calls `work(first, next, offset, length)` for each run of rows that lie side by side; `rows` rise,
// none of them twice. Stops where it returns an error.
template <class Work>
void for_runs(const Layout& layout, const int64_t* rows, int64_t count, Work work) {
  for (int64_t i = 0; i < count;) {
    const int64_t at = layout.at(rows[i]);
    int64_t next = i + 1;
    while (next < count && layout.at(rows[next]) == at + (next - i) * layout.row_bytes) ++next;
    if (!work(i, at, (next - i) * layout.row_bytes)) return;
    i = next;
  }
}

// Calls `move(at, length, offset)` until all bytes of the rows are read or written, `at` being
// counted in the memory of the rows. A call that moves nothing is the error `none`.
template <class Move>
void move_places(const Layout& layout, const int64_t* rows, int64_t count, Outcome& outcome,
                 int none, Move move) {
  outcome = {};
  for_runs(layout, rows, count, [&](int64_t first, int64_t at, int64_t length) {
    for (int64_t done = 0; done < length;) {
      const ssize_t result = move(first * layout.row_bytes + done,
                                  static_cast<size_t>(length - done), at + done);
      if (result > 0) {
        done += result;
      } else if (result == 0 || errno != EINTR) {
        const int number = result == 0 ? none : errno;
        outcome = {number == ENODATA ? kTooShort : kReadFailed, rows[first], at + done, number};
        return false;
      }
    }
    return true;
  });
}

}  // namespace

extern "C" {

// The engines of a process; null if there is no memory.
void* penstock_row_engines(int32_t allow_ring) {
  try {
    return new Engines(allow_ring != 0);
  } catch (...) {
    return nullptr;
  }
}

// Only before their first use: afterwards they have threads.
void penstock_row_engines_free(void* engines) { delete static_cast<Engines*>(engines); }

int32_t penstock_row_engines_have_ring(void* engines) {
  return static_cast<Engines*>(engines)->has_ring();
}

// A cache of `capacity` rows; null if there is no memory.
void* penstock_row_cache(int64_t capacity, int64_t row_bytes) {
  try {
    return new Cache(capacity, row_bytes);
  } catch (...) {
    return nullptr;
  }
}

void penstock_row_cache_free(void* cache) { delete static_cast<Cache*>(cache); }

void penstock_row_cache_clear(void* cache) {
  Cache& rows = *static_cast<Cache*>(cache);
  std::lock_guard<std::mutex> turn(rows.turn());
  rows.clear();
}

// Updates rows in the cache that have changed.
void penstock_row_cache_update(void* cache, const int64_t* rows, int64_t count, const char* source,
                               int64_t row_bytes) {
  Cache& kept = *static_cast<Cache*>(cache);
  std::lock_guard<std::mutex> turn(kept.turn());
  for (int64_t i = 0; i < count; ++i) kept.update(rows[i], source + i * row_bytes);
}

// Reads rows of the file: `out[i] = row index[i]`; `cache` may be null. Every row is smaller than
// `max_read_bytes` less twice the alignment.
void penstock_read_rows(void* engines, void* cache, int32_t fd, const Layout* layout,
                        const void* index, int32_t index_bytes, int64_t num_indices,
                        int32_t negative, char* out, int64_t alignment, int64_t max_read_bytes,
                        int64_t max_gap, Outcome* outcome) {
  int64_t num_hits = 0;
  Batch batch{fd, alignment, *layout, out, {}, {}};
  try {
    int64_t bad = -1;
    const bool good =
        index_bytes == 4
            ? resolve(batch, static_cast<const int32_t*>(index), num_indices, negative != 0, bad)
            : resolve(batch, static_cast<const int64_t*>(index), num_indices, negative != 0, bad);
    if (good) {
      *outcome = read_batch(*static_cast<Engines*>(engines), static_cast<Cache*>(cache), batch,
                            max_read_bytes, max_gap, num_hits);
    } else {
      *outcome = {kOutOfRange, bad};
    }
  } catch (const std::bad_alloc&) {
    *outcome = {kReadFailed, 0, 0, ENOMEM};
  } catch (...) {
    *outcome = {kReadFailed, 0, 0, EAGAIN};  // a thread could not be started
  }
  outcome->num_reads = static_cast<int64_t>(batch.reads.size());
  for (const Read& read : batch.reads) outcome->bytes_read += read.length;
  outcome->num_hits = num_hits;
  for (size_t i = 0; i < batch.requests.size(); ++i) {
    outcome->num_misses += i == 0 || batch.requests[i].row != batch.requests[i - 1].row;
  }
}

// Writes row `source[i]` to place `rows[i]` of the file; `rows` rise, none of them twice. Neighbours
// are written together. kReadFailed stands for a failed write.
void penstock_write_places(int32_t fd, const Layout* layout, const int64_t* rows, int64_t count,
                           const char* source, Outcome* outcome) {
  move_places(*layout, rows, count, *outcome, ENOSPC, [&](int64_t at, size_t length, int64_t offset) {
    return pwrite(fd, source + at, length, offset);
  });
}

// Reads place `rows[i]` of the file into row `to[i]`, through the page cache, where a write of the
// same rows will need the pages; otherwise as `penstock_write_places`.
void penstock_read_places(int32_t fd, const Layout* layout, const int64_t* rows, int64_t count,
                          char* to, Outcome* outcome) {
  for_runs(*layout, rows, count, [&](int64_t, int64_t at, int64_t length) {
    posix_fadvise(fd, at, length, POSIX_FADV_WILLNEED);  // many at once
    return true;
  });
  move_places(*layout, rows, count, *outcome, ENODATA, [&](int64_t at, size_t length, int64_t offset) {
    return pread(fd, to + at, length, offset);
  });
}

}  // extern "C"
