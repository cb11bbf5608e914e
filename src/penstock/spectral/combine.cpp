// Rows of a sparse matrix times a few vectors, combined with two more; after
// `codegen/threads.cpp`.
//
//     out_q = alpha A x_q + gamma z_q + beta out_q        for q in [0, b)
//
// One pass over the matrix serves a step of the Chebyshev recurrence, which would otherwise read and
// write its vectors three times more. Each vector is contiguous. An element of the result has one
// thread and one order, so that the bits do not depend on the number of threads.

#include <cstdint>

namespace {

template <class Real>
struct Complex {
  Real re, im;
};

template <class Real>
inline Real zero(Real) { return 0; }
template <class Real>
inline Complex<Real> zero(Complex<Real>) { return {0, 0}; }

template <class Real>
inline void add_product(Real& sum, Real a, Real x) { sum += a * x; }
template <class Real>
inline void add_product(Complex<Real>& sum, Complex<Real> a, Complex<Real> x) {
  sum.re += a.re * x.re - a.im * x.im;
  sum.im += a.re * x.im + a.im * x.re;
}

template <class Real>
inline Real scaled(double by, Real x) { return static_cast<Real>(by) * x; }
template <class Real>
inline Complex<Real> scaled(double by, Complex<Real> x) {
  return {static_cast<Real>(by) * x.re, static_cast<Real>(by) * x.im};
}

template <class Real>
inline Real plus(Real a, Real b) { return a + b; }
template <class Real>
inline Complex<Real> plus(Complex<Real> a, Complex<Real> b) { return {a.re + b.re, a.im + b.im}; }

// As in `_native.py`.
struct Combination {
  const void* offsets;  // of the rows, the first of which may lie behind the first entry
  const void* columns;
  const void* values;
  const void* x;
  const void* z;
  void* out;
  int64_t first_row;   // of the result and of z that belongs to the first row
  int64_t num_rows;
  int64_t num_vectors;
  int64_t x_stride;    // elements from a vector of x to the next
  int64_t out_stride;  // and of z and out
  double alpha, gamma, beta;
  int64_t is_wide;     // indices have 64 bits
  int64_t kind;        // 0 float, 1 double, 2 complex of float, 3 complex of double
  int64_t num_threads;
};

constexpr int kVectors = 4;  // that share a pass over a row

template <int width, class Value, class Index>
void rows(const Combination& c, int64_t begin, int64_t end, int64_t q) {
  const Index* offsets = static_cast<const Index*>(c.offsets);
  const Index* columns = static_cast<const Index*>(c.columns) - offsets[0];
  const Value* values = static_cast<const Value*>(c.values) - offsets[0];
  const Value* x = static_cast<const Value*>(c.x) + q * c.x_stride;
  const Value* z = static_cast<const Value*>(c.z) + q * c.out_stride + c.first_row;
  Value* out = static_cast<Value*>(c.out) + q * c.out_stride + c.first_row;
  for (int64_t row = begin; row < end; ++row) {
    Value sums[width];
    for (int i = 0; i < width; ++i) sums[i] = zero(Value());
    for (Index at = offsets[row]; at < offsets[row + 1]; ++at) {
      const Value a = values[at];
      const Value* place = x + columns[at];
      for (int i = 0; i < width; ++i) add_product(sums[i], a, place[i * c.x_stride]);
    }
    for (int i = 0; i < width; ++i) {
      Value& to = out[i * c.out_stride + row];
      Value total = scaled(c.alpha, sums[i]);
      if (c.gamma != 0) total = plus(total, scaled(c.gamma, z[i * c.out_stride + row]));
      if (c.beta != 0) total = plus(total, scaled(c.beta, to));
      to = total;
    }
  }
}

template <class Value, class Index>
void combine(const Combination& c) {
  const Index* offsets = static_cast<const Index*>(c.offsets);
  const int64_t count = offsets[c.num_rows] - offsets[0] + c.num_rows;
  parallel(static_cast<int>(c.num_threads), [&](int64_t thread, int64_t threads) {
    // Rows are split such that threads have as many entries and rows.
    auto bound = [&](int64_t which) {
      int64_t low = 0, high = c.num_rows;
      const int64_t wanted = static_cast<int64_t>(static_cast<double>(count) * which / threads);
      if (which == threads) return high;
      while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (offsets[middle] - offsets[0] + middle < wanted) low = middle + 1;
        else high = middle;
      }
      return low;
    };
    const int64_t begin = bound(thread), end = bound(thread + 1);
    int64_t q = 0;
    for (; q + kVectors <= c.num_vectors; q += kVectors) rows<kVectors, Value, Index>(c, begin, end, q);
    for (; q + 2 <= c.num_vectors; q += 2) rows<2, Value, Index>(c, begin, end, q);
    for (; q < c.num_vectors; ++q) rows<1, Value, Index>(c, begin, end, q);
  });
}

template <class Index>
void combine_kind(const Combination& c) {
  switch (c.kind) {
    case 0: return combine<float, Index>(c);
    case 1: return combine<double, Index>(c);
    case 2: return combine<Complex<float>, Index>(c);
    default: return combine<Complex<double>, Index>(c);
  }
}

}  // namespace

extern "C" void penstock_combine_rows(const Combination* call) {
  if (call->is_wide) combine_kind<int64_t>(*call);
  else combine_kind<int32_t>(*call);
}
