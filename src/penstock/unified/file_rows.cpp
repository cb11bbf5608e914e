// Rows of a table in a file, gathered with many reads in flight.
//
// One call gathers one batch. It sorts the rows by their place in the file, joins those that lie
// close together into one read, keeps as many reads in flight as it has slots, and copies each row
// to every place that asked for it as soon as its read has ended. The reads go through io_uring
// where the kernel allows it, and through a thread per slot elsewhere.

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kPage = 4096;
constexpr int kMaxTries = 4;  // of a read that fails with EIO, EAGAIN or EINTR

// What went wrong first, as Python is told.
enum Status : int64_t { kDone = 0, kOutOfRange = 1, kReadFailed = 2, kTooShort = 3 };

struct Outcome {
  int64_t status;
  int64_t position;  // in the index (kOutOfRange), else the row whose bytes are missing
  int64_t offset;    // in the file
  int64_t number;    // errno
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

struct Wanted {
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
  std::vector<Wanted> wanted;
  std::vector<Read> reads;
};

struct FreeMemory {
  void operator()(char* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, FreeMemory>;

Memory aligned(int64_t num_bytes) {
  char* memory = static_cast<char*>(std::aligned_alloc(kPage, static_cast<size_t>(num_bytes)));
  if (memory == nullptr) throw std::bad_alloc();
  return Memory(memory);
}

// Copies the rows of a read that has ended to wherever they belong.
void deliver(const Batch& batch, const Read& read, const char* bytes) {
  for (int64_t i = read.first; i < read.last; ++i) {
    const Wanted& wanted = batch.wanted[static_cast<size_t>(i)];
    std::memcpy(batch.out + wanted.position * batch.layout.row_bytes,
                bytes + (batch.layout.at(wanted.row) - read.offset),
                static_cast<size_t>(batch.layout.row_bytes));
  }
}

// The bytes that a read must bring for its last row to be whole; the file may end behind it.
int64_t needed(const Batch& batch, const Read& read) {
  const Wanted& last = batch.wanted[static_cast<size_t>(read.last - 1)];
  return batch.layout.at(last.row) + batch.layout.row_bytes - read.offset;
}

Outcome too_short(const Batch& batch, const Read& read, int64_t got) {
  const Wanted& last = batch.wanted[static_cast<size_t>(read.last - 1)];
  return {kTooShort, last.row, read.offset + got, 0};
}

Outcome failed(const Batch& batch, const Read& read, int64_t got, int number) {
  const Wanted& first = batch.wanted[static_cast<size_t>(read.first)];
  return {kReadFailed, first.row, read.offset + got, number};
}

// Whether nothing more is to come behind a read that brought less than it was asked for: the end of
// the file is the only place where direct reads stop between two multiples of the alignment.
bool at_end(const Batch& batch, int64_t result, int64_t got) {
  return result == 0 || got % batch.alignment != 0;
}

bool worth_another_try(int number) {
  return number == EINTR || number == EAGAIN || number == EIO;
}

// --------------------------------------------------------------------------------- cache

// Rows that were read before, as many as the budget allows. A row that is asked for again is spared
// when the hand of the clock comes by (second chance), so that what is popular stays.
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

  // Replaces the bytes of a row that is here.
  void update(int64_t row, const char* bytes) {
    const int64_t slot = buckets_[bucket_of(row)];
    if (slot >= 0) {
      std::memcpy(rows_.get() + slot * row_bytes_, bytes, static_cast<size_t>(row_bytes_));
    }
  }

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

  int64_t row_bytes_;
  Memory rows_;
  std::vector<int64_t> row_of_;   // by slot; -1: empty
  std::vector<uint8_t> spared_;   // by slot
  std::vector<int64_t> buckets_;  // slots by hash of the row, with linear probing
  size_t hand_ = 0;
};

// ------------------------------------------------------------------------------ io_uring

class Ring {
 public:
  static std::unique_ptr<Ring> open(unsigned depth) {
    auto ring = std::unique_ptr<Ring>(new Ring());
    return ring->set_up(depth) ? std::move(ring) : nullptr;
  }

  ~Ring() {
    if (entries_ != nullptr) munmap(entries_, entries_bytes_);
    if (rings_ != nullptr) munmap(rings_, rings_bytes_);
    if (fd_ >= 0) close(fd_);
  }

  // There is always room: no more than `depth` reads are in flight.
  void push(int fd, char* to, int64_t length, int64_t offset, uint64_t tag) {
    const unsigned tail = *sq_tail_;
    const unsigned slot = tail & sq_mask_;
    io_uring_sqe& entry = entries_[slot];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = IORING_OP_READ;
    entry.fd = fd;
    entry.addr = reinterpret_cast<uint64_t>(to);
    entry.len = static_cast<uint32_t>(length);
    entry.off = static_cast<uint64_t>(offset);
    entry.user_data = tag;
    sq_array_[slot] = slot;
    std::atomic_ref<unsigned>(*sq_tail_).store(tail + 1, std::memory_order_release);
    ++num_new_;
  }

  // Tells the kernel of new reads and waits for at least one to end. Returns 0 or errno.
  int submit_and_wait() {
    for (;;) {
      const long taken = syscall(SYS_io_uring_enter, fd_, num_new_, 1, IORING_ENTER_GETEVENTS,
                                 nullptr, 0);
      if (taken >= 0) {
        num_new_ -= static_cast<unsigned>(taken);
        return 0;
      }
      if (errno != EINTR && errno != EAGAIN && errno != EBUSY) return errno;
    }
  }

  // The next read that has ended, if there is one.
  bool pop(uint64_t& tag, int& result) {
    const unsigned head = *cq_head_;
    if (head == std::atomic_ref<unsigned>(*cq_tail_).load(std::memory_order_acquire)) return false;
    const io_uring_cqe& entry = completions_[head & cq_mask_];
    tag = entry.user_data;
    result = entry.res;
    std::atomic_ref<unsigned>(*cq_head_).store(head + 1, std::memory_order_release);
    return true;
  }

 private:
  Ring() = default;

  bool set_up(unsigned depth) {
    io_uring_params params{};
    fd_ = static_cast<int>(syscall(SYS_io_uring_setup, depth, &params));
    if (fd_ < 0 || !(params.features & IORING_FEAT_SINGLE_MMAP)) return false;
    rings_bytes_ =
        std::max(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                 params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    void* rings = mmap(nullptr, rings_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                       fd_, IORING_OFF_SQ_RING);
    if (rings == MAP_FAILED) return false;
    rings_ = static_cast<char*>(rings);
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    void* entries = mmap(nullptr, entries_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                         fd_, IORING_OFF_SQES);
    if (entries == MAP_FAILED) return false;
    entries_ = static_cast<io_uring_sqe*>(entries);
    const auto word = [&](unsigned offset) { return reinterpret_cast<unsigned*>(rings_ + offset); };
    sq_tail_ = word(params.sq_off.tail);
    sq_mask_ = *word(params.sq_off.ring_mask);
    sq_array_ = word(params.sq_off.array);
    cq_head_ = word(params.cq_off.head);
    cq_tail_ = word(params.cq_off.tail);
    cq_mask_ = *word(params.cq_off.ring_mask);
    completions_ = reinterpret_cast<io_uring_cqe*>(rings_ + params.cq_off.cqes);
    return true;
  }

  int fd_ = -1;
  char* rings_ = nullptr;
  size_t rings_bytes_ = 0;
  io_uring_sqe* entries_ = nullptr;
  size_t entries_bytes_ = 0;
  unsigned* sq_tail_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned* sq_array_ = nullptr;
  unsigned* cq_head_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  unsigned cq_mask_ = 0;
  io_uring_cqe* completions_ = nullptr;
  unsigned num_new_ = 0;
};

// Fills in `wanted`, in the order of the file. False, and a position, if an index is out of range.
template <class Index>
bool resolve(Batch& batch, const Index* index, int64_t num_indices, bool negative, int64_t& bad) {
  batch.wanted.resize(static_cast<size_t>(num_indices));
  for (int64_t at = 0; at < num_indices; ++at) {
    int64_t row = index[at];
    if (negative && row < 0) row += batch.layout.num_rows;
    if (row < 0 || row >= batch.layout.num_rows) {
      bad = at;
      return false;
    }
    batch.wanted[static_cast<size_t>(at)] = {row, at};
  }
  std::sort(batch.wanted.begin(), batch.wanted.end(),
            [](const Wanted& a, const Wanted& b) { return a.row < b.row; });
  return true;
}

// Joins rows into reads whose ends are multiples of `alignment`. A gap that is not wanted is read
// with its neighbours if it is at most `max_gap` bytes.
void join(Batch& batch, int64_t max_read_bytes, int64_t max_gap) {
  const int64_t alignment = batch.alignment;
  const int64_t count = static_cast<int64_t>(batch.wanted.size());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = batch.layout.at(batch.wanted[static_cast<size_t>(i)].row);
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

// -------------------------------------------------------------------------------- engine

class Engine {
 public:
  Engine(int depth, int64_t max_read_bytes, bool allow_ring)
      : depth_(depth),
        slot_bytes_((max_read_bytes + kPage - 1) / kPage * kPage),
        slots_(aligned(slot_bytes_ * depth)) {
    if (allow_ring) ring_ = Ring::open(static_cast<unsigned>(depth));
  }

  ~Engine() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  bool has_ring() const { return ring_ != nullptr; }

  void make_cache(int64_t capacity, int64_t row_bytes) {
    cache_ = std::make_unique<Cache>(capacity, row_bytes);
  }

  // Gathers what `wanted` asks for. One batch at a time has all slots and the cache.
  Outcome run(Batch& batch, int64_t max_read_bytes, int64_t max_gap, int64_t& num_hits) {
    std::lock_guard<std::mutex> turn(turn_);
    num_hits = cache_ == nullptr ? 0 : take_from_cache(batch);
    join(batch, max_read_bytes, max_gap);
    const Outcome outcome = ring_ != nullptr ? run_ring(batch) : run_threads(batch);
    if (cache_ != nullptr && outcome.status == kDone) keep(batch);
    return outcome;
  }

  void update_cache(const int64_t* rows, int64_t count, const char* source, int64_t row_bytes) {
    std::lock_guard<std::mutex> turn(turn_);
    if (cache_ == nullptr) return;
    for (int64_t i = 0; i < count; ++i) cache_->update(rows[i], source + i * row_bytes);
  }

 private:
  // Delivers what is in the cache and takes it off the list; returns how many different rows.
  int64_t take_from_cache(Batch& batch) {
    int64_t num_hits = 0;
    size_t kept = 0;
    for (size_t i = 0; i < batch.wanted.size();) {
      const int64_t row = batch.wanted[i].row;
      const char* bytes = cache_->find(row);
      num_hits += bytes != nullptr;
      for (; i < batch.wanted.size() && batch.wanted[i].row == row; ++i) {
        if (bytes == nullptr) {
          batch.wanted[kept++] = batch.wanted[i];
        } else {
          std::memcpy(batch.out + batch.wanted[i].position * batch.layout.row_bytes, bytes,
                      static_cast<size_t>(batch.layout.row_bytes));
        }
      }
    }
    batch.wanted.resize(kept);
    return num_hits;
  }

  void keep(const Batch& batch) {
    int64_t last = -1;
    for (const Wanted& wanted : batch.wanted) {
      if (wanted.row == last) continue;
      last = wanted.row;
      cache_->keep(last, batch.out + wanted.position * batch.layout.row_bytes);
    }
  }

  char* slot(int number) const { return slots_.get() + number * slot_bytes_; }

  Outcome run_ring(const Batch& batch) {
    struct Flight {
      int64_t read = -1;
      int64_t got = 0;
      int tries = 0;
    };
    std::vector<Flight> flights(static_cast<size_t>(depth_));
    const int64_t num_reads = static_cast<int64_t>(batch.reads.size());
    Outcome outcome{kDone, 0, 0, 0};
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
        // Nothing can be said of the reads in flight, so this memory is never used again.
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
        const Read& read = batch.reads[static_cast<size_t>(flight.read)];
        --in_flight;
        if (result < 0) {
          if (worth_another_try(-result) && ++flight.tries < kMaxTries) {
            send(number);
          } else if (outcome.status == kDone) {
            outcome = failed(batch, read, flight.got, -result);
          }
          continue;
        }
        flight.got += result;
        if (flight.got >= needed(batch, read)) {
          if (outcome.status == kDone) deliver(batch, read, slot(number));
          start(number);
        } else if (at_end(batch, result, flight.got)) {
          if (outcome.status == kDone) outcome = too_short(batch, read, flight.got);
        } else if (outcome.status == kDone) {
          send(number);
        }
      }
    }
    return outcome;
  }

  Outcome run_threads(const Batch& batch) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (static_cast<int>(threads_.size()) < depth_) {
      const int number = static_cast<int>(threads_.size());
      threads_.emplace_back([this, number] { work(number); });
    }
    outcome_ = {kDone, 0, 0, 0};
    next_.store(0);
    batch_ = &batch;
    num_working_ = depth_;
    ++generation_;
    changed_.notify_all();
    ended_.wait(lock, [&] { return num_working_ == 0; });
    batch_ = nullptr;
    return outcome_;
  }

  void work(int number) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || (batch_ != nullptr && generation_ != seen); });
      if (stopping_) return;
      seen = generation_;
      const Batch& batch = *batch_;
      lock.unlock();
      const Outcome outcome = work_on(batch, slot(number));
      lock.lock();
      if (outcome.status != kDone && outcome_.status == kDone) outcome_ = outcome;
      if (--num_working_ == 0) ended_.notify_one();
    }
  }

  Outcome work_on(const Batch& batch, char* memory) {
    const int64_t num_reads = static_cast<int64_t>(batch.reads.size());
    for (;;) {
      const int64_t number = next_.fetch_add(1);
      if (number >= num_reads) return {kDone, 0, 0, 0};
      const Read& read = batch.reads[static_cast<size_t>(number)];
      int64_t got = 0;
      int tries = 0;
      while (got < needed(batch, read)) {
        const ssize_t result = pread(batch.fd, memory + got, static_cast<size_t>(read.length - got),
                                     read.offset + got);
        if (result >= 0) {
          got += result;
          if (got < needed(batch, read) && at_end(batch, result, got)) {
            next_.store(num_reads);
            return too_short(batch, read, got);
          }
        } else if (!worth_another_try(errno) || ++tries == kMaxTries) {
          const int error = errno;
          next_.store(num_reads);
          return failed(batch, read, got, error);
        }
      }
      deliver(batch, read, memory);
    }
  }

  const int depth_;
  const int64_t slot_bytes_;
  Memory slots_;
  std::unique_ptr<Ring> ring_;
  std::unique_ptr<Cache> cache_;
  std::mutex turn_;
  // What follows is for the threads.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable ended_;
  std::vector<std::thread> threads_;
  const Batch* batch_ = nullptr;
  std::atomic<int64_t> next_{0};
  uint64_t generation_ = 0;
  int num_working_ = 0;
  bool stopping_ = false;
  Outcome outcome_{};
};

}  // namespace

extern "C" {

// An engine with `depth` reads in flight of at most `max_read_bytes`; null if there is no memory.
void* penstock_row_engine(int32_t depth, int64_t max_read_bytes, int32_t allow_ring) {
  try {
    return new Engine(depth, max_read_bytes, allow_ring != 0);
  } catch (...) {
    return nullptr;
  }
}

void penstock_row_engine_free(void* engine) { delete static_cast<Engine*>(engine); }

int32_t penstock_row_engine_has_ring(void* engine) {
  return static_cast<Engine*>(engine)->has_ring();
}

// Gives the engine a cache of `capacity` rows. Returns 0, or ENOMEM.
int32_t penstock_row_engine_cache(void* engine, int64_t capacity, int64_t row_bytes) {
  try {
    static_cast<Engine*>(engine)->make_cache(capacity, row_bytes);
    return 0;
  } catch (...) {
    return ENOMEM;
  }
}

// Tells the cache of rows that have changed.
void penstock_row_engine_update(void* engine, const int64_t* rows, int64_t count,
                                const char* source, int64_t row_bytes) {
  static_cast<Engine*>(engine)->update_cache(rows, count, source, row_bytes);
}

// `out[i] = row index[i]` of the file. Fills in `outcome` (see Outcome), then the number of reads
// and of bytes read, and how many different rows were in the cache and were not. Every row is smaller than `max_read_bytes` less twice the alignment.
void penstock_read_rows(void* engine, int32_t fd, int64_t offset, int64_t num_rows,
                        int64_t row_bytes, int64_t per_block, int64_t block_stride,
                        const void* index, int32_t index_bytes, int64_t num_indices,
                        int32_t negative, char* out, int64_t alignment,
                        int64_t max_read_bytes, int64_t max_gap, int64_t* outcome) {
  Outcome result{kDone, 0, 0, 0};
  int64_t num_hits = 0;
  Batch batch{fd, alignment, {offset, num_rows, row_bytes, per_block, block_stride}, out, {}, {}};
  try {
    int64_t bad = -1;
    const bool good =
        index_bytes == 4
            ? resolve(batch, static_cast<const int32_t*>(index), num_indices, negative != 0, bad)
            : resolve(batch, static_cast<const int64_t*>(index), num_indices, negative != 0, bad);
    if (good) {
      result = static_cast<Engine*>(engine)->run(batch, max_read_bytes, max_gap, num_hits);
    } else {
      result = {kOutOfRange, bad, 0, 0};
    }
  } catch (const std::bad_alloc&) {
    result = {kReadFailed, 0, 0, ENOMEM};
  } catch (...) {
    result = {kReadFailed, 0, 0, EAGAIN};  // a thread could not be started
  }
  outcome[0] = result.status;
  outcome[1] = result.position;
  outcome[2] = result.offset;
  outcome[3] = result.number;
  outcome[4] = static_cast<int64_t>(batch.reads.size());
  outcome[5] = 0;
  for (const Read& read : batch.reads) outcome[5] += read.length;
  outcome[6] = num_hits;
  outcome[7] = 0;
  for (size_t i = 0; i < batch.wanted.size(); ++i) {
    outcome[7] += i == 0 || batch.wanted[i].row != batch.wanted[i - 1].row;
  }
}

// Writes row `source[i]` to place `rows[i]` of the file; `rows` rise, none of them twice. Neighbours
// are written together. Fills in `outcome` as above: kReadFailed stands for a failed write.
void penstock_write_rows(int32_t fd, int64_t offset, int64_t num_rows, int64_t row_bytes,
                         int64_t per_block, int64_t block_stride, const int64_t* rows,
                         int64_t count, const char* source, int64_t* outcome) {
  const Layout layout{offset, num_rows, row_bytes, per_block, block_stride};
  outcome[0] = kDone;
  for (int64_t i = 0; i < count;) {
    const int64_t at = layout.at(rows[i]);
    int64_t next = i + 1;
    while (next < count && layout.at(rows[next]) == at + (next - i) * row_bytes) ++next;
    const int64_t length = (next - i) * row_bytes;
    for (int64_t done = 0; done < length;) {
      const ssize_t result = pwrite(fd, source + i * row_bytes + done,
                                    static_cast<size_t>(length - done), at + done);
      if (result > 0) {
        done += result;
      } else if (result == 0 || errno != EINTR) {
        outcome[0] = kReadFailed;
        outcome[1] = rows[i];
        outcome[2] = at + done;
        outcome[3] = result == 0 ? ENOSPC : errno;
        return;
      }
    }
    i = next;
  }
}

}  // extern "C"
