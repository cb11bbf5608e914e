// Caches that evict the line that was used longest ago: one after the other, over one trace.
//
// All caches see every access. As a larger one holds whatever a smaller one holds, its misses are the
// same as if it saw the misses of the smaller one alone, up to the order of uses.

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace {

constexpr int32_t kNone = -1;

// Numbers of lines, in the order of their first use.
class LineNumbers {
 public:
  LineNumbers() : keys_(1 << 12, kEmpty), numbers_(1 << 12) {}

  int32_t find_or_add(int64_t line) {
    std::size_t at = place(line);
    if (keys_[at] != kEmpty) return numbers_[at];
    if (2 * (count_ + 1) > static_cast<int64_t>(keys_.size())) {
      grow();
      at = place(line);
    }
    keys_[at] = line;
    return numbers_[at] = static_cast<int32_t>(count_++);
  }
  int64_t count() const { return count_; }

 private:
  static constexpr int64_t kEmpty = INT64_MIN;

  std::size_t place(int64_t line) const {
    const std::size_t mask = keys_.size() - 1;
    std::size_t at = (static_cast<uint64_t>(line) * 0x9E3779B97F4A7C15ull >> 20) & mask;
    while (keys_[at] != kEmpty && keys_[at] != line) at = (at + 1) & mask;
    return at;
  }
  void grow() {
    const std::vector<int64_t> keys = std::move(keys_);
    const std::vector<int32_t> numbers = std::move(numbers_);
    keys_.assign(2 * keys.size(), kEmpty);
    numbers_.resize(2 * keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (keys[i] == kEmpty) continue;
      const std::size_t at = place(keys[i]);
      keys_[at] = keys[i];
      numbers_[at] = numbers[i];
    }
  }

  std::vector<int64_t> keys_;
  std::vector<int32_t> numbers_;
  int64_t count_ = 0;
};

// A list of the lines that are there, the one used last at its head.
class Cache {
 public:
  explicit Cache(int64_t capacity) : capacity_(capacity) {}

  int64_t loaded = 0, stored = 0;  // lines

  void use(int32_t line, bool is_store, bool is_loaded) {
    if (line >= static_cast<int32_t>(entries_.size())) entries_.resize(2 * line + 64);
    if (!entries_[line].is_there) {
      loaded += is_loaded;
      if (count_ == capacity_) evict();
      entries_[line].is_there = true;
      ++count_;
      push(line);
    } else if (line != head_) {
      unlink(line);
      push(line);
    }
    entries_[line].is_dirty |= is_store;
  }
  bool is_last_used(int32_t line) const { return line == head_; }
  void mark_dirty(int32_t line) { entries_[line].is_dirty = true; }
  void flush() {
    while (count_ > 0) evict();
  }

 private:
  struct Entry {
    int32_t before = kNone, after = kNone;
    bool is_there = false, is_dirty = false;
  };

  void push(int32_t line) {
    entries_[line].before = kNone;
    entries_[line].after = head_;
    if (head_ != kNone) entries_[head_].before = line;
    head_ = line;
    if (tail_ == kNone) tail_ = line;
  }
  void unlink(int32_t line) {
    const Entry& entry = entries_[line];
    (entry.before == kNone ? head_ : entries_[entry.before].after) = entry.after;
    (entry.after == kNone ? tail_ : entries_[entry.after].before) = entry.before;
  }
  void evict() {
    const int32_t line = tail_;
    unlink(line);
    stored += entries_[line].is_dirty;
    entries_[line] = Entry();
    --count_;
  }

  int64_t capacity_, count_ = 0;
  int32_t head_ = kNone, tail_ = kNone;
  std::vector<Entry> entries_;
};

}  // namespace

// Counts for each cache the lines that it loads and those that it writes back. Accesses are ranges of
// bytes; a store that misses loads its line if `allocates`. They begin with empty caches, and dirty
// lines at the end are written back; or, `is_warm`, with what the same accesses left there.
extern "C" void penstock_lru(const int64_t* begins, const int64_t* lengths, const uint8_t* stores,
                             int64_t num_accesses, int64_t line_bytes, int64_t allocates,
                             int64_t is_warm, const int64_t* capacities, int64_t num_caches, int64_t* loaded,
                             int64_t* stored) {
  LineNumbers numbers;
  std::vector<Cache> caches;
  for (int64_t i = 0; i < num_caches; ++i) caches.emplace_back(capacities[i]);
  const auto run = [&] {
    for (int64_t i = 0; i < num_accesses; ++i) {
      if (lengths[i] <= 0) continue;
      const int64_t last = (begins[i] + lengths[i] - 1) / line_bytes;
      for (int64_t at = begins[i] / line_bytes; at <= last; ++at) {
        const int32_t line = numbers.find_or_add(at);
        const bool is_repeated = num_caches > 0 && caches[0].is_last_used(line);
        for (Cache& cache : caches) {
          if (!is_repeated) {
            cache.use(line, stores[i], allocates || !stores[i]);
          } else if (stores[i]) {
            cache.mark_dirty(line);
          }
        }
      }
    }
  };
  run();
  for (int64_t i = 0; is_warm && i < num_caches; ++i) caches[i].loaded = caches[i].stored = 0;
  if (is_warm) run();
  for (int64_t i = 0; i < num_caches; ++i) {
    if (!is_warm) caches[i].flush();
    loaded[i] = caches[i].loaded;
    stored[i] = caches[i].stored;
  }
}
