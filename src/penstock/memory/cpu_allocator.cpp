// A CPU allocator for torch that keeps the memory the operating system sees close to what is live.
//
// Why: training that offloads frees and allocates blocks of 1 to 100s of MiB all the time. glibc
// either keeps what was freed (the peak does not fall) or unmaps it (every reuse pays page faults).
//
// How: all blocks lie in one reserved range of addresses. Two questions are answered apart:
//   - Where does a block go? A free list of *granules* (32 KiB), first fit by address, coalescing.
//     Low addresses are used again and again, whatever the sizes were, so one 64 MiB hole serves
//     four blocks of 16 MiB.
//   - What is resident? *Chunks* of 2 MiB, the size of a huge page. A chunk becomes resident when a
//     block first covers part of it. It is idle when no block does, and idle chunks are given back
//     (MADV_DONTNEED), the highest addresses first:
//       (a) as many as would otherwise make the resident bytes exceed their former peak, so that
//           keeping idle chunks saves page faults in each step but never raises the peak;
//       (b) those that no block has needed for a while, so that one large allocation in the past
//           does not count forever;
//       (c) all that exceed a limit, where the user sets one.
// Touching memory anew costs 0.5 ms per MiB with pages of 4 KiB and 0.12 ms with huge pages, but
// 2 ms in a virtual machine whose host has taken the free pages back, which some do within seconds.
// Everything below the minimum size goes to the allocator that was installed before.
//
// Units: a "granule" or "chunk" in a name is an index, "num_" a count; intervals are half-open.

#include <c10/core/CPUAllocator.h>

#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kGranuleBytes = size_t{32} << 10;
constexpr size_t kChunkBytes = size_t{2} << 20;
constexpr uint32_t kGranulesPerChunk = kChunkBytes / kGranuleBytes;
static_assert(kGranulesPerChunk == 64, "one bit of a 64-bit word for each granule of a chunk");

constexpr size_t kMinBlockBytes = size_t{256} << 10;
constexpr size_t kNoLimit = SIZE_MAX;
// Chunks that stay idle for this long are not part of a step's working set.
constexpr auto kIdleWindow = std::chrono::seconds(60);
// Pages become accessible in steps of this size, so that few calls of mprotect are needed.
constexpr size_t kCommitBytes = size_t{64} << 20;
constexpr size_t kMinReservedBytes = size_t{1} << 30;
constexpr size_t kMaxReservedBytes = size_t{1} << 44;
// Blocks whose size is whole chunks, up to 1/64, start on a chunk: then they share none.
constexpr size_t kAlignedWaste = 64;
// How many holes that are long enough, but hold no aligned block, are tried before a longer one.
constexpr int kMaxAlignedTries = 16;

constexpr size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

struct Statistics {  // the fields of `AllocatorStatistics`
  int64_t live_bytes, idle_bytes, mapped_bytes, peak_mapped_bytes, idle_limit_bytes;
  int64_t num_live, num_hits, num_misses, huge_pages;
};

// First line of a file of the kernel's, or "".
std::string read_line(const std::string& path) {
  std::string line;
  std::getline(std::ifstream(path), line);
  return line;
}

// Whether the kernel can back a chunk with one page. With base pages of 64 KiB a huge page has
// 512 MiB, and asking for those would make tiny blocks resident by the gigabyte.
bool chunks_are_huge_pages() {
  const std::string folder = "/sys/kernel/mm/transparent_hugepage/";
  return read_line(folder + "hpage_pmd_size") == std::to_string(kChunkBytes) &&
         read_line(folder + "enabled").find("[never]") == std::string::npos;
}

// A set of chunk indices that gives its highest member; the words lie in lazily touched memory.
class ChunkSet {
 public:
  void place(uint64_t* words) { words_ = words; }
  bool has(uint32_t chunk) const { return words_[chunk / 64] >> (chunk % 64) & 1; }
  uint32_t size() const { return num_chunks_; }
  void insert(uint32_t chunk) {
    words_[chunk / 64] |= uint64_t{1} << (chunk % 64);
    top_word_ = std::max(top_word_, chunk / 64);
    ++num_chunks_;
  }
  void erase(uint32_t chunk) {
    words_[chunk / 64] &= ~(uint64_t{1} << (chunk % 64));
    --num_chunks_;
  }
  uint32_t highest() {  // of a set that is not empty
    while (words_[top_word_] == 0) --top_word_;
    return top_word_ * 64 + 63 - std::countl_zero(words_[top_word_]);
  }

 private:
  uint64_t* words_ = nullptr;
  uint32_t top_word_ = 0;
  uint32_t num_chunks_ = 0;
};

// Free and used extents of granules. Every granule belongs to exactly one extent, whose length is
// written at its first and at its last granule, so that both neighbours are found in one step.
class Extents {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  static size_t metadata_bytes(uint32_t num_chunks) {
    const size_t num_leaves = std::bit_ceil(num_chunks);
    return size_t{num_chunks} * sizeof(uint64_t) + 2 * num_leaves * sizeof(uint32_t) +
           size_t{num_chunks} * kGranulesPerChunk * sizeof(uint32_t);
  }

  void place(void* metadata, uint32_t num_chunks) {
    num_chunks_ = num_chunks;
    num_leaves_ = std::bit_ceil(num_chunks);
    free_starts_ = static_cast<uint64_t*>(metadata);
    longest_ = reinterpret_cast<uint32_t*>(free_starts_ + num_chunks);
    lengths_ = longest_ + 2 * num_leaves_;
    add_free(0, num_chunks * kGranulesPerChunk);
  }

  // Take the lowest place for `length` granules; kNone if there is none.
  uint32_t take(uint32_t length, bool aligned) {
    uint32_t needed = length;
    int num_tries = 0;
    for (uint32_t chunk = next_chunk(0, needed); chunk != kNone;
         chunk = next_chunk(chunk + 1, needed)) {
      for (uint64_t starts = free_starts_[chunk]; starts != 0; starts &= starts - 1) {
        const uint32_t first = chunk * kGranulesPerChunk + std::countr_zero(starts);
        const uint32_t at =
            aligned ? (first + kGranulesPerChunk - 1) / kGranulesPerChunk * kGranulesPerChunk
                    : first;
        if (at + length <= first + lengths_[first]) {
          carve(first, at, length);
          return at;
        }
      }
      // A hole of this length holds an aligned block wherever it starts.
      if (++num_tries == kMaxAlignedTries) needed = length + kGranulesPerChunk - 1;
    }
    return kNone;
  }

  // Give back the used extent that starts at `first`; returns its length.
  uint32_t give_back(uint32_t first) {
    if (is_free(first)) std::abort();  // freed twice; free() would abort as well
    const uint32_t length = lengths_[first];
    uint32_t start = first, end = first + length;
    if (end < num_chunks_ * kGranulesPerChunk && is_free(end)) {
      const uint32_t next = end;
      end += lengths_[next];
      remove_free(next);
    }
    if (start > 0 && is_free(start - lengths_[start - 1])) {
      start -= lengths_[start - 1];
      remove_free(start);
    }
    add_free(start, end - start);
    return length;
  }

 private:
  bool is_free(uint32_t first) const {
    return free_starts_[first / kGranulesPerChunk] >> (first % kGranulesPerChunk) & 1;
  }

  void set_length(uint32_t first, uint32_t length) {
    lengths_[first] = lengths_[first + length - 1] = length;
  }

  void carve(uint32_t hole, uint32_t at, uint32_t length) {
    const uint32_t hole_end = hole + lengths_[hole], end = at + length;
    remove_free(hole);
    if (hole < at) add_free(hole, at - hole);
    set_length(at, length);
    if (end < hole_end) add_free(end, hole_end - end);
  }

  void add_free(uint32_t first, uint32_t length) {
    set_length(first, length);
    free_starts_[first / kGranulesPerChunk] |= uint64_t{1} << (first % kGranulesPerChunk);
    update(first / kGranulesPerChunk);
  }

  void remove_free(uint32_t first) {
    free_starts_[first / kGranulesPerChunk] &= ~(uint64_t{1} << (first % kGranulesPerChunk));
    update(first / kGranulesPerChunk);
  }

  // `longest_` is a tree of maxima: its leaves hold the longest free extent that starts in a chunk.
  void update(uint32_t chunk) {
    uint32_t longest = 0;
    for (uint64_t starts = free_starts_[chunk]; starts != 0; starts &= starts - 1)
      longest = std::max(longest, lengths_[chunk * kGranulesPerChunk + std::countr_zero(starts)]);
    size_t node = num_leaves_ + chunk;
    longest_[node] = longest;
    for (node /= 2; node >= 1; node /= 2) {
      longest = std::max(longest_[2 * node], longest_[2 * node + 1]);
      if (longest_[node] == longest) break;
      longest_[node] = longest;
    }
  }

  // The first chunk, not below `from`, in which a free extent of `length` or more starts.
  uint32_t next_chunk(uint32_t from, uint32_t length) const {
    if (from >= num_chunks_) return kNone;
    size_t node = num_leaves_ + from;
    while (longest_[node] < length) {
      if ((node & (node + 1)) == 0) return kNone;  // all ones: nothing lies to the right
      while (node & 1) node /= 2;
      ++node;
    }
    while (node < num_leaves_) {
      node *= 2;
      if (longest_[node] < length) ++node;
    }
    return static_cast<uint32_t>(node - num_leaves_);
  }

  uint32_t num_chunks_ = 0;
  size_t num_leaves_ = 0;
  uint64_t* free_starts_ = nullptr;  // per chunk, a bit for each granule where a free extent starts
  uint32_t* longest_ = nullptr;
  uint32_t* lengths_ = nullptr;
};

// The reserved range of addresses, and which of its chunks are resident. One lock guards all.
class Arena {
 public:
  std::mutex& mutex() { return mutex_; }

  // Reserve addresses (no memory). False if the system allows fewer than a useful number.
  bool reserve() {
    if (base_ != nullptr) return true;
    size_t wanted = 4 * static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    wanted = std::clamp(std::bit_ceil(wanted), kMinReservedBytes, kMaxReservedBytes);
    rlimit limit{};
    // A limit on addresses counts reserved ones too: leave most of them to the rest of the process.
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
      wanted = std::min<size_t>(wanted, limit.rlim_cur / 4 / kChunkBytes * kChunkBytes);
    for (; wanted >= kMinReservedBytes; wanted = wanted / 2 / kChunkBytes * kChunkBytes)
      if (reserve_exactly(wanted)) return true;
    return false;
  }

  bool owns(const void* address) const {
    const char* byte = static_cast<const char*>(address);
    return byte >= base_ && byte < base_ + num_bytes_;
  }

  void* allocate(size_t num_bytes) {
    if (num_bytes > num_bytes_) return nullptr;
    const auto length = static_cast<uint32_t>(round_up(num_bytes, kGranuleBytes) / kGranuleBytes);
    const size_t waste = round_up(num_bytes, kChunkBytes) - num_bytes;
    std::lock_guard<std::mutex> guard(mutex_);
    const uint32_t first = extents_.take(length, waste <= num_bytes / kAlignedWaste);
    if (first == Extents::kNone) return nullptr;
    if (!commit(size_t{first + length} * kGranuleBytes)) {
      extents_.give_back(first);
      return nullptr;
    }
    occupy(first, first + length);
    ++num_live_;
    live_bytes_ += size_t{length} * kGranuleBytes;
    shrink_to_limit();
    drop_unneeded();
    return base_ + size_t{first} * kGranuleBytes;
  }

  void free(void* address) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto first =
        static_cast<uint32_t>((static_cast<char*>(address) - base_) / kGranuleBytes);
    const uint32_t length = extents_.give_back(first);
    vacate(first, first + length);
    --num_live_;
    live_bytes_ -= size_t{length} * kGranuleBytes;
    shrink_to_limit();
  }

  void set_idle_limit(size_t num_bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    idle_limit_bytes_ = num_bytes;
    shrink_to_limit();
  }

  void set_idle_window(Clock::duration window) {
    std::lock_guard<std::mutex> guard(mutex_);
    idle_window_ = window;
    window_end_ = Clock::now() + window;
    min_idle_ = idle_.size();
  }

  // Give all idle chunks back and forget the former peak.
  void trim() {
    std::lock_guard<std::mutex> guard(mutex_);
    drop_idle(idle_.size());
    peak_resident_ = num_resident_;
  }

  // Whether to keep anything idle at all: not for blocks that outlive the use of this allocator.
  void set_keeps_idle(bool keeps_idle) {
    std::lock_guard<std::mutex> guard(mutex_);
    keeps_idle_ = keeps_idle;
    shrink_to_limit();
  }

  Statistics statistics() {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto bytes = [](size_t num_chunks) { return int64_t(num_chunks * kChunkBytes); };
    const int64_t live_bytes(live_bytes_), mapped_bytes = bytes(num_resident_);
    return {live_bytes, mapped_bytes - live_bytes, mapped_bytes, bytes(peak_resident_),
            int64_t(std::min<size_t>(idle_limit_bytes_, INT64_MAX)), num_live_, num_hits_, num_misses_, huge_pages_};
  }

 private:
  bool reserve_exactly(size_t num_bytes) {
    const auto num_chunks = static_cast<uint32_t>(num_bytes / kChunkBytes);
    const size_t set_words = round_up(num_chunks, 64) / 64;
    const size_t metadata_bytes =
        Extents::metadata_bytes(num_chunks) + set_words * sizeof(uint64_t) + num_chunks;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* metadata = mmap(nullptr, metadata_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (metadata == MAP_FAILED) return false;
    // One chunk more than needed, so that the first can start on a multiple of its size.
    void* range = mmap(nullptr, num_bytes + kChunkBytes, PROT_NONE, flags, -1, 0);
    if (range == MAP_FAILED) {
      munmap(metadata, metadata_bytes);
      return false;
    }
    auto* words = static_cast<uint64_t*>(metadata);
    idle_.place(words);
    extents_.place(words + set_words, num_chunks);
    num_used_ = static_cast<uint8_t*>(metadata) + metadata_bytes - num_chunks;
    base_ = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(range), kChunkBytes));
    num_bytes_ = num_bytes;
    huge_pages_ = chunks_are_huge_pages() && madvise(base_, num_bytes, MADV_HUGEPAGE) == 0;
    return true;
  }

  // Make the bytes [0, end) of the range accessible.
  bool commit(size_t end) {
    if (end <= committed_bytes_) return true;
    for (const size_t unit : {kCommitBytes, kChunkBytes}) {
      const size_t wanted = std::min(round_up(end, unit), num_bytes_);
      if (mprotect(base_ + committed_bytes_, wanted - committed_bytes_, PROT_READ | PROT_WRITE) ==
          0) {
        committed_bytes_ = wanted;
        return true;
      }
    }
    return false;
  }

  template <typename Function>
  static void for_each_chunk(uint32_t first, uint32_t end, Function&& function) {
    for (uint32_t granule = first; granule < end;) {
      const uint32_t chunk = granule / kGranulesPerChunk;
      const uint32_t next = std::min(end, (chunk + 1) * kGranulesPerChunk);
      function(chunk, next - granule);
      granule = next;
    }
  }

  // A block covers the granules [first, end): their chunks become resident, if they are not yet.
  void occupy(uint32_t first, uint32_t end) {
    uint32_t num_new = 0;
    for_each_chunk(first, end, [&](uint32_t chunk, uint32_t num_granules) {
      if (idle_.has(chunk))
        idle_.erase(chunk);
      else if (num_used_[chunk] == 0)
        ++num_new;
      num_used_[chunk] = static_cast<uint8_t>(num_used_[chunk] + num_granules);
    });
    ++(num_new == 0 ? num_hits_ : num_misses_);
    num_resident_ += num_new;
    if (num_resident_ > peak_resident_) drop_idle(num_resident_ - peak_resident_);
    peak_resident_ = std::max(peak_resident_, num_resident_);
  }

  void vacate(uint32_t first, uint32_t end) {
    for_each_chunk(first, end, [&](uint32_t chunk, uint32_t num_granules) {
      num_used_[chunk] = static_cast<uint8_t>(num_used_[chunk] - num_granules);
      if (num_used_[chunk] == 0) idle_.insert(chunk);
    });
  }

  void shrink_to_limit() {
    const size_t limit_bytes = keeps_idle_ ? idle_limit_bytes_ : 0;
    const size_t unused_bytes = num_resident_ * kChunkBytes - live_bytes_;
    if (unused_bytes > limit_bytes)
      drop_idle(round_up(unused_bytes - limit_bytes, kChunkBytes) / kChunkBytes);
  }

  // The fewest chunks that were idle at any time of a window are what the window did not need.
  void drop_unneeded() {
    min_idle_ = std::min(min_idle_, idle_.size());
    const auto now = Clock::now();
    if (now < window_end_) return;
    drop_idle(min_idle_);
    min_idle_ = idle_.size();
    window_end_ = now + idle_window_;
  }

  // Give the memory of idle chunks back to the system, from the highest address downwards: first
  // fit returns to the low ones soonest.
  void drop_idle(size_t num_chunks) {
    num_chunks = std::min<size_t>(num_chunks, idle_.size());
    while (num_chunks > 0) {
      const uint32_t last = idle_.highest();
      uint32_t first = last;
      drop(last);
      while (--num_chunks > 0 && first > 0 && idle_.has(first - 1)) drop(--first);
      // This fails only for locked memory (mlockall), which stays resident whatever we do.
      madvise(base_ + size_t{first} * kChunkBytes, size_t{last - first + 1} * kChunkBytes,
              MADV_DONTNEED);
    }
  }

  void drop(uint32_t chunk) {
    idle_.erase(chunk);
    --num_resident_;
  }

  std::mutex mutex_;
  char* base_ = nullptr;
  size_t num_bytes_ = 0;
  size_t committed_bytes_ = 0;
  Extents extents_;
  ChunkSet idle_;  // resident are these and those that blocks cover
  uint8_t* num_used_ = nullptr;  // per chunk, the granules that blocks cover
  size_t num_resident_ = 0, peak_resident_ = 0;
  size_t live_bytes_ = 0;
  size_t idle_limit_bytes_ = kNoLimit;
  bool keeps_idle_ = false;
  Clock::duration idle_window_ = kIdleWindow;
  Clock::time_point window_end_ = Clock::now() + kIdleWindow;
  uint32_t min_idle_ = 0;
  int64_t num_live_ = 0, num_hits_ = 0, num_misses_ = 0;
  bool huge_pages_ = false;
};

// Never destroyed: tensors may outlive every static object of this library.
Arena& arena() {
  static Arena& instance = *new Arena;
  return instance;
}

// torch's interface. Blocks of the previous allocator are told from ours by their address, so that
// one deleter serves both, as `raw_deleter` must promise.
class ArenaAllocator final : public c10::Allocator {
 public:
  // Null, or why torch cannot use this allocator. Reserves the addresses, changes nothing else.
  const char* prepare() {
    c10::Allocator* current = c10::GetCPUAllocator();
    if (current == this) return nullptr;
    if (previous_ != nullptr && current != previous_)
      return "another library has replaced torch's CPU allocator in the meantime";
    if (current->raw_deleter() == nullptr)
      return "torch's CPU allocator was replaced by one without a raw interface";
    if (!arena().reserve()) return "the system does not let this process reserve addresses";
    if (previous_ == nullptr) pthread_atfork(&lock, &unlock, &unlock);
    previous_ = current;
    previous_deleter_ = current->raw_deleter();
    return nullptr;
  }

  // As `prepare`, and then every new CPU tensor comes from here.
  const char* install() {
    if (const char* reason = prepare()) return reason;
    arena().set_keeps_idle(true);
    installed_ = true;
    // The lowest priority that is accepted is the one in force: others can still replace us.
    for (int priority = 0; priority <= UINT8_MAX && c10::GetCPUAllocator() != this; ++priority) {
      priority_ = static_cast<uint8_t>(priority);
      c10::SetCPUAllocator(this, priority_);
    }
    return nullptr;
  }

  void uninstall() {
    installed_ = false;
    if (c10::GetCPUAllocator() == this) c10::SetCPUAllocator(previous_, priority_);
    arena().set_keeps_idle(false);
    arena().trim();
  }

  c10::DataPtr allocate(size_t num_bytes) override {
    void* data = nullptr;
    // Storages keep their allocator for resize_(), so calls come even when not installed.
    if (num_bytes >= kMinBlockBytes && installed_) {
      data = arena().allocate(num_bytes);
      if (data != nullptr)
        c10::profiledCPUMemoryReporter().New(data, num_bytes);
      else
        arena().trim();  // the memory may be there now; if not, the error is the usual one
    }
    if (data == nullptr) data = previous_->raw_allocate(num_bytes);
    return {data, data, &deallocate, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }

 private:
  static void deallocate(void* data) {
    if (!arena().owns(data)) {
      if (data != nullptr) previous_deleter_(data);
      return;
    }
    // Before the block is freed: another thread may get its address at once.
    c10::profiledCPUMemoryReporter().Delete(data);
    arena().free(data);
  }

  static void lock() { arena().mutex().lock(); }
  static void unlock() { arena().mutex().unlock(); }

  c10::Allocator* previous_ = nullptr;
  static inline c10::DeleterFnPtr previous_deleter_ = nullptr;
  std::atomic<bool> installed_ = false;
  uint8_t priority_ = 0;
};

ArenaAllocator& allocator() {
  static ArenaAllocator& instance = *new ArenaAllocator;
  return instance;
}

}  // namespace

extern "C" {

const char* penstock_allocator_prepare() { return allocator().prepare(); }
const char* penstock_allocator_install() { return allocator().install(); }
void penstock_allocator_uninstall() { allocator().uninstall(); }
void penstock_allocator_trim() { arena().trim(); }
void penstock_allocator_set_idle_limit(size_t num_bytes) { arena().set_idle_limit(num_bytes); }
void penstock_allocator_set_idle_window(double seconds) {
  using Seconds = std::chrono::duration<double>;
  arena().set_idle_window(std::chrono::duration_cast<Clock::duration>(Seconds(seconds)));
}
void penstock_allocator_statistics(Statistics* result) { *result = arena().statistics(); }

}  // extern "C"
