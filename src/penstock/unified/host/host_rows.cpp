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

// Rows of a table that are read or written together; `table.py` passes these numbers of 64 bits.
struct Batch {
  char* rows;  // all of the table
  int64_t num_rows;
  int64_t stride;  // bytes from one row to the next
  int64_t row_bytes;
  const void* index;
  int64_t index_bytes;  // of one index
  int64_t num_indices;
  int64_t negative;  // whether indices below zero count from the end
  int64_t num_threads;
};

// False if the row does not exist.
inline bool resolve(int64_t& row, const Batch& batch) {
  if (batch.negative && row < 0) row += batch.num_rows;
  return static_cast<uint64_t>(row) < static_cast<uint64_t>(batch.num_rows);
}

// Into the second level: it waits for more lines at once than the first one. An address that is out
// of range only makes the prefetch do nothing.
inline void prefetch_line(uintptr_t address) {
  __builtin_prefetch(reinterpret_cast<const void*>(address), 0, 1);
}

inline uintptr_t address_of(const Batch& batch, int64_t row) {
  return reinterpret_cast<uintptr_t>(batch.rows) +
         static_cast<uintptr_t>(row) * static_cast<uintptr_t>(batch.stride);
}

inline void prefetch_row(const Batch& batch, int64_t row) {
  const uintptr_t start = address_of(batch, row);
  const uintptr_t begin = start & static_cast<uintptr_t>(kLine - 1);  // in its line
  const uintptr_t end = begin + static_cast<uintptr_t>(std::min(batch.row_bytes, kMaxPrefetch));
  // Counted, not compared: an index that is wrong, or counts from the end, may lead to addresses
  // that wrap around.
  for (uintptr_t at = 0; at < end; at += kLine) prefetch_line(start - begin + at);
}

// Fetches all lines of some rows. The rows take turns, so that the walks through the page tables
// for their first lines go on at once (measured: 1.05 to 1.2 times as fast as row after row).
// Always inline: a call that only prefetches is taken for one that does nothing, and left out.
template <class Index>
[[gnu::always_inline]] inline void prefetch_rows(const Batch& batch, const Index* index,
                                                 int64_t num_indices) {
  const uintptr_t last = static_cast<uintptr_t>(batch.row_bytes) - 1;
  const bool on_lines = (address_of(batch, 0) | static_cast<uintptr_t>(batch.stride)) % kLine == 0;
  for (int64_t first = 0; first < num_indices; first += kTogether) {
    const int64_t count = std::min(kTogether, num_indices - first);
    uintptr_t starts[kTogether];
    for (int64_t i = 0; i < count; ++i) starts[i] = address_of(batch, index[first + i]);
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
int64_t read_rows(const Batch& batch, const Index* index, char* out, Copy copy) {
  FirstBad bad;
  const int64_t ahead =
      std::clamp(kAheadBytes / std::max<int64_t>(batch.row_bytes, 1), int64_t{2}, kMaxAhead);
  parallel(static_cast<int>(batch.num_threads), [&](int thread, int count) {
    const int64_t begin = batch.num_indices * thread / count;
    const int64_t end = batch.num_indices * (thread + 1) / count;
    for (int64_t at = begin; at < std::min(begin + ahead, end); ++at) {
      prefetch_row(batch, index[at]);
    }
    for (int64_t at = begin; at < end; ++at) {
      if (at + ahead < end) prefetch_row(batch, index[at + ahead]);
      int64_t row = index[at];
      if (!resolve(row, batch)) {
        bad.note(at);
        continue;
      }
      copy(out + at * batch.row_bytes, batch.rows + row * batch.stride, batch.row_bytes);
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
int64_t read_streaming(const Batch& batch, const Index* index, char* out) {
  FirstBad bad;
  const int64_t row_bytes = batch.row_bytes;
  const int64_t block = std::max(kBlockBytes / row_bytes, int64_t{1});
  const bool on_lines = (reinterpret_cast<uintptr_t>(out) | static_cast<uintptr_t>(row_bytes)) %
                            static_cast<uintptr_t>(kLine) == 0;
  const bool side_by_side = !on_lines && row_bytes <= kBlockBytes / 2;
  parallel(static_cast<int>(batch.num_threads), [&](int thread, int count) {
    alignas(kLine) char staged[kBlockBytes];
    const int64_t begin = batch.num_indices * thread / count;
    const int64_t end = batch.num_indices * (thread + 1) / count;
    for (int64_t first = begin; first < end; first += block) {
      const int64_t last = std::min(first + block, end);
      prefetch_rows(batch, index + first, last - first);
      for (int64_t at = first; at < last; ++at) {
        int64_t row = index[at];
        if (!resolve(row, batch)) {
          bad.note(at);
          row = 0;  // any row: the caller raises
          if (batch.num_rows == 0) continue;
        }
        const char* from = batch.rows + row * batch.stride;
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
int64_t read_rows(const Batch& batch, const Index* index, char* out, bool streaming) {
  const auto with = [&](auto copy) { return read_rows(batch, index, out, copy); };
  switch (batch.row_bytes) {
    case 1: return with(FixedCopy<1>());
    case 2: return with(FixedCopy<2>());
    case 4: return with(FixedCopy<4>());
    case 8: return with(FixedCopy<8>());
    case 16: return with(FixedCopy<16>());
    case 32: return with(FixedCopy<32>());
    default: break;
  }
#if defined(__AVX512F__)
  if (streaming && batch.row_bytes >= 2 * kLine) {
    return read_streaming(batch, index, out);
  }
  if (batch.row_bytes >= kLine) return with(VectorCopy());
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
int64_t write(const Batch& batch, const Index* index, Write write_row) {
  for (int64_t at = 0; at < batch.num_indices; ++at) {  // nothing is written if any index is wrong
    int64_t row = index[at];
    if (!resolve(row, batch)) return at;
  }
  parallel(static_cast<int>(batch.num_threads), [&](int thread, int count) {
    for (int64_t at = 0; at < batch.num_indices; ++at) {
      int64_t row = index[at];
      resolve(row, batch);
      if (owner(row, count) == thread) write_row(batch.rows + row * batch.stride, at);
    }
  });
  return -1;
}

template <class Value, class Index>
int64_t add(const Batch& batch, const Index* index, const char* source, int64_t source_stride,
            double alpha) {
  const Value factor = static_cast<Value>(alpha);
  const int64_t width = batch.row_bytes / static_cast<int64_t>(sizeof(Value));
  return write(batch, index, [&](char* row, int64_t at) {
    Value* to = reinterpret_cast<Value*>(row);
    const Value* from = reinterpret_cast<const Value*>(source + at * source_stride);
    for (int64_t i = 0; i < width; ++i) to[i] = std::fma(from[i], factor, to[i]);
  });
}

// Calls `work` with a pointer to the indices in their own type.
template <class Work>
int64_t with_index(const Batch& batch, Work work) {
  if (batch.index_bytes == 4) return work(static_cast<const int32_t*>(batch.index));
  return work(static_cast<const int64_t*>(batch.index));
}

}  // namespace

extern "C" {

// Copies rows of the table to `out`, side by side. Returns -1, or the first position whose index is
// out of range; what `out` holds is then undefined.
int64_t penstock_read_rows(const Batch* batch, char* out, int32_t streaming) {
  return with_index(*batch, [&](auto index) {
    return read_rows(*batch, index, out, streaming != 0);
  });
}

// Copies rows of `source` into the table; of several for one row, the last one stays.
int64_t penstock_write_rows(const Batch* batch, const char* source, int64_t source_stride) {
  return with_index(*batch, [&](auto index) {
    return write(*batch, index, [&](char* row, int64_t at) {
      std::memcpy(row, source + at * source_stride, static_cast<size_t>(batch->row_bytes));
    });
  });
}

// Adds `alpha` times rows of `source` to rows of the table, which are float or, if `is_double`,
// double. Each product and sum is rounded once, as torch's are.
int64_t penstock_add_rows(const Batch* batch, const char* source, int64_t source_stride,
                          double alpha, int32_t is_double) {
  return with_index(*batch, [&](auto index) {
    return is_double ? add<double>(*batch, index, source, source_stride, alpha)
                     : add<float>(*batch, index, source, source_stride, alpha);
  });
}

}  // extern "C"
