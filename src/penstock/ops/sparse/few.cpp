// Rows of a product that have few products; after `columns.cpp`.

namespace {

constexpr int64_t kFew = 256;  // products of a row whose columns are compared with each other

// The products of a row of C, where they are few.
template <class Real>
struct FewProducts {
  alignas(64) int32_t columns[kFew];
  alignas(64) int32_t ranks[kFew];
  alignas(64) int32_t sorted[kFew];  // by rank: columns of C, -1 for none
  Real values[kFew];
  Real totals[kFew];  // by rank
  int64_t count = 0;

  template <class Index>
  void read(const Matrix<Index>& a, const Matrix<Index>& b, const Real* left, const Real* right,
            int64_t from, int64_t upto) {
    int64_t at = 0;  // not the member: each store of a column might change that
    for (int64_t p = from; p < upto; ++p) {
      const int64_t k = a.columns[p], first = b.offsets[k], end = b.offsets[k + 1];
      for (int64_t q = first; q < end; ++q)
        columns[at + q - first] = static_cast<int32_t>(b.columns[q]);
      if (left != nullptr)
        for (int64_t q = first; q < end; ++q) values[at + q - first] = left[p] * right[q];
      at += end - first;
    }
    if (left == nullptr) std::fill_n(values, at, Real{});
    count = at;
  }

  // Write the columns of C to `to` and the sums, if there is room, and what may be beyond the end of
  // either. Return how many there are.
  int64_t take(uint32_t* to, Real* sums) {
    rank();
    int64_t length = 0;
    for (int64_t i = 0; i < count; ++i) {  // products of one column have one rank, and leave gaps
      sorted[ranks[i]] = columns[i];
      totals[ranks[i]] += values[i];
    }
    for (int64_t i = 0; i < count; ++i) {
      to[length] = static_cast<uint32_t>(sorted[i]);
      if (sums != nullptr) sums[length] = totals[i];
      length += sorted[i] >= 0;
    }
    return length;
  }

 private:
  typedef int32_t Loose __attribute__((vector_size(kLanes * 4), may_alias));

  // Set of each product the number of columns that are below its own.
  void rank() {
    for (int64_t first = 0; first < count;) {
      const int64_t left = count - first;
      first += left > 2 * kLanes ? rank_vectors<4>(first)
               : left > kLanes   ? rank_vectors<2>(first)
                                 : rank_vectors<1>(first);
    }
  }

  // Vectors are read as such: copied as bytes they would be halves, of which none is read whole.
  template <int Count>
  int64_t rank_vectors(int64_t first) {
    Bits own[Count], below[Count] = {};
    UNROLLED for (int v = 0; v < Count; ++v)
      own[v] = *reinterpret_cast<const Loose*>(columns + first + v * kLanes);
    for (int64_t i = 0; i < count; ++i)
      UNROLLED for (int v = 0; v < Count; ++v) below[v] -= columns[i] < own[v];
    UNROLLED for (int v = 0; v < Count; ++v) {
      *reinterpret_cast<Loose*>(ranks + first + v * kLanes) = below[v];
      *reinterpret_cast<Loose*>(sorted + first + v * kLanes) = Bits{} - 1;
    }
    std::memset(totals + first, 0, Count * kLanes * sizeof(Real));
    return Count * kLanes;
  }
};

constexpr int64_t kMostLanes = int64_t{1} << 27;  // columns that are numbered together with a lane

#ifdef __AVX512F__

template <class Real>
constexpr bool kHasLanes = std::is_same_v<Real, float>;

// Sort 16 numbers by Batcher's bitonic network: runs of K become sorted as lanes that differ in the
// bit J of their number are compared, for J from K / 2 to 1.
template <int J>
inline __m512i swap_lanes(__m512i of) {
  if constexpr (J == 1) return _mm512_shuffle_epi32(of, _MM_PERM_CDAB);
  if constexpr (J == 2) return _mm512_shuffle_epi32(of, _MM_PERM_BADC);
  if constexpr (J == 4) return _mm512_shuffle_i32x4(of, of, _MM_PERM_CDAB);
  return _mm512_shuffle_i32x4(of, of, _MM_PERM_BADC);
}

template <int K, int J = K / 2>
inline __m512i merge_lanes(__m512i of) {
  constexpr auto kLarger = [] {  // lanes that keep the larger number
    uint32_t mask = 0;
    for (int lane = 0; lane < 16; ++lane)
      mask |= static_cast<uint32_t>(((lane & J) != 0) != ((lane & K) != 0)) << lane;
    return static_cast<__mmask16>(mask);
  }();
  const __m512i other = swap_lanes<J>(of);
  of = _mm512_mask_max_epi32(_mm512_min_epi32(of, other), kLarger, of, other);
  if constexpr (J > 1) return merge_lanes<K, J / 2>(of);
  return of;
}

// Up to 16 columns, of 32 bits each. Those of a list are read into the lanes from `at` on that a mask
// has; nothing else of the list is.
template <class Index>
struct LaneColumns;

template <>
struct LaneColumns<int32_t> {
  __m512i all = _mm512_set1_epi32(kMostLanes - 1);

  void read(uint32_t mask, int64_t at, const int32_t* from) {
    all = _mm512_mask_loadu_epi32(all, static_cast<__mmask16>(mask), from - at);
  }

  __m512i get() const { return all; }
};

template <>
struct LaneColumns<int64_t> {
  __m512i near = _mm512_set1_epi64(kMostLanes - 1), far = near;

  void read(uint32_t mask, int64_t at, const int64_t* from) {
    near = _mm512_mask_loadu_epi64(near, static_cast<__mmask8>(mask), from - at);
    far = _mm512_mask_loadu_epi64(far, static_cast<__mmask8>(mask >> 8), from - at + 8);
  }

  __m512i get() const {
    const __m512i low = _mm512_castsi256_si512(_mm512_cvtepi64_epi32(near));
    return _mm512_inserti64x4(low, _mm512_cvtepi64_epi32(far), 1);
  }
};

inline uint32_t mask_of(int64_t count) { return (1u << count) - 1; }

// Add up sums of one column, which lie side by side, and return how many columns are left.
inline int64_t add_repeats(uint32_t* to, float* sums, int64_t count) {
  int64_t last = 0;
  for (int64_t i = 1; i < count; ++i) {
    const bool is_new = to[i] != to[last];
    last += is_new;
    to[last] = to[i];
    if (sums != nullptr) sums[last] = is_new ? sums[i] : sums[last] + sums[i];
  }
  return last + 1;
}

// Do what `FewProducts` does for a row of at most 16 products, in registers: its columns are sorted
// with the lane that each has, so that equal ones stay in the order of their products.
template <class Index>
int64_t take_lanes(const Matrix<Index>& a, const Matrix<Index>& b, const float* left,
                   const float* right, int64_t from, int64_t upto, uint32_t* to, float* sums) {
  LaneColumns<Index> found;
  __m512 values = _mm512_setzero_ps();
  int64_t count = 0;
  for (int64_t p = from; p < upto; ++p) {
    const int64_t k = a.columns[p], first = b.offsets[k], length = b.offsets[k + 1] - first;
    const uint32_t mask = mask_of(length) << count;
    found.read(mask, count, b.columns + first);
    if (sums != nullptr) {
      const auto lanes = static_cast<__mmask16>(mask);
      const __m512 of = _mm512_maskz_loadu_ps(lanes, right + first - count);
      values = _mm512_mask_mul_ps(values, lanes, _mm512_set1_ps(left[p]), of);
    }
    count += length;
  }
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i sorted = _mm512_or_si512(_mm512_slli_epi32(found.get(), 4), lane);
  sorted = merge_lanes<16>(merge_lanes<8>(merge_lanes<4>(merge_lanes<2>(sorted))));
  const __m512i columns = _mm512_srli_epi32(sorted, 4);
  _mm512_storeu_si512(to, columns);
  if (sums != nullptr)  // of each the lane are the low bits; 0, as a sum, not -0
    _mm512_storeu_ps(sums, _mm512_setzero_ps() + _mm512_permutexvar_ps(sorted, values));
  const __m512i before = _mm512_alignr_epi32(columns, _mm512_set1_epi32(-1), 15);
  const uint32_t repeats = _mm512_cmpeq_epi32_mask(columns, before) & mask_of(count);
  return repeats == 0 ? count : add_repeats(to, sums, count);
}

// A row of C of at most 16 columns, which has all those of some rows of B. Both are sorted, so the
// numbers where C has the columns of a row of B come in the row's order.
template <class Index>
class LaneRow {
 public:
  LaneRow(const Index* columns, const float* values, int64_t count) {
    LaneColumns<Index> found;
    found.read(mask_of(count), 0, columns);
    columns_ = found.get();
    values_ = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask_of(count)), values);
  }

  // Write the numbers at `count` columns of a row of B.
  void take(const Index* columns, int64_t count, float* to) const {
    uint32_t mask = 0;
    for (int64_t i = 0; i < count; ++i)
      mask |= _mm512_cmpeq_epi32_mask(columns_, _mm512_set1_epi32(static_cast<int32_t>(columns[i])));
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), values_));
  }

 private:
  __m512i columns_;
  __m512 values_;
};

// Gradients of entries of A whose rows, there and in C, are short. Those of a thread are listed first: a
// processor cannot foresee which rows of B are the thread's.
template <class Index, class Real>
class ShortRows {
 public:
  ShortRows(const Product& call, const Matrix<Index>& a, const Matrix<Index>& b,
            const Matrix<Index>& c)
      : call_(call), a_(a), b_(b), c_(c) {}

  // Take a row, if it is short; else let what was taken be done, as sums are in the order of rows.
  bool take(int64_t i, int64_t k_from, int64_t k_upto) {
    const int64_t from = a_.offsets[i], upto = a_.offsets[i + 1];
    const bool is_short = upto - from <= kLanes && c_.offsets[i + 1] - c_.offsets[i] <= kLanes;
    if (!is_short || count_ + kLanes > kMost) run();
    if (!is_short) return false;
    for (int64_t p = from; p < upto; ++p) {
      entries_[count_] = {i, p};
      count_ += a_.columns[p] >= k_from && a_.columns[p] < k_upto;
    }
    return true;
  }

  // Threads have entries side by side: each writes its sums at once, or they would wait for lines.
  void run() {
    Real sums[kMost];
    for (int64_t n = 0; n < count_; ++n) sums[n] = differentiate(entries_[n].row, entries_[n].place);
    auto* dleft = static_cast<Real*>(call_.left_gradient);
    if (dleft != nullptr)
      for (int64_t n = 0; n < count_; ++n) dleft[entries_[n].place] = sums[n];
    count_ = 0;
  }

 private:
  static constexpr int64_t kMost = 512;
  struct Entry {
    int64_t row, place;
  };

  Real differentiate(int64_t i, int64_t p) {
    const auto* right = static_cast<const Real*>(call_.right_values);
    auto* dright = static_cast<Real*>(call_.right_gradient);
    const int64_t k = a_.columns[p], from = b_.offsets[k], count = b_.offsets[k + 1] - from;
    const int64_t c_from = c_.offsets[i];
    const LaneRow<Index> row(c_.columns + c_from, static_cast<const Real*>(call_.values) + c_from,
                             c_.offsets[i + 1] - c_from);
    row.take(b_.columns + from, count, given_);
    Real sum{};
    for (int64_t j = 0; j < count; ++j) sum += given_[j] * right[from + j];
    if (dright == nullptr) return sum;
    const Real left = static_cast<const Real*>(call_.left_values)[p];
    for (int64_t j = 0; j < count; ++j) dright[from + j] += left * given_[j];
    return sum;
  }

  const Product& call_;
  const Matrix<Index>&a_, &b_, &c_;
  alignas(64) Real given_[kLanes];
  Entry entries_[kMost];
  int64_t count_ = 0;
};

#else

template <class Real>
constexpr bool kHasLanes = false;

#endif

// Rows that are not taken are differentiated one by one.
struct NoRows {
  bool take(int64_t, int64_t, int64_t) { return false; }
  void run() {}
};

}  // namespace
