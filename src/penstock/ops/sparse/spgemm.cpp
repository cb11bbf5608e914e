// Products of sparse matrices in CSR, row by row; after `few.cpp`.
//
// A row of C is the union of the rows of B that a row of A names (Gustavson 1978). Its columns are a
// bitmap with two levels of summaries above, so they come out sorted, and where a column stands in
// its row is a rank:
//
//     place(j) = before[j / 64] + popcount(bits[j / 64] & ((1 << j % 64) - 1))
//
// That is 0.19 bytes a column; beyond a budget, columns are taken in windows. Of a row with few products
// the rank is counted instead, by comparing all columns with all, which is branch-free; of at most 16
// they are sorted in a register. Where the pattern of C is known, places are looked up in a table of
// all columns, if the budget holds it. A sum has one thread and one order.

namespace {

// The columns and values that a chunk of rows has in C, in one memory. What is large takes pages only
// as it is written.
class Piece {
 public:
  uint32_t* columns = nullptr;
  void* values = nullptr;
  int64_t count = 0;

  Piece() = default;
  ~Piece() { release(); }
  Piece(const Piece&) = delete;
  Piece& operator=(const Piece&) = delete;

  bool allocate(int64_t most, size_t value_bytes, int64_t max_bytes) {
    bytes_ = most * (sizeof(uint32_t) + value_bytes);
    is_mapped_ = static_cast<int64_t>(bytes_) > max_bytes;
    if (is_mapped_) {
      memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory_ == MAP_FAILED) memory_ = nullptr;
    } else {
      memory_ = std::malloc(bytes_);
    }
    values = memory_;
    columns = reinterpret_cast<uint32_t*>(static_cast<char*>(memory_) + most * value_bytes);
    return memory_ != nullptr;
  }

  void release() {
    if (memory_ != nullptr && is_mapped_)
      munmap(memory_, bytes_);
    else
      std::free(memory_);
    memory_ = nullptr;
  }

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
  bool is_mapped_ = false;
};

using Pieces = std::vector<Piece>;

int64_t count_chunks(const Product& call, int64_t* chunk_rows) {
  const int64_t wanted = 64 * std::max<int64_t>(call.num_threads, 1);
  *chunk_rows = std::clamp<int64_t>((call.num_rows + wanted - 1) / wanted, 16, 4096);
  return (call.num_rows + *chunk_rows - 1) / *chunk_rows;
}

// Call what `start` returns, once for each thread, with a chunk and its rows, chunk by chunk.
template <class Start>
void for_chunks(const Product& call, Start start) {
  int64_t chunk_rows = 0;
  const int64_t num_chunks = count_chunks(call, &chunk_rows);
  std::atomic<int64_t> next{0};
  parallel(static_cast<int>(std::min(call.num_threads, num_chunks)), [&](int, int) {
    auto body = start();
    for (int64_t chunk; (chunk = next.fetch_add(1)) < num_chunks;)
      body(chunk, chunk * chunk_rows, std::min(call.num_rows, (chunk + 1) * chunk_rows));
  });
}

inline Row row_of(const Product& call) {
  return Row(std::min(call.window_columns, call.num_columns));
}

template <class Index>
int64_t count_products(const Matrix<Index>& a, const Matrix<Index>& b, int64_t from, int64_t upto) {
  int64_t count = 0;
  for (int64_t p = from; p < upto; ++p)
    count += b.offsets[a.columns[p] + 1] - b.offsets[a.columns[p]];
  return count;
}

// Write the columns of a row of C behind those of the piece, and the sums where there are values.
template <bool IsWhole, class Index, class Real>
void find_row(const Product& call, const Matrix<Index>& a, const Matrix<Index>& b,
              const Matrix<Index>& mask, int64_t i, Row& row, Piece& piece) {
  const auto* left = static_cast<const Real*>(call.left_values);
  const auto* right = static_cast<const Real*>(call.right_values);
  uint32_t* to = piece.columns + piece.count;
  Real* sums = static_cast<Real*>(piece.values) + piece.count;
  const int64_t window = IsWhole ? call.num_columns : call.window_columns;
  for (int64_t first = 0; first < call.num_columns; first += window) {
    const int64_t end = std::min(call.num_columns, first + window);
    for (int64_t p = a.offsets[i]; p < a.offsets[i + 1]; ++p) {
      const auto [from, upto] = find_part<IsWhole>(b, a.columns[p], first, end);
      for (int64_t q = from; q < upto; ++q) row.add(static_cast<int64_t>(b.columns[q]) - first);
    }
    uint32_t* upto_all = row.emit(first, to);
    uint32_t* kept = upto_all;
    if (mask.offsets != nullptr) {  // the columns of C are those of the mask that the product has
      const auto [from, upto] = find_part<IsWhole>(mask, i, first, end);
      std::vector<uint32_t> found;
      for (int64_t q = from; q < upto; ++q)
        if (row.has(static_cast<int64_t>(mask.columns[q]) - first))
          found.push_back(static_cast<uint32_t>(mask.columns[q]));
      row.clear(to, upto_all - to, first);
      kept = std::copy(found.begin(), found.end(), to);
      row.rank(to, kept - to, first);
    }
    if (left != nullptr) {
      std::fill_n(sums, kept - to, Real{});
      for (int64_t p = a.offsets[i]; p < a.offsets[i + 1]; ++p) {
        const auto [from, upto] = find_part<IsWhole>(b, a.columns[p], first, end);
        for (int64_t q = from; q < upto; ++q) {
          const int64_t column = static_cast<int64_t>(b.columns[q]) - first;
          if (mask.offsets != nullptr && !row.has(column)) continue;
          sums[row.place(column)] += left[p] * right[q];
        }
      }
    }
    row.clear(to, kept - to, first);
    sums += kept - to;
    to = kept;
  }
  piece.count = to - piece.columns;
}

template <class Index>
Matrix<Index> matrix(const void* offsets, const void* columns) {
  return {static_cast<const Index*>(offsets), static_cast<const Index*>(columns)};
}

// A row of C that is one of B, times a number.
template <class Index, class Real>
void scale_row(const Product& call, const Matrix<Index>& b, int64_t p, int64_t k, Piece& piece) {
  const int64_t from = b.offsets[k], count = b.offsets[k + 1] - from;
  for (int64_t j = 0; j < count; ++j)
    piece.columns[piece.count + j] = static_cast<uint32_t>(b.columns[from + j]);
  if (call.left_values != nullptr) {
    const Real left = static_cast<const Real*>(call.left_values)[p];
    const Real* right = static_cast<const Real*>(call.right_values) + from;
    Real* sums = static_cast<Real*>(piece.values) + piece.count;
    for (int64_t j = 0; j < count; ++j) sums[j] = Real{} + left * right[j];  // 0, as a sum, not -0
  }
  piece.count += count;
}

// Find rows of C. Return whether memory was there.
template <class Index, class Real>
class FindChunk {
 public:
  FindChunk(const Product& call, Index* counts, Pieces& pieces)
      : call_(call), counts_(counts), pieces_(pieces), row_(row_of(call)) {}

  bool operator()(int64_t chunk, int64_t first, int64_t end) {
    Piece& piece = pieces_[chunk];
    int64_t most = kFew;  // what one row of few products writes beyond its end
    products_.clear();
    for (int64_t i = first; i < end; ++i) {
      products_.push_back(count_products(a_, b_, a_.offsets[i], a_.offsets[i + 1]));
      most += std::min(products_.back(), call_.num_columns);
    }
    const size_t value_bytes = call_.left_values == nullptr ? 0 : sizeof(Real);
    const auto num_pieces = static_cast<int64_t>(pieces_.size());
    if (!piece.allocate(most, value_bytes, call_.max_bytes / num_pieces)) return false;
    for (int64_t i = first; i < end; ++i) {
      const int64_t before = piece.count;
      if (products_[i - first] != 0) find(i, products_[i - first], piece);
      counts_[i] = static_cast<Index>(piece.count - before);
    }
    return true;
  }

 private:
  void find(int64_t i, int64_t num_products, Piece& piece) {
    const int64_t from = a_.offsets[i], upto = a_.offsets[i + 1];
    const bool has_mask = mask_.offsets != nullptr;
    if (!has_mask && upto - from == 1) {
      scale_row<Index, Real>(call_, b_, from, a_.columns[from], piece);
    } else if (!has_mask && num_products <= kFew) {
      const auto* left = static_cast<const Real*>(call_.left_values);
      const auto* right = static_cast<const Real*>(call_.right_values);
      uint32_t* to = piece.columns + piece.count;
      Real* sums = left == nullptr ? nullptr : static_cast<Real*>(piece.values) + piece.count;
      if constexpr (kHasLanes<Real>) {
        if (num_products <= kLanes && call_.num_columns <= kMostLanes) {
          piece.count += take_lanes(a_, b_, left, right, from, upto, to, sums);
          return;
        }
      }
      few_.read(a_, b_, left, right, from, upto);
      piece.count += few_.take(to, sums);
    } else if (call_.window_columns >= call_.num_columns) {
      find_row<true, Index, Real>(call_, a_, b_, mask_, i, row_, piece);
    } else {
      find_row<false, Index, Real>(call_, a_, b_, mask_, i, row_, piece);
    }
  }

  const Product& call_;
  Index* counts_;
  Pieces& pieces_;
  Row row_;
  FewProducts<Real> few_;
  std::vector<int64_t> products_;  // by row
  const Matrix<Index> a_ = matrix<Index>(call_.left_offsets, call_.left_columns);
  const Matrix<Index> b_ = matrix<Index>(call_.right_offsets, call_.right_columns);
  const Matrix<Index> mask_ = matrix<Index>(call_.mask_offsets, call_.mask_columns);
};

// Find the rows of C, and count the columns of each into `offsets`, behind the first, and all.
template <class Index, class Real>
Pieces* find_rows(const Product& call, Index* offsets, int64_t* count) {
  int64_t chunk_rows = 0;
  auto pieces = std::make_unique<Pieces>(count_chunks(call, &chunk_rows));
  std::atomic<bool> is_full{false};
  for_chunks(call, [&] {
    return [&, find = FindChunk<Index, Real>(call, offsets + 1, *pieces)](
               int64_t chunk, int64_t first, int64_t end) mutable {
      if (!find(chunk, first, end)) is_full = true;
    };
  });
  if (is_full) return nullptr;
  offsets[0] = 0;
  for (const Piece& piece : *pieces) *count += piece.count;
  return pieces.release();
}

// Let counts of columns be offsets, copy columns and values there, and give back their memory, so
// that both together take no more than the result.
template <class Index, class Real>
void copy_rows(const Product& call, Pieces& pieces, Index* offsets, Index* columns, Real* values) {
  std::vector<int64_t> begins(pieces.size());
  for (size_t chunk = 1; chunk < pieces.size(); ++chunk)
    begins[chunk] = begins[chunk - 1] + pieces[chunk - 1].count;
  for_chunks(call, [&] {
    return [&](int64_t chunk, int64_t first, int64_t end) {
      Piece& piece = pieces[chunk];
      int64_t at = begins[chunk];
      std::copy_n(piece.columns, piece.count, columns + at);
      if (values != nullptr)
        std::copy_n(static_cast<const Real*>(piece.values), piece.count, values + at);
      for (int64_t i = first; i < end; ++i)
        offsets[i + 1] = static_cast<Index>(at += offsets[i + 1]);
      piece.release();
    };
  });
}

// c_ij = sum_k a_ik b_kj, of the columns of C.
template <class Index, class Real, bool IsMasked, bool IsWhole, class Columns>
void multiply_row(const Product& call, const Matrix<Index>& a, const Matrix<Index>& b,
                  const Matrix<Index>& c, int64_t i, Columns& row) {
  const auto* left = static_cast<const Real*>(call.left_values);
  const auto* right = static_cast<const Real*>(call.right_values);
  const int64_t window = IsWhole ? call.num_columns : call.window_columns;
  for (int64_t first = 0; first < call.num_columns; first += window) {
    const int64_t end = std::min(call.num_columns, first + window);
    const auto [c_from, c_upto] = find_part<IsWhole>(c, i, first, end);
    Real* to = static_cast<Real*>(call.values) + c_from;
    row.rank(c.columns + c_from, c_upto - c_from, first);
    std::fill_n(to, c_upto - c_from, Real{});
    for (int64_t p = a.offsets[i]; p < a.offsets[i + 1]; ++p) {
      const auto [from, upto] = find_part<IsWhole>(b, a.columns[p], first, end);
      for (int64_t q = from; q < upto; ++q) {
        const int64_t column = static_cast<int64_t>(b.columns[q]) - first;
        if (IsMasked && !row.has(column)) continue;
        to[row.place(column)] += left[p] * right[q];
      }
    }
    if (IsMasked) row.clear(c.columns + c_from, c_upto - c_from, first);
  }
}

// Call `run` with what finds places in rows of C, for a thread to copy, and whether it has all columns.
template <class Run>
void with_columns(const Product& call, Run run) {
  const int64_t table_bytes = call.num_columns * call.num_threads * sizeof(uint32_t);
  if (table_bytes <= call.max_bytes)
    run([&] { return Table(call.num_columns, call.is_masked != 0); }, std::true_type());
  else if (call.window_columns >= call.num_columns)
    run([&] { return row_of(call); }, std::true_type());
  else
    run([&] { return row_of(call); }, std::false_type());
}

template <class Index, class Real, bool IsMasked>
void multiply(const Product& call) {
  const auto a = matrix<Index>(call.left_offsets, call.left_columns);
  const auto b = matrix<Index>(call.right_offsets, call.right_columns);
  const auto c = matrix<Index>(call.offsets, call.columns);
  with_columns(call, [&](auto start, auto is_whole) {
    for_chunks(call, [&] {
      return [&, row = start()](int64_t, int64_t first, int64_t end) mutable {
        for (int64_t i = first; i < end; ++i)
          if (c.offsets[i + 1] > c.offsets[i])
            multiply_row<Index, Real, IsMasked, is_whole>(call, a, b, c, i, row);
      };
    });
  });
}

// Return the ends of the ranges of rows of B that threads own, of about as many products each.
template <class Index>
std::vector<int64_t> divide_inner(const Product& call, const Matrix<Index>& a,
                                  const Matrix<Index>& b) {
  constexpr int64_t kBuckets = 4096, kSamples = 8192;  // of rows of B, and of entries of A
  const int64_t num_inner = std::max<int64_t>(call.num_inner, 1);
  std::vector<int64_t> ends;
  if (call.num_threads > 1) {
    int shift = 0;
    while (num_inner >> shift > kBuckets) ++shift;
    std::vector<int64_t> products((num_inner >> shift) + 1);
    int64_t total = 0;
    const int64_t num_entries = a.offsets[call.num_rows];
    const int64_t step = std::max<int64_t>(1, num_entries / kSamples);
    for (int64_t p = 0; p < num_entries; p += step) {
      const int64_t k = a.columns[p], count = b.offsets[k + 1] - b.offsets[k];
      products[k >> shift] += count;
      total += count;
    }
    int64_t sum = 0;
    for (size_t bucket = 0; bucket < products.size(); ++bucket) {
      sum += products[bucket];
      const auto share = static_cast<int64_t>(ends.size()) + 1;
      if (share < call.num_threads && sum * call.num_threads >= total * share)
        ends.push_back(static_cast<int64_t>(bucket + 1) << shift);
    }
  }
  ends.push_back(num_inner);
  return ends;
}

// dA_ik = sum_j dC_ij b_kj and dB_kj = sum_i a_ik dC_ij, of the rows k of B that a thread owns. Both
// go on from the window before.
template <class Index, class Real, bool IsMasked, bool IsWhole, class Columns>
void differentiate_row(const Product& call, const Matrix<Index>& a, const Matrix<Index>& b,
                       const Matrix<Index>& c, int64_t i, int64_t p_from, int64_t p_upto,
                       Columns& row) {
  const auto* left = static_cast<const Real*>(call.left_values);
  const auto* right = static_cast<const Real*>(call.right_values);
  auto* dleft = static_cast<Real*>(call.left_gradient);
  auto* dright = static_cast<Real*>(call.right_gradient);
  const int64_t window = IsWhole ? call.num_columns : call.window_columns;
  for (int64_t first = 0; first < call.num_columns; first += window) {
    const int64_t end = std::min(call.num_columns, first + window);
    const auto [c_from, c_upto] = find_part<IsWhole>(c, i, first, end);
    const Real* of = static_cast<const Real*>(call.values) + c_from;
    row.rank(c.columns + c_from, c_upto - c_from, first);
    for (int64_t p = p_from; p < p_upto; ++p) {
      const auto [from, upto] = find_part<IsWhole>(b, a.columns[p], first, end);
      Real sum = dleft == nullptr ? Real{} : dleft[p];
      for (int64_t q = from; q < upto; ++q) {
        const int64_t column = static_cast<int64_t>(b.columns[q]) - first;
        if (IsMasked && !row.has(column)) continue;
        const Real given = of[row.place(column)];
        sum += given * right[q];
        if (dright != nullptr) dright[q] += left[p] * given;
      }
      if (dleft != nullptr) dleft[p] = sum;
    }
    if (IsMasked) row.clear(c.columns + c_from, c_upto - c_from, first);
  }
}

template <class Index, class Real, bool IsMasked>
void differentiate(const Product& call) {
  const auto a = matrix<Index>(call.left_offsets, call.left_columns);
  const auto b = matrix<Index>(call.right_offsets, call.right_columns);
  const auto c = matrix<Index>(call.offsets, call.columns);
  const std::vector<int64_t> ends = divide_inner(call, a, b);
  const auto num_parts = static_cast<int64_t>(ends.size());
  with_columns(call, [&](auto start, auto is_whole) {
    for_tasks(num_parts, num_parts, [&](int64_t part) {
      auto row = start();
      auto rows = [&] {
        if constexpr (kHasLanes<Real> && !IsMasked)
          return ShortRows<Index, Real>(call, a, b, c);
        else
          return NoRows();
      }();
      const int64_t k_from = part == 0 ? 0 : ends[part - 1], k_upto = ends[part];
      for (int64_t i = 0; i < call.num_rows; ++i) {
        if (rows.take(i, k_from, k_upto)) continue;
        int64_t from = a.offsets[i], upto = a.offsets[i + 1];
        while (from < upto && a.columns[from] < k_from) ++from;
        while (from < upto && a.columns[upto - 1] >= k_upto) --upto;
        if (from < upto)
          differentiate_row<Index, Real, IsMasked, is_whole>(call, a, b, c, i, from, upto, row);
      }
      rows.run();
    });
  });
}

// Call `run` with a 0 of the indices' type and one of the values'.
template <class Run>
auto with_types(const Product& call, Run run) {
  if (call.is_wide) return call.is_double ? run(int64_t{}, double{}) : run(int64_t{}, float{});
  return call.is_double ? run(int32_t{}, double{}) : run(int32_t{}, float{});
}

// Return 0 for offsets that rise from 0 to `count` and sorted, unique columns within the matrix, 1
// for columns that are not sorted or unique, -1 for other offsets, -2 for columns outside.
template <class Index>
int64_t check(const Matrix<Index>& of, int64_t num_rows, int64_t num_columns, int64_t count) {
  using Unsigned = std::make_unsigned_t<Index>;
  const Index *offsets = of.offsets, *columns = of.columns;  // read anew, they would be gathered
  if (offsets[0] != 0 || offsets[num_rows] != count) return -1;
  Index falls = 0;
#pragma omp simd reduction(+ : falls)
  for (int64_t i = 0; i < num_rows; ++i) falls += offsets[i] > offsets[i + 1];
  if (falls != 0) return -1;
  const auto beyond = static_cast<Unsigned>(num_columns);
  Index outside = count > 0 && static_cast<Unsigned>(columns[0]) >= beyond;
#pragma omp simd reduction(+ : outside, falls)
  for (int64_t p = 1; p < count; ++p) {
    outside += static_cast<Unsigned>(columns[p]) >= beyond;
    falls += columns[p] <= columns[p - 1];
  }
  // Columns are sorted if they fall between rows alone.
  Index falls_between = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t p = offsets[i];
    if (p > 0 && p < offsets[i + 1]) falls_between += columns[p] <= columns[p - 1];
  }
  return outside != 0 ? -2 : falls != falls_between;
}

}  // namespace

extern "C" {

int64_t penstock_check_csr(const void* offsets, const void* columns, int64_t num_rows,
                           int64_t num_columns, int64_t count, int64_t is_wide) {
  return is_wide ? check(matrix<int64_t>(offsets, columns), num_rows, num_columns, count)
                 : check(matrix<int32_t>(offsets, columns), num_rows, num_columns, count);
}

// Return the rows of C, to be copied, and their count of columns, or null where memory is missing.
void* penstock_find_rows(const Product* call, void* offsets, int64_t* count) {
  return with_types(*call, [&](auto index, auto real) -> void* {
    using Index = decltype(index);
    return find_rows<Index, decltype(real)>(*call, static_cast<Index*>(offsets), count);
  });
}

// Copy the rows, unless `columns` is null, and free them.
void penstock_copy_rows(const Product* call, void* pieces, void* offsets, void* columns,
                        void* values) {
  const std::unique_ptr<Pieces> owned(static_cast<Pieces*>(pieces));
  if (columns == nullptr) return;
  with_types(*call, [&](auto index, auto real) {
    using Index = decltype(index);
    copy_rows(*call, *owned, static_cast<Index*>(offsets), static_cast<Index*>(columns),
              static_cast<decltype(real)*>(values));
  });
}

void penstock_multiply(const Product* call) {
  with_types(*call, [&](auto index, auto real) {
    call->is_masked ? multiply<decltype(index), decltype(real), true>(*call)
                    : multiply<decltype(index), decltype(real), false>(*call);
  });
}

void penstock_differentiate(const Product* call) {
  with_types(*call, [&](auto index, auto real) {
    call->is_masked ? differentiate<decltype(index), decltype(real), true>(*call)
                    : differentiate<decltype(index), decltype(real), false>(*call);
  });
}

}  // extern "C"
