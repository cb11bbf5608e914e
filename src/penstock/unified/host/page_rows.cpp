// Rows of a batch, read page by page: the source follows `host_rows.cpp`, whose names it uses.
//
// A table beyond the reach of the translation cache costs a walk through the page tables for every
// random row. Rows of one page, read one after the other, share a walk (Victima, arXiv 2310.04158,
// keeps more translations at hand in hardware; here the batch is put into an order that needs
// fewer). The order is a counting sort of each thread's part of the batch.

namespace {

constexpr int kHugePageBits = 21;
constexpr int64_t kMaxBuckets = 8192;  // whose counters stay in the nearest caches
constexpr int64_t kWindow = 1 << 17;   // rows that are sorted together: 1 MiB of places

// Of a row that is read: its number, and its position in the window.
struct Place {
  uint32_t row;
  uint32_t position;
};

// Writes the rows of a window to `places`, page by page, and within a page in their order.
//
//   ends[b] = sum over b' <= b of |{row : bucket(row) = b'}|
template <class Index>
void sort_by_page(const Batch& batch, const Index* index, int64_t begin, int64_t end, Place* places,
                  FirstBad& bad) {
  const uintptr_t low = address_of(batch, 0) >> kHugePageBits;
  const uintptr_t high = address_of(batch, batch.num_rows - 1) >> kHugePageBits;
  int shift = 0;  // of pages that make up a bucket
  while (static_cast<int64_t>((high - low) >> shift) >= kMaxBuckets) ++shift;
  const auto bucket_of = [&](int64_t row) {
    return ((address_of(batch, row) >> kHugePageBits) - low) >> shift;
  };
  uint32_t starts[kMaxBuckets + 1] = {};
  for (int64_t at = begin; at < end; ++at) {
    int64_t row = index[at];
    if (!resolve(row, batch)) {
      bad.note(at);
      row = 0;  // any row: the caller raises
    }
    ++starts[bucket_of(row) + 1];
  }
  for (int64_t bucket = 0; bucket < kMaxBuckets; ++bucket) starts[bucket + 1] += starts[bucket];
  for (int64_t at = begin; at < end; ++at) {
    int64_t row = index[at];
    if (!resolve(row, batch)) row = 0;
    places[starts[bucket_of(row)]++] = {static_cast<uint32_t>(row),
                                        static_cast<uint32_t>(at - begin)};
  }
}

template <class Index>
int64_t read_by_page(const Batch& batch, const Index* index, char* out, bool streaming) {
  // Kept from call to call: new memory costs more page faults than the sort has rows.
  static thread_local Place places[kWindow];
  FirstBad bad;
  const int64_t row_bytes = batch.row_bytes;
  const int64_t block = std::max(kBlockBytes / row_bytes, int64_t{1});
  const bool on_lines = (reinterpret_cast<uintptr_t>(out) | static_cast<uintptr_t>(row_bytes)) %
                            static_cast<uintptr_t>(kLine) == 0;
  const auto copy = [&](char* to, const char* from) {
#if defined(__AVX512F__)
    if (streaming && on_lines) {
      stream(to, from, row_bytes);
    } else {
      VectorCopy()(to, from, row_bytes);
    }
#else
    AnyCopy()(to, from, row_bytes);
#endif
  };
  parallel(static_cast<int>(batch.num_threads), [&](int thread, int count) {
    const int64_t last = batch.num_indices * (thread + 1) / count;
    int64_t rows[kBlockBytes / kLine];  // of a block, which is read together: see read_streaming
    for (int64_t begin = batch.num_indices * thread / count; begin < last; begin += kWindow) {
      const int64_t end = std::min(begin + kWindow, last);
      sort_by_page(batch, index, begin, end, places, bad);
      for (int64_t first = 0; first < end - begin; first += block) {
        const int64_t num_rows = std::min(block, end - begin - first);
        for (int64_t i = 0; i < num_rows; ++i) rows[i] = places[first + i].row;
        prefetch_rows(batch, rows, num_rows);
        for (int64_t i = 0; i < num_rows; ++i) {
          copy(out + (begin + places[first + i].position) * row_bytes,
               batch.rows + rows[i] * batch.stride);
        }
      }
    }
#if defined(__AVX512F__)
    _mm_sfence();
#endif
  });
  (void)streaming, (void)on_lines;
  return bad.position();
}

}  // namespace

// Copies rows as `penstock_read_rows` does, page by page. A row has at least the bytes of a line, and
// the table fewer than 2^32 rows.
extern "C" int64_t penstock_read_rows_by_page(const Batch* batch, char* out, int32_t streaming) {
  return with_index(*batch, [&](auto index) {
    return read_by_page(*batch, index, out, streaming != 0);
  });
}
