// Rows of a table in host memory: read, written and added to.
//
// All row indices are checked while they are used, never before in a pass of their own: the first
// position with an index out of range is returned, and no memory outside the table is touched.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kAheadBytes = 32768;  // how far prefetching runs ahead, by bytes of rows
constexpr int64_t kMaxAhead = 64;       // and by rows
constexpr int64_t kMaxPrefetch = 1024;  // of one row; the hardware follows what is longer
constexpr int64_t kBlockBytes = 98304;  // read together, then written together; see read_streaming
constexpr int64_t kTogether = 4;        // rows of a block that are fetched line by line in turns

// The first position that was out of range, over all threads.
class FirstBad {
 public:
  void note(int64_t position) {
    int64_t known = first_.load(std::memory_order_relaxed);
    while (position < known && !first_.compare_exchange_weak(known, position)) {
    }
  }
  int64_t position() const {
    const int64_t found = first_.load();
    return found == INT64_MAX ? -1 : found;
  }

 private:
  std::atomic<int64_t> first_{INT64_MAX};
};

struct Table {
  char* rows;
  int64_t num_rows;
  int64_t stride;  // bytes from one row to the next
  int64_t row_bytes;
};

// Negative indices count from the end. False if the row does not exist.
inline bool resolve(int64_t& row, int64_t num_rows, bool negative) {
  if (negative && row < 0) row += num_rows;
  return static_cast<uint64_t>(row) < static_cast<uint64_t>(num_rows);
}

// Into the second level: it waits for more lines at once than the first one. An address that is out
// of range only makes the prefetch do nothing.
inline void prefetch_line(uintptr_t address) {
  __builtin_prefetch(reinterpret_cast<const void*>(address), 0, 1);
}

inline uintptr_t address_of(const Table& table, int64_t row) {
  return reinterpret_cast<uintptr_t>(table.rows) +
         static_cast<uintptr_t>(row) * static_cast<uintptr_t>(table.stride);
}

inline void prefetch_row(const Table& table, int64_t row) {
  const uintptr_t start = address_of(table, row);
  const uintptr_t begin = start & static_cast<uintptr_t>(kLine - 1);  // in its line
  const uintptr_t end = begin + static_cast<uintptr_t>(std::min(table.row_bytes, kMaxPrefetch));
  // Counted, not compared: an index that is wrong, or counts from the end, may lead to addresses
  // that wrap around.
  for (uintptr_t at = 0; at < end; at += kLine) prefetch_line(start - begin + at);
}

// Fetches all lines of some rows. The rows take turns, so that the walks through the page tables
// for their first lines go on at once (measured: 1.05 to 1.2 times as fast as row after row).
// Always inline: a call that only prefetches is taken for one that does nothing, and left out.
template <class Index>
[[gnu::always_inline]] inline void prefetch_rows(const Table& table, const Index* index,
                                                 int64_t num_indices) {
  const uintptr_t last = static_cast<uintptr_t>(table.row_bytes) - 1;
  const bool on_lines = (address_of(table, 0) | static_cast<uintptr_t>(table.stride)) % kLine == 0;
  for (int64_t first = 0; first < num_indices; first += kTogether) {
    const int64_t count = std::min(kTogether, num_indices - first);
    uintptr_t starts[kTogether];
    for (int64_t i = 0; i < count; ++i) starts[i] = address_of(table, index[first + i]);
    for (uintptr_t at = 0; at <= last; at += kLine) {
      for (int64_t i = 0; i < count; ++i) prefetch_line(starts[i] + at);
    }
    if (on_lines) continue;
    for (int64_t i = 0; i < count; ++i) prefetch_line(starts[i] + last);
  }
}

template <int64_t kBytes>
struct FixedCopy {
  void operator()(char* to, const char* from, int64_t) const { std::memcpy(to, from, kBytes); }
};

#if defined(__AVX512F__)
// Whole vectors, the last one overlapping the one before it; at least 64 bytes.
struct VectorCopy {
  void operator()(char* to, const char* from, int64_t num_bytes) const {
    int64_t at = 0;
    for (; at + kLine <= num_bytes; at += kLine) {
      _mm512_storeu_si512(to + at, _mm512_loadu_si512(from + at));
    }
    if (at < num_bytes) {
      at = num_bytes - kLine;
      _mm512_storeu_si512(to + at, _mm512_loadu_si512(from + at));
    }
  }
};

// Copies past the caches: the lines of a large result would push out the table's. Whole lines only;
// a line that is written in two ways is written twice.
inline void stream(char* to, const char* from, int64_t num_bytes) {
  const int64_t head = std::min(-reinterpret_cast<intptr_t>(to) & (kLine - 1), num_bytes);
  std::memcpy(to, from, static_cast<size_t>(head));
  int64_t at = head;
  for (; at + kLine <= num_bytes; at += kLine) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
  }
  std::memcpy(to + at, from + at, static_cast<size_t>(num_bytes - at));
}
#endif

struct AnyCopy {
  void operator()(char* to, const char* from, int64_t num_bytes) const {
    std::memcpy(to, from, static_cast<size_t>(num_bytes));
  }
};

template <class Index, class Copy>
int64_t read_rows(const Table& table, const Index* index, int64_t num_indices, char* out,
               bool negative, int num_threads, Copy copy) {
  FirstBad bad;
  const int64_t ahead =
      std::clamp(kAheadBytes / std::max<int64_t>(table.row_bytes, 1), int64_t{2}, kMaxAhead);
  parallel(num_threads, [&](int thread, int count) {
    const int64_t begin = num_indices * thread / count;
    const int64_t end = num_indices * (thread + 1) / count;
    for (int64_t at = begin; at < std::min(begin + ahead, end); ++at) {
      prefetch_row(table, index[at]);
    }
    for (int64_t at = begin; at < end; ++at) {
      if (at + ahead < end) prefetch_row(table, index[at + ahead]);
      int64_t row = index[at];
      if (!resolve(row, table.num_rows, negative)) {
        bad.note(at);
        continue;
      }
      copy(out + at * table.row_bytes, table.rows + row * table.stride, table.row_bytes);
    }
  });
  return bad.position();
}

#if defined(__AVX512F__)
// For large results: rows of 96 KiB are fetched into the second level of the caches, then written.
// A core has 16 line buffers, in which a read waits some 130 ns and a streaming store some 50. When
// both take turns row by row the reads find the buffers full of stores, and are late; in blocks
// they have them to themselves (measured: 1.2 to 1.4 times as fast as prefetching some rows ahead).
// Rows that do not end where a line of the result ends are put side by side first, so that every
// line is written once and whole.
template <class Index>
int64_t read_streaming(const Table& table, const Index* index, int64_t num_indices, char* out,
                         bool negative, int num_threads) {
  FirstBad bad;
  const int64_t row_bytes = table.row_bytes;
  const int64_t block = std::max(kBlockBytes / row_bytes, int64_t{1});
  const bool on_lines = (reinterpret_cast<uintptr_t>(out) | static_cast<uintptr_t>(row_bytes)) %
                            static_cast<uintptr_t>(kLine) == 0;
  const bool side_by_side = !on_lines && row_bytes <= kBlockBytes / 2;
  parallel(num_threads, [&](int thread, int count) {
    alignas(kLine) char staged[kBlockBytes];
    const int64_t begin = num_indices * thread / count;
    const int64_t end = num_indices * (thread + 1) / count;
    for (int64_t first = begin; first < end; first += block) {
      const int64_t last = std::min(first + block, end);
      prefetch_rows(table, index + first, last - first);
      for (int64_t at = first; at < last; ++at) {
        int64_t row = index[at];
        if (!resolve(row, table.num_rows, negative)) {
          bad.note(at);
          row = 0;  // any row: the caller raises
          if (table.num_rows == 0) continue;
        }
        const char* from = table.rows + row * table.stride;
        if (side_by_side) {
          VectorCopy()(staged + (at - first) * row_bytes, from, row_bytes);
        } else {
          stream(out + at * row_bytes, from, row_bytes);
        }
      }
      if (side_by_side) stream(out + first * row_bytes, staged, (last - first) * row_bytes);
    }
    _mm_sfence();
  });
  return bad.position();
}
#endif

template <class Index>
int64_t read_rows(const Table& table, const Index* index, int64_t num_indices, char* out,
               bool negative, int num_threads, bool streaming) {
  const auto with = [&](auto copy) {
    return read_rows(table, index, num_indices, out, negative, num_threads, copy);
  };
  switch (table.row_bytes) {
    case 1: return with(FixedCopy<1>());
    case 2: return with(FixedCopy<2>());
    case 4: return with(FixedCopy<4>());
    case 8: return with(FixedCopy<8>());
    case 16: return with(FixedCopy<16>());
    case 32: return with(FixedCopy<32>());
    default: break;
  }
#if defined(__AVX512F__)
  if (streaming && table.row_bytes >= 2 * kLine) {
    return read_streaming(table, index, num_indices, out, negative, num_threads);
  }
  if (table.row_bytes >= kLine) return with(VectorCopy());
#else
  (void)streaming;
#endif
  return with(AnyCopy());
}

// What is written is divided among the threads by row, so that each row has one writer, which takes
// the positions in their order: duplicates give the same result for any number of threads.
inline int owner(int64_t row, int count) {
  return static_cast<int>((static_cast<uint64_t>(row) >> 3) % static_cast<uint64_t>(count));
}

template <class Index, class Write>
int64_t write(const Table& table, const Index* index, int64_t num_indices, bool negative,
              int num_threads, Write write_row) {
  for (int64_t at = 0; at < num_indices; ++at) {  // nothing is written if any index is wrong
    int64_t row = index[at];
    if (!resolve(row, table.num_rows, negative)) return at;
  }
  parallel(num_threads, [&](int thread, int count) {
    for (int64_t at = 0; at < num_indices; ++at) {
      int64_t row = index[at];
      resolve(row, table.num_rows, negative);
      if (owner(row, count) == thread) write_row(table.rows + row * table.stride, at);
    }
  });
  return -1;
}

template <class Value, class Index>
int64_t add(const Table& table, const Index* index, int64_t num_indices, const char* source,
            int64_t source_stride, double alpha, bool negative, int num_threads) {
  const Value factor = static_cast<Value>(alpha);
  const int64_t width = table.row_bytes / static_cast<int64_t>(sizeof(Value));
  return write(table, index, num_indices, negative, num_threads, [&](char* row, int64_t at) {
    Value* to = reinterpret_cast<Value*>(row);
    const Value* from = reinterpret_cast<const Value*>(source + at * source_stride);
    for (int64_t i = 0; i < width; ++i) to[i] = std::fma(from[i], factor, to[i]);
  });
}

// Calls `work` with a pointer to the indices in their own type.
template <class Work>
int64_t with_index(const void* index, int32_t index_bytes, Work work) {
  if (index_bytes == 4) return work(static_cast<const int32_t*>(index));
  return work(static_cast<const int64_t*>(index));
}

}  // namespace

extern "C" {

// Copies rows of the table to `out`, side by side. Returns -1, or the first position whose index is
// out of range; what `out` holds is then undefined.
int64_t penstock_read_rows(char* rows, int64_t num_rows, int64_t stride, int64_t row_bytes,
                             const void* index, int32_t index_bytes, int64_t num_indices,
                             int32_t negative, int32_t num_threads, char* out, int32_t streaming) {
  const Table table{rows, num_rows, stride, row_bytes};
  return with_index(index, index_bytes, [&](auto typed) {
    return read_rows(table, typed, num_indices, out, negative != 0, num_threads, streaming != 0);
  });
}

// Copies rows of `source` into the table; of several for one row, the last one stays.
int64_t penstock_write_rows(char* rows, int64_t num_rows, int64_t stride, int64_t row_bytes,
                          const void* index, int32_t index_bytes, int64_t num_indices,
                          int32_t negative, int32_t num_threads, const char* source,
                          int64_t source_stride) {
  const Table table{rows, num_rows, stride, row_bytes};
  return with_index(index, index_bytes, [&](auto typed) {
    return write(table, typed, num_indices, negative != 0, num_threads, [&](char* row, int64_t at) {
      std::memcpy(row, source + at * source_stride, static_cast<size_t>(row_bytes));
    });
  });
}

// Adds `alpha` times rows of `source` to rows of the table, which are float or, if `is_double`,
// double. Each product and sum is rounded once, as torch's are.
int64_t penstock_add_rows(char* rows, int64_t num_rows, int64_t stride, int64_t row_bytes,
                          const void* index, int32_t index_bytes, int64_t num_indices,
                          int32_t negative, int32_t num_threads, const char* source,
                          int64_t source_stride, double alpha, int32_t is_double) {
  const Table table{rows, num_rows, stride, row_bytes};
  return with_index(index, index_bytes, [&](auto typed) {
    const auto as = [&]<class Value>() {
      return add<Value>(table, typed, num_indices, source, source_stride, alpha, negative != 0,
                        num_threads);
    };
    return is_double ? as.template operator()<double>() : as.template operator()<float>();
  });
}

}  // extern "C"
