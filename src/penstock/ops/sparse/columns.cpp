// Columns of a row of a product, and where each stands in its row; the first part of `spgemm.cpp`, after
// `codegen/vectors.cpp`.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t kWordBits = 64;

template <class Index>
struct Matrix {
  const Index* offsets;
  const Index* columns;
};

// The rows of a product, as in `_native.py`; null where a call has none.
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

// The same of all columns: one more than the place of each that a row of C has. Others keep what the
// row before left, unless a row is cleared.
class Table {
 public:
  Table(int64_t num_columns, bool is_cleared)
      : next_(static_cast<uint32_t*>(is_cleared ? std::calloc(num_columns, sizeof(uint32_t))
                                                : std::malloc(num_columns * sizeof(uint32_t)))) {
    if (next_ == nullptr) throw std::bad_alloc();
  }

  template <class Index>
  void rank(const Index* columns, int64_t count, int64_t) {
    for (int64_t i = 0; i < count; ++i) next_.get()[columns[i]] = static_cast<uint32_t>(i + 1);
  }

  template <class Index>
  void clear(const Index* columns, int64_t count, int64_t) {
    for (int64_t i = 0; i < count; ++i) next_.get()[columns[i]] = 0;
  }

  bool has(int64_t column) const { return next_.get()[column] != 0; }

  int64_t place(int64_t column) const { return int64_t{next_.get()[column]} - 1; }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<uint32_t, Free> next_;
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

}  // namespace
