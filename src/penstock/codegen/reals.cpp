// Vectors of float or double by one name, and rows of numbers of any dtype as float or double; a
// part, after the vectors, of libraries that compute in both.

#include <algorithm>
#include <cmath>
#include <type_traits>
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

// Call `body` with an element of a kind whose sums are of type Real: 0 float, 1 half, 2 bfloat16,
// 3 double.
template <class Real, class Body>
inline void with_element(int64_t kind, Body body) {
  if constexpr (sizeof(Real) == sizeof(double)) {
    body(double{});
  } else {
    switch (kind) {
      case 0: body(float{}); break;
      case 1: body(Half{}); break;
      default: body(Brain{});
    }
  }
}

inline int64_t pad_to(int64_t number, int64_t multiple) {
  return divide_up(number, multiple) * multiple;
}

// Memory of a thread, in whole lines.
template <class Real>
class Scratch {
 public:
  Real* take(int64_t count) {
    memory_.emplace_back(count + kLine / sizeof(Real));
    const auto address = reinterpret_cast<uintptr_t>(memory_.back().data());
    return memory_.back().data() + (kLine - address % kLine) % kLine / sizeof(Real);
  }

 private:
  std::vector<std::vector<Real>> memory_;
};

}  // namespace

