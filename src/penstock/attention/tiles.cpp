// Tiles of block-sparse attention: products, transposes and the rows of blocks.
//
// The lanes of all vectors run over the tokens of the block that stays (queries for the output and
// dQ, keys for dK and dV), so that maxima, sums and masks are those of lanes, with no sum across
// them. Only the block that stays is transposed, once; blocks that pass are read as they lie.
//
// A panel is kVecs vectors of tokens that stay. A product computes kRows rows of a panel in
// registers:
//
//     c[r][lane] (+)= sum_t a(r, t) b[t][lane]

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

namespace {

template <class Real>
struct Lanes;

template <>
struct Lanes<float> {
  static constexpr int kCount = kLanes;
  typedef Vector Type;
  typedef Bits Int;
};

template <>
struct Lanes<double> {
  static constexpr int kCount = kLanes / 2;
  typedef double Type __attribute__((vector_size(kCount * 8), aligned(8), may_alias));
  typedef int64_t Int __attribute__((vector_size(kCount * 8)));
};

template <class Real>
using Vec = typename Lanes<Real>::Type;
template <class Real>
using Int = typename Lanes<Real>::Int;

constexpr int kVecs = 2;       // vectors of a panel
constexpr int64_t kGroup = 8;  // rows of a block that passes are padded to whole groups
#ifdef __AVX512F__
constexpr int kRows = 8;  // rows of a product: two vectors of each fill half of the registers
#else
constexpr int kRows = 4;
#endif

template <class Real>
inline Vec<Real> load_vec(const Real* from) {
  return *reinterpret_cast<const Vec<Real>*>(from);
}

template <class Real>
inline void store_vec(Real* to, Vec<Real> value) {
  *reinterpret_cast<Vec<Real>*>(to) = value;
}

template <class Real>
inline Vec<Real> fill_vec(Real value) {
  return value - Vec<Real>{};
}

template <class Real>
inline Vec<Real> exp_vec(Vec<Real> x) {
  if constexpr (sizeof(Real) == 4) {
    return exp_of(x);
  } else {
    Vec<Real> value;
    for (int lane = 0; lane < Lanes<Real>::kCount; ++lane) value[lane] = std::exp(x[lane]);
    return value;
  }
}

// Compute kRows rows of a panel. `Along`: a(r, t) is a[r * a_stride + t]; else a[t * a_stride + r].
template <class Real, int Vecs, bool Along, bool Adds>
inline void multiply_rows(const Real* a, int64_t a_stride, const Real* b, int64_t b_stride, Real* c,
                          int64_t c_stride, int64_t steps) {
  constexpr int kCount = Lanes<Real>::kCount;
  Vec<Real> sums[kRows][Vecs] = {};
  if constexpr (Adds) {
    UNROLLED for (int r = 0; r < kRows; ++r)
      UNROLLED for (int i = 0; i < Vecs; ++i)
        sums[r][i] = load_vec<Real>(c + r * c_stride + i * kCount);
  }
  for (int64_t t = 0; t < steps; ++t) {
    Vec<Real> right[Vecs];
    UNROLLED for (int i = 0; i < Vecs; ++i) right[i] = load_vec<Real>(b + t * b_stride + i * kCount);
    UNROLLED for (int r = 0; r < kRows; ++r) {
      const Real left = Along ? a[r * a_stride + t] : a[t * a_stride + r];
      UNROLLED for (int i = 0; i < Vecs; ++i) sums[r][i] += left * right[i];
    }
  }
  UNROLLED for (int r = 0; r < kRows; ++r)
    UNROLLED for (int i = 0; i < Vecs; ++i)
      store_vec<Real>(c + r * c_stride + i * kCount, sums[r][i]);
}

// scores[r][lane] = sum_t rows[r][t] stays[t][lane], of rows [first, end), whole groups.
template <class Real>
inline void multiply_into_scores(const Real* rows, int64_t stride, const Real* stays, Real* scores,
                                 int64_t dim, int64_t first, int64_t end) {
  constexpr int64_t kWidth = kVecs * Lanes<Real>::kCount;
  for (int64_t r = first; r < end; r += kRows)
    multiply_rows<Real, kVecs, true, false>(rows + r * stride, stride, stays, kWidth,
                                           scores + r * kWidth, kWidth, dim);
}

// sums[c][lane] += sum_r rows[r][c] weights[r][lane], over rows [first, end).
template <class Real>
inline void add_transposed(const Real* rows, int64_t stride, const Real* weights, Real* sums,
                           int64_t dim, int64_t first, int64_t end) {
  constexpr int64_t kWidth = kVecs * Lanes<Real>::kCount;
  for (int64_t c = 0; c < dim; c += kRows)
    multiply_rows<Real, kVecs, false, true>(rows + first * stride + c, stride,
                                           weights + first * kWidth, kWidth, sums + c * kWidth,
                                           kWidth, end - first);
}

// sums[r][c] += sum_t weights[r][t] stays[t][c], of rows [first, end) and the tokens of a panel.
template <class Real>
inline void add_rows(const Real* weights, const Real* stays, int64_t stays_stride, Real* sums,
                     int64_t sums_stride, int64_t dim, int64_t first, int64_t end) {
  constexpr int64_t kCount = Lanes<Real>::kCount, kWidth = kVecs * kCount;
  int64_t c = 0;
  for (; c + 2 * kCount <= dim; c += 2 * kCount)
    for (int64_t r = first; r < end; r += kRows)
      multiply_rows<Real, 2, true, true>(weights + r * kWidth, kWidth, stays + c, stays_stride,
                                         sums + r * sums_stride + c, sums_stride, kWidth);
  for (; c < dim; c += kCount)
    for (int64_t r = first; r < end; r += kRows)
      multiply_rows<Real, 1, true, true>(weights + r * kWidth, kWidth, stays + c, stays_stride,
                                         sums + r * sums_stride + c, sums_stride, kWidth);
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

// Numbers of 16 bits as float, and back, to the nearest.

inline void read_row(const float* from, int64_t count, float* to) {
  std::copy_n(from, count, to);  // which may be the same
}
inline void read_row(const double* from, int64_t count, double* to) {
  std::copy_n(from, count, to);
}
inline void read_row(const Brain* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i].bits) << 16;
    std::memcpy(to + i, &bits, sizeof bits);
  }
}
inline void read_row(const Half* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kPair <= count; i += kPair) {
    const Pair pair = load_pair(from + i);
    store(to + i, pair.near);
    store(to + i + kLanes, pair.far);
  }
  if (i == count) return;
  const Pair pair = load_some(from + i, count - i);
  float rest[kPair];
  store(rest, pair.near);
  store(rest + kLanes, pair.far);
  std::memcpy(to + i, rest, (count - i) * sizeof(float));
}

inline void write_row(const float* from, int64_t count, float* to) { read_row(from, count, to); }
inline void write_row(const double* from, int64_t count, double* to) { read_row(from, count, to); }
inline void write_row(const float* from, int64_t count, Brain* to) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof bits);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to[i].bits = is_nan ? 0x7fc0 : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  }
}
inline void write_row(const float* from, int64_t count, Half* to) {
  for (int64_t i = 0; i < count; ++i) {
    const auto half = static_cast<_Float16>(from[i]);
    std::memcpy(&to[i].bits, &half, sizeof half);
  }
}

}  // namespace

