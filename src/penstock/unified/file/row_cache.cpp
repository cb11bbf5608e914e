// Rows of a table in a file that are kept in memory.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace {

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

}  // namespace
