// Products of sparse matrices in CSR, row by row; after `codegen/vectors.cpp`.
//
// A row of C is the union of the rows of B that a row of A names (Gustavson 1978). Its columns are a
// bitmap with two levels of summaries above, so they come out sorted, and where a column stands in
// its row is a rank:
//
//     place(j) = before[j / 64] + popcount(bits[j / 64] & ((1 << j % 64) - 1))
//
// That is 0.19 bytes a column, where a dense row of sums takes 4 or 8; beyond a budget, columns are
// taken in windows. Of a row with few products the rank is counted instead, by comparing all columns
// with all, which is branch-free. A sum has one thread and one order.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <memory>
#include <vector>

namespace {

constexpr int64_t kWordBits = 64;
constexpr int64_t kFew = 128;  // products of a row whose columns are compared with each other

template <class Index>
struct Matrix {
  const Index* offsets;
  const Index* columns;
};

// The rows of a product, `struct` of `_spgemm_native.py`; null where a call has none.
struct Product {
  const void* left_offsets;
  const void* left_columns;
  const void* left_values;
  const void* right_offsets;
  const void* right_columns;
  const void* right_values;
  const void* mask_offsets;
  const void* mask_columns;
  const void* offsets;
  const void* columns;
  void* values;
  void* left_gradient;
  void* right_gradient;
  int64_t num_rows, num_inner, num_columns;
  int64_t is_wide;    // indices have 64 bits
  int64_t is_double;  // values are double
  int64_t is_masked;  // the pattern of C may lack columns of the product
  int64_t window_columns;
  int64_t max_bytes;
  int64_t num_threads;
};

// The columns of a row of C within a window, of one thread.
class Row {
 public:
  explicit Row(int64_t num_columns)
      : words_((num_columns + kWordBits - 1) / kWordBits),
        bits_(new uint64_t[words_]()),
        before_(new uint32_t[words_]),
        summary_((words_ + kWordBits - 1) / kWordBits),
        top_((static_cast<int64_t>(summary_.size()) + kWordBits - 1) / kWordBits) {}

  void add(int64_t column) {
    const int64_t word = column / kWordBits;
    const uint64_t old = bits_[word];
    bits_[word] = old | uint64_t{1} << column % kWordBits;
    if (old == 0) mark(word);
  }

  // Write the sorted columns, plus `first`, and let each have its rank. Return their end.
  uint32_t* emit(int64_t first, uint32_t* to) {
    const uint32_t* begin = to;
    for (size_t t = 0; t < top_.size(); ++t) {
      for (uint64_t tops = top_[t]; tops != 0; tops &= tops - 1) {
        const int64_t s = static_cast<int64_t>(t) * kWordBits + std::countr_zero(tops);
        for (uint64_t of_words = summary_[s]; of_words != 0; of_words &= of_words - 1) {
          const int64_t word = s * kWordBits + std::countr_zero(of_words);
          const int64_t base = first + word * kWordBits;
          before_[word] = static_cast<uint32_t>(to - begin);
          for (uint64_t bits = bits_[word]; bits != 0; bits &= bits - 1)
            *to++ = static_cast<uint32_t>(base + std::countr_zero(bits));
        }
        summary_[s] = 0;
      }
      top_[t] = 0;
    }
    return to;
  }

  // Let columns be those of a sorted list, each less `first`. Words without any keep old bits.
  template <class Index>
  void rank(const Index* columns, int64_t count, int64_t first) {
    int64_t last = -1;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t column = static_cast<int64_t>(columns[i]) - first, word = column / kWordBits;
      if (word != last) {
        bits_[word] = 0;
        before_[word] = static_cast<uint32_t>(i);
        last = word;
      }
      bits_[word] |= uint64_t{1} << column % kWordBits;
    }
  }

  template <class Index>
  void clear(const Index* columns, int64_t count, int64_t first) {
    for (int64_t i = 0; i < count; ++i)
      bits_[(static_cast<int64_t>(columns[i]) - first) / kWordBits] = 0;
  }

  bool has(int64_t column) const {
    return bits_[column / kWordBits] >> column % kWordBits & 1;
  }

  int64_t place(int64_t column) const {
    const uint64_t below = (uint64_t{1} << column % kWordBits) - 1;
    const int64_t word = column / kWordBits;
    return before_[word] + std::popcount(bits_[word] & below);
  }

 private:
  void mark(int64_t word) {
    const int64_t s = word / kWordBits;
    if (summary_[s] == 0) top_[s / kWordBits] |= uint64_t{1} << s % kWordBits;
    summary_[s] |= uint64_t{1} << word % kWordBits;
  }

  int64_t words_;
  std::unique_ptr<uint64_t[]> bits_;
  std::unique_ptr<uint32_t[]> before_;
  std::vector<uint64_t> summary_, top_;
};

// Return begin and end of the part of a row that lies in a window of columns.
template <bool IsWhole, class Index>
inline std::pair<int64_t, int64_t> find_part(const Matrix<Index>& b, int64_t k, int64_t first,
                                             int64_t end) {
  const int64_t from = b.offsets[k], to = b.offsets[k + 1];
  if constexpr (IsWhole) return {from, to};
  const Index* begin = std::lower_bound(b.columns + from, b.columns + to, first);
  return {begin - b.columns, std::lower_bound(begin, b.columns + to, end) - b.columns};
}

// The columns and values that a chunk of rows has in C.
struct Piece {
  uint32_t* columns = nullptr;
  void* values = nullptr;
  int64_t most = 0, count = 0;  // places, and those that are taken
};

// All pieces, in one memory that only takes pages as it is written. What is beyond a budget is given
// back piece by piece as it is copied.
class Pieces {
 public:
  std::vector<Piece> of;

  explicit Pieces(int64_t num_chunks) : of(num_chunks) {}
  ~Pieces() {
    if (is_mapped_)
      munmap(memory_, bytes_);
    else
      std::free(memory_);
  }
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;

  bool allocate(size_t value_bytes, int64_t max_bytes) {
    for (Piece& piece : of) bytes_ += align(piece.most * (sizeof(uint32_t) + value_bytes));
    is_mapped_ = static_cast<int64_t>(bytes_) > max_bytes;
    if (is_mapped_) {
      memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory_ == MAP_FAILED) is_mapped_ = false, memory_ = nullptr;
    } else {
      memory_ = std::aligned_alloc(kPage, std::max<size_t>(bytes_, kPage));
    }
    if (memory_ == nullptr) return false;
    char* at = static_cast<char*>(memory_);
    for (Piece& piece : of) {
      piece.values = at;
      piece.columns = reinterpret_cast<uint32_t*>(at + piece.most * value_bytes);
      at += align(piece.most * (sizeof(uint32_t) + value_bytes));
    }
    return true;
  }

  void give_back(const Piece& piece, size_t value_bytes) {
    if (is_mapped_)
      madvise(piece.values, align(piece.most * (sizeof(uint32_t) + value_bytes)), MADV_DONTNEED);
  }

 private:
  static constexpr size_t kPage = 4096;
  static size_t align(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

  void* memory_ = nullptr;
  size_t bytes_ = 0;
  bool is_mapped_ = false;
};

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

// The products of a row of C, where they are few.
template <class Real>
struct FewProducts {
  alignas(64) int32_t columns[kFew];
  alignas(64) int32_t ranks[kFew];
  alignas(64) int32_t sorted[kFew];  // columns of C
  int32_t places[kFew];              // by rank
  Real values[kFew];
  int64_t count = 0;

  template <class Index>
  void read(const Matrix<Index>& a, const Matrix<Index>& b, const Real* left, const Real* right,
            int64_t from, int64_t upto) {
    count = 0;
    for (int64_t p = from; p < upto; ++p) {
      const int64_t k = a.columns[p];
      for (int64_t q = b.offsets[k]; q < b.offsets[k + 1]; ++q) {
        columns[count] = static_cast<int32_t>(b.columns[q]);
        if (left != nullptr) values[count] = left[p] * right[q];
        ++count;
      }
    }
  }

  // Set of each product the number of columns in a list that are below its own.
  void rank(const int32_t* list, int64_t length) {
    for (int64_t first = 0; first < count; first += kLanes) {
      const Bits own = *reinterpret_cast<const Bits*>(columns + first);
      Bits below{};
      for (int64_t i = 0; i < length; ++i) below -= list[i] < own;
      *reinterpret_cast<Bits*>(ranks + first) = below;
    }
  }

  // Write the columns of C to `to` and, if there is room, the sums. Return how many there are.
  int64_t take(uint32_t* to, Real* sums) {
    rank(columns, count);
    std::fill_n(sorted, count, -1);  // products of one column have one rank, and leave gaps
    for (int64_t i = 0; i < count; ++i) sorted[ranks[i]] = columns[i];
    int64_t length = 0;
    for (int64_t i = 0; i < count; ++i) {
      places[i] = static_cast<int32_t>(length);
      to[length] = static_cast<uint32_t>(sorted[i]);
      length += sorted[i] >= 0;
    }
    if (sums == nullptr) return length;
    std::fill_n(sums, length, Real{});
    for (int64_t i = 0; i < count; ++i) sums[places[ranks[i]]] += values[i];
    return length;
  }

  // Find the place of each product in the columns of C; -1 where it is not there.
  template <class Index>
  void find(const Index* of, int64_t length) {
    std::copy_n(of, length, sorted);
    rank(sorted, length);
    for (int64_t i = 0; i < count; ++i)
      if (ranks[i] == length || sorted[ranks[i]] != columns[i]) ranks[i] = -1;
  }
};

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

// Count the columns of each row of C into `counts`, and keep them, with the sums if there are values.
template <class Index, class Real>
Pieces* find_rows(const Product& call, int64_t* counts) {
  const auto a = matrix<Index>(call.left_offsets, call.left_columns);
  const auto b = matrix<Index>(call.right_offsets, call.right_columns);
  const auto mask = matrix<Index>(call.mask_offsets, call.mask_columns);
  const auto* left = static_cast<const Real*>(call.left_values);
  const auto* right = static_cast<const Real*>(call.right_values);
  const size_t value_bytes = left == nullptr ? 0 : sizeof(Real);
  int64_t chunk_rows = 0;
  auto pieces = std::make_unique<Pieces>(count_chunks(call, &chunk_rows));
  for_chunks(call, [&] {
    return [&](int64_t chunk, int64_t first, int64_t end) {
      int64_t most = kFew;  // what one row of few products writes beyond its end
      for (int64_t i = first; i < end; ++i)
        most += std::min(count_products(a, b, a.offsets[i], a.offsets[i + 1]), call.num_columns);
      pieces->of[chunk].most = most;
    };
  });
  if (!pieces->allocate(value_bytes, call.max_bytes)) return nullptr;
  const bool is_whole = call.window_columns >= call.num_columns;
  for_chunks(call, [&] {
    return [&, row = row_of(call), few = FewProducts<Real>()](int64_t chunk, int64_t first,
                                                              int64_t end) mutable {
      Piece& piece = pieces->of[chunk];
      for (int64_t i = first; i < end; ++i) {
        const int64_t before = piece.count;
        const int64_t from = a.offsets[i], upto = a.offsets[i + 1];
        if (mask.offsets == nullptr && count_products(a, b, from, upto) <= kFew) {
          few.read(a, b, left, right, from, upto);
          Real* sums = left == nullptr ? nullptr : static_cast<Real*>(piece.values) + before;
          piece.count += few.take(piece.columns + before, sums);
        } else if (is_whole) {
          find_row<true, Index, Real>(call, a, b, mask, i, row, piece);
        } else {
          find_row<false, Index, Real>(call, a, b, mask, i, row, piece);
        }
        counts[i] = piece.count - before;
      }
    };
  });
  return pieces.release();
}

// Copy columns and values to where `offsets` say, and give back their memory, so that both together
// take no more than the result.
template <class Index, class Real>
void copy_rows(const Product& call, Pieces& pieces, Index* columns) {
  const auto* offsets = static_cast<const Index*>(call.offsets);
  for_chunks(call, [&] {
    return [&](int64_t chunk, int64_t first, int64_t) {
      const Piece& piece = pieces.of[chunk];
      std::copy_n(piece.columns, piece.count, columns + offsets[first]);
      if (call.values != nullptr)
        std::copy_n(static_cast<const Real*>(piece.values), piece.count,
                    static_cast<Real*>(call.values) + offsets[first]);
      pieces.give_back(piece, call.values == nullptr ? 0 : sizeof(Real));
    };
  });
}

// c_ij = sum_k a_ik b_kj, of the columns of C.
template <class Index, class Real, bool IsMasked, bool IsWhole>
void multiply_row(const Product& call, const Matrix<Index>& a, const Matrix<Index>& b,
                  const Matrix<Index>& c, int64_t i, Row& row) {
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

// The same of a row with few products.
template <class Index, class Real>
void multiply_few(const Product& call, const Matrix<Index>& a, const Matrix<Index>& b,
                  const Matrix<Index>& c, int64_t i, FewProducts<Real>& few) {
  few.read(a, b, static_cast<const Real*>(call.left_values),
           static_cast<const Real*>(call.right_values), a.offsets[i], a.offsets[i + 1]);
  few.find(c.columns + c.offsets[i], c.offsets[i + 1] - c.offsets[i]);
  Real* sums = static_cast<Real*>(call.values) + c.offsets[i];
  std::fill_n(sums, c.offsets[i + 1] - c.offsets[i], Real{});
  for (int64_t j = 0; j < few.count; ++j)
    if (few.ranks[j] >= 0) sums[few.ranks[j]] += few.values[j];
}

template <class Index, class Real, bool IsMasked>
void multiply(const Product& call) {
  const auto a = matrix<Index>(call.left_offsets, call.left_columns);
  const auto b = matrix<Index>(call.right_offsets, call.right_columns);
  const auto c = matrix<Index>(call.offsets, call.columns);
  const bool is_whole = call.window_columns >= call.num_columns;
  for_chunks(call, [&] {
    return [&, row = row_of(call), few = FewProducts<Real>()](int64_t, int64_t first,
                                                              int64_t end) mutable {
      for (int64_t i = first; i < end; ++i) {
        const int64_t from = a.offsets[i], upto = a.offsets[i + 1];
        const int64_t length = c.offsets[i + 1] - c.offsets[i];
        if (length <= kFew && count_products(a, b, from, upto) <= kFew)
          multiply_few(call, a, b, c, i, few);
        else if (is_whole)
          multiply_row<Index, Real, IsMasked, true>(call, a, b, c, i, row);
        else
          multiply_row<Index, Real, IsMasked, false>(call, a, b, c, i, row);
      }
    };
  });
}

// Return the ends of the ranges of rows of B that threads own, of about as many products each.
template <class Index>
std::vector<int64_t> divide_inner(const Product& call, const Matrix<Index>& a,
                                  const Matrix<Index>& b) {
  constexpr int64_t kBuckets = 4096;
  const int64_t num_inner = std::max<int64_t>(call.num_inner, 1);
  const int64_t width = (num_inner + kBuckets - 1) / kBuckets;
  std::vector<int64_t> products(kBuckets), ends;
  int64_t total = 0;
  for (int64_t p = 0; p < a.offsets[call.num_rows]; ++p) {
    const int64_t k = a.columns[p], count = b.offsets[k + 1] - b.offsets[k];
    products[k / width] += count;
    total += count;
  }
  int64_t sum = 0;
  for (int64_t bucket = 0; bucket < kBuckets; ++bucket) {
    sum += products[bucket];
    const auto share = static_cast<int64_t>(ends.size()) + 1;
    if (share < call.num_threads && sum * call.num_threads >= total * share)
      ends.push_back((bucket + 1) * width);
  }
  ends.push_back(num_inner);
  return ends;
}

// dA_ik = sum_j dC_ij b_kj and dB_kj = sum_i a_ik dC_ij, of the rows k of B that a thread owns. Both
// go on from the window before.
template <class Index, class Real, bool IsMasked, bool IsWhole>
void differentiate_row(const Product& call, const Matrix<Index>& a, const Matrix<Index>& b,
                       const Matrix<Index>& c, int64_t i, int64_t p_from, int64_t p_upto,
                       Row& row) {
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

// The same of a row with few products.
template <class Index, class Real>
void differentiate_few(const Product& call, const Matrix<Index>& a, const Matrix<Index>& b,
                       const Matrix<Index>& c, int64_t i, int64_t p_from, int64_t p_upto,
                       FewProducts<Real>& few) {
  const auto* left = static_cast<const Real*>(call.left_values);
  const auto* right = static_cast<const Real*>(call.right_values);
  auto* dleft = static_cast<Real*>(call.left_gradient);
  auto* dright = static_cast<Real*>(call.right_gradient);
  const Real* of = static_cast<const Real*>(call.values) + c.offsets[i];
  few.read(a, b, static_cast<const Real*>(nullptr), right, p_from, p_upto);
  few.find(c.columns + c.offsets[i], c.offsets[i + 1] - c.offsets[i]);
  const int32_t* rank = few.ranks;
  for (int64_t p = p_from; p < p_upto; ++p) {
    const int64_t k = a.columns[p];
    Real sum{};
    for (int64_t q = b.offsets[k]; q < b.offsets[k + 1]; ++q, ++rank) {
      if (*rank < 0) continue;
      sum += of[*rank] * right[q];
      if (dright != nullptr) dright[q] += left[p] * of[*rank];
    }
    if (dleft != nullptr) dleft[p] = sum;
  }
}

template <class Index, class Real, bool IsMasked>
void differentiate(const Product& call) {
  const auto a = matrix<Index>(call.left_offsets, call.left_columns);
  const auto b = matrix<Index>(call.right_offsets, call.right_columns);
  const auto c = matrix<Index>(call.offsets, call.columns);
  const bool is_whole = call.window_columns >= call.num_columns;
  const std::vector<int64_t> ends = divide_inner(call, a, b);
  std::atomic<int64_t> next{0};
  parallel(static_cast<int>(ends.size()), [&](int, int) {
    Row row = row_of(call);
    FewProducts<Real> few;
    for (int64_t part; (part = next.fetch_add(1)) < static_cast<int64_t>(ends.size());) {
      const int64_t k_from = part == 0 ? 0 : ends[part - 1], k_upto = ends[part];
      for (int64_t i = 0; i < call.num_rows; ++i) {
        int64_t from = a.offsets[i], upto = a.offsets[i + 1];
        while (from < upto && a.columns[from] < k_from) ++from;
        while (from < upto && a.columns[upto - 1] >= k_upto) --upto;
        if (from == upto) continue;
        if (c.offsets[i + 1] - c.offsets[i] <= kFew && count_products(a, b, from, upto) <= kFew)
          differentiate_few(call, a, b, c, i, from, upto, few);
        else if (is_whole)
          differentiate_row<Index, Real, IsMasked, true>(call, a, b, c, i, from, upto, row);
        else
          differentiate_row<Index, Real, IsMasked, false>(call, a, b, c, i, from, upto, row);
      }
    }
  });
}

template <class Index, class Real>
void run(const Product& call, bool is_gradient) {
  if (is_gradient)
    call.is_masked ? differentiate<Index, Real, true>(call)
                   : differentiate<Index, Real, false>(call);
  else
    call.is_masked ? multiply<Index, Real, true>(call) : multiply<Index, Real, false>(call);
}

void run_values(const Product& call, bool is_gradient) {
  if (call.is_wide)
    call.is_double ? run<int64_t, double>(call, is_gradient)
                   : run<int64_t, float>(call, is_gradient);
  else
    call.is_double ? run<int32_t, double>(call, is_gradient)
                   : run<int32_t, float>(call, is_gradient);
}

// Return 0 for offsets that rise from 0 to `count` and sorted, unique columns within the matrix, 1
// for columns that are not sorted or unique, -1 for other offsets, -2 for columns outside.
template <class Index>
int64_t check(const Matrix<Index>& of, int64_t num_rows, int64_t num_columns, int64_t count) {
  if (of.offsets[0] != 0 || of.offsets[num_rows] != count) return -1;
  for (int64_t i = 0; i < num_rows; ++i)
    if (of.offsets[i] > of.offsets[i + 1]) return -1;
  bool is_outside = false, is_unsorted = false;
  for (int64_t i = 0; i < num_rows; ++i) {
    int64_t last = -1;
    for (int64_t p = of.offsets[i]; p < of.offsets[i + 1]; ++p) {
      const int64_t column = of.columns[p];
      is_outside |= column < 0 || column >= num_columns;
      is_unsorted |= column <= last;
      last = column;
    }
  }
  return is_outside ? -2 : is_unsorted;
}

}  // namespace

extern "C" {

int64_t penstock_check_csr(const void* offsets, const void* columns, int64_t num_rows,
                           int64_t num_columns, int64_t count, int64_t is_wide) {
  return is_wide ? check(matrix<int64_t>(offsets, columns), num_rows, num_columns, count)
                 : check(matrix<int32_t>(offsets, columns), num_rows, num_columns, count);
}

// Return the rows of C, to be copied once `counts` are summed, or null where memory is missing.
void* penstock_find_rows(const Product* call, int64_t* counts) {
  if (call->is_wide)
    return call->is_double ? find_rows<int64_t, double>(*call, counts)
                           : find_rows<int64_t, float>(*call, counts);
  return call->is_double ? find_rows<int32_t, double>(*call, counts)
                         : find_rows<int32_t, float>(*call, counts);
}

// Copy the rows, unless `columns` is null, and free them.
void penstock_copy_rows(const Product* call, void* pieces, void* columns) {
  std::unique_ptr<Pieces> owned(static_cast<Pieces*>(pieces));
  if (columns == nullptr) return;
  if (call->is_wide) {
    auto* to = static_cast<int64_t*>(columns);
    call->is_double ? copy_rows<int64_t, double>(*call, *owned, to)
                    : copy_rows<int64_t, float>(*call, *owned, to);
  } else {
    auto* to = static_cast<int32_t*>(columns);
    call->is_double ? copy_rows<int32_t, double>(*call, *owned, to)
                    : copy_rows<int32_t, float>(*call, *owned, to);
  }
}

void penstock_multiply(const Product* call) { run_values(*call, false); }

void penstock_differentiate(const Product* call) { run_values(*call, true); }

}  // extern "C"
