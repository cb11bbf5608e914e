// Tiles of block-sparse attention: products, transposes and the rows of blocks.
//
// The lanes of all vectors run over the tokens of the block that stays (queries for the output and
// dQ, keys for dK and dV), so that maxima, sums and masks are those of lanes, with no sum across
// them. Only the block that stays is transposed, once; blocks that pass are read as they lie.
//
// A panel is kVecs vectors of tokens that stay. A product computes some rows of a panel in
// registers:
//
//     c[r][lane] (+)= sum_t a(r, t) b[t][lane]

#include <atomic>
#include <limits>

namespace {

constexpr int kVecs = 2;       // vectors of a panel
constexpr int64_t kGroup = 8;  // rows of a block that passes are padded to whole groups
// Rows of a product: two vectors of each, those of the panel and one of the other operand fill most
// registers, and are enough sums for two additions in each cycle that take four.
#ifdef __AVX512F__
constexpr int kRows = 8;
#else
constexpr int kRows = 6;
#endif
constexpr int kFewRows = 4;  // of products that make a whole group of what is left

// Call `body(size, r)` with pieces of rows [first, end), whole groups, of kRows or kFewRows.
template <class Body>
inline void for_rows(int64_t first, int64_t end, Body body) {
  // Of 6 n + 4 rows one piece has four, of 6 n + 2 two: whole groups have more than two rows.
  const int64_t few = kRows == 8 ? 0 : (kRows - (end - first) % kRows) / 2 % 3;
  int64_t r = first;
  for (; r < end - few * kFewRows; r += kRows) body(std::integral_constant<int, kRows>(), r);
  for (; r < end; r += kFewRows) body(std::integral_constant<int, kFewRows>(), r);
}

// Compute `Count` rows of a panel. `Along`: a(r, t) is a[r * a_stride + t]; else a[t * a_stride + r].
template <class Real, int Count, int Vecs, bool Along, bool Adds>
inline void multiply_rows(const Real* a, int64_t a_stride, const Real* b, int64_t b_stride, Real* c,
                          int64_t c_stride, int64_t steps) {
  constexpr int kCount = Lanes<Real>::kCount;
  Vec<Real> sums[Count][Vecs] = {};
  if constexpr (Adds) {
    UNROLLED for (int r = 0; r < Count; ++r)
      UNROLLED for (int i = 0; i < Vecs; ++i)
        sums[r][i] = load_vec<Real>(c + r * c_stride + i * kCount);
  }
  for (int64_t t = 0; t < steps; ++t) {
    Vec<Real> right[Vecs];
    UNROLLED for (int i = 0; i < Vecs; ++i) right[i] = load_vec<Real>(b + t * b_stride + i * kCount);
    UNROLLED for (int r = 0; r < Count; ++r) {
      const Real left = Along ? a[r * a_stride + t] : a[t * a_stride + r];
      UNROLLED for (int i = 0; i < Vecs; ++i) sums[r][i] += left * right[i];
    }
  }
  UNROLLED for (int r = 0; r < Count; ++r)
    UNROLLED for (int i = 0; i < Vecs; ++i)
      store_vec<Real>(c + r * c_stride + i * kCount, sums[r][i]);
}

// scores[r][lane] = sum_t rows[r][t] stays[t][lane], of rows [first, end), whole groups.
template <class Real>
inline void multiply_into_scores(const Real* rows, int64_t stride, const Real* stays, Real* scores,
                                 int64_t dim, int64_t first, int64_t end) {
  constexpr int64_t kWidth = kVecs * Lanes<Real>::kCount;
  for_rows(first, end, [&](auto count, int64_t r) {
    multiply_rows<Real, count, kVecs, true, false>(rows + r * stride, stride, stays, kWidth,
                                                   scores + r * kWidth, kWidth, dim);
  });
}

// Rows of a stripe of columns: with 64, in rows of 512 bytes, they have the same few places of a
// first-level cache, from which they are gone when the next columns of their lines are read.
constexpr int64_t kStripe = 32;

// sums[c][lane] += sum_r rows[r][c] weights[r][lane], over rows [first, end).
template <class Real>
inline void add_transposed(const Real* rows, int64_t stride, const Real* weights, Real* sums,
                           int64_t dim, int64_t first, int64_t end) {
  constexpr int64_t kWidth = kVecs * Lanes<Real>::kCount;
  for (int64_t r = first; r < end; r += kStripe)
    for_rows(0, dim, [&](auto count, int64_t c) {
      multiply_rows<Real, count, kVecs, false, true>(
          rows + r * stride + c, stride, weights + r * kWidth, kWidth, sums + c * kWidth, kWidth,
          std::min(kStripe, end - r));
    });
}

// sums[r][c] += sum_t weights[r][t] stays[t][c], of rows [first, end) and the tokens of a panel.
template <class Real>
inline void add_rows(const Real* weights, const Real* stays, int64_t stays_stride, Real* sums,
                     int64_t sums_stride, int64_t dim, int64_t first, int64_t end) {
  constexpr int64_t kCount = Lanes<Real>::kCount, kWidth = kVecs * kCount;
  for (int64_t c = 0; c < dim; c += 2 * kCount)
    for_rows(first, end, [&](auto count, int64_t r) {
      const Real* left = weights + r * kWidth;
      Real* to = sums + r * sums_stride + c;
      if (c + 2 * kCount <= dim)
        multiply_rows<Real, count, 2, true, true>(left, kWidth, stays + c, stays_stride, to,
                                                  sums_stride, kWidth);
      else
        multiply_rows<Real, count, 1, true, true>(left, kWidth, stays + c, stays_stride, to,
                                                  sums_stride, kWidth);
    });
}

// Exchange, between two rows, the lanes whose number has the bit `Bit`, and those without it.
template <class Real, int Bit, bool IsFar, size_t... Lane>
inline Vec<Real> exchange(Vec<Real> near, Vec<Real> far, std::index_sequence<Lane...>) {
  constexpr int kCount = Lanes<Real>::kCount;
#ifdef __clang__
  return __builtin_shufflevector(
      near, far, (IsFar ? (Lane & Bit ? kCount + Lane : Lane + Bit)
                        : (Lane & Bit ? kCount + Lane - Bit : Lane))...);
#else
  const Int<Real> from = {static_cast<typename std::remove_reference_t<decltype(Int<Real>{}[0])>>(
      IsFar ? (Lane & Bit ? kCount + Lane : Lane + Bit)
            : (Lane & Bit ? kCount + Lane - Bit : Lane))...};
  return __builtin_shuffle(near, far, from);
#endif
}

// Transpose a square of vectors: bit after bit of the numbers of row and lane changes places.
template <class Real, int Bit = Lanes<Real>::kCount / 2>
inline void transpose_square(Vec<Real>* rows) {
  constexpr int kCount = Lanes<Real>::kCount;
  using All = std::make_index_sequence<kCount>;
  UNROLLED for (int r = 0; r < kCount; ++r) {
    if (r & Bit) continue;
    const Vec<Real> near = rows[r], far = rows[r + Bit];
    rows[r] = exchange<Real, Bit, false>(near, far, All());
    rows[r + Bit] = exchange<Real, Bit, true>(near, far, All());
  }
  if constexpr (Bit > 1) transpose_square<Real, Bit / 2>(rows);
}

// to[c][r] = from[r][c] of a square.
template <class Real>
inline void transpose_square(const Real* from, int64_t from_stride, Real* to, int64_t to_stride) {
  constexpr int kCount = Lanes<Real>::kCount;
  Vec<Real> rows[kCount];
  UNROLLED for (int r = 0; r < kCount; ++r) rows[r] = load_vec<Real>(from + r * from_stride);
  transpose_square<Real>(rows);
  UNROLLED for (int r = 0; r < kCount; ++r) store_vec<Real>(to + r * to_stride, rows[r]);
}

}  // namespace
