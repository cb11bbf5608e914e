// Sums over rows in a fixed order; after the vectors of either float type, before what uses it.
//
// A tile is a number of rows that follows from the shape alone. Its sums are those of one thread, and
// are added up tile by tile afterwards, both in double: no bit depends on the number of threads.

namespace {

// sums[c] = sum_t partials[t][c]
inline void add_tiles(const double* partials, int64_t num_tiles, int64_t num_columns, double* sums,
                      int64_t num_threads) {
  constexpr int64_t kColumns = 512;  // of a task
  const bool is_short = num_tiles * num_columns < (1 << 16);  // than a second thread takes to wake
  for_tasks(divide_up(num_columns, kColumns), is_short ? 1 : num_threads, [&](int64_t task) {
    const int64_t first = task * kColumns, end = std::min(first + kColumns, num_columns);
    std::fill(sums + first, sums + end, 0.0);
    for (int64_t t = 0; t < num_tiles; ++t)
      for (int64_t c = first; c < end; ++c) sums[c] += partials[t * num_columns + c];
  });
}

// As `_columns.py` passes it.
struct ColumnCall {
  const void* rows;  // (num_rows, num_columns), contiguous
  double* partials;  // (tiles, num_columns)
  double* sums;      // (num_columns,)
  int64_t num_rows, num_columns, tile_rows, kind, num_threads;
};

template <class Real>
void add_columns(const ColumnCall& call) {
  constexpr int64_t kRows = 64;       // added up in Real
  constexpr int64_t kColumns = 1024;  // of a task
  const int64_t num_tiles = divide_up(call.num_rows, call.tile_rows);
  const int64_t num_pieces = divide_up(call.num_columns, kColumns);
  for_tasks(num_tiles * num_pieces, call.num_threads, [&](int64_t task) {
    const int64_t tile = task / num_pieces, first = task % num_pieces * kColumns;
    const int64_t count = std::min(kColumns, call.num_columns - first);
    const int64_t end = std::min((tile + 1) * call.tile_rows, call.num_rows);
    double* totals = call.partials + tile * call.num_columns + first;
    std::fill(totals, totals + count, 0.0);
    Real sums[kColumns], row[kColumns];
    for (int64_t r = tile * call.tile_rows; r < end; r += kRows) {
      std::fill(sums, sums + count, Real{});
      for (int64_t i = r; i < std::min(r + kRows, end); ++i) {
        with_element<Real>(call.kind, [&](auto element) {
          const auto* rows = static_cast<const decltype(element)*>(call.rows);
          read_row(rows + i * call.num_columns + first, count, row);
        });
        for (int64_t c = 0; c < count; ++c) sums[c] += row[c];
      }
      for (int64_t c = 0; c < count; ++c) totals[c] += sums[c];
    }
  });
  add_tiles(call.partials, num_tiles, call.num_columns, call.sums, call.num_threads);
}

}  // namespace

