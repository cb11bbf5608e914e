// Vectors of floats, as wide as the processor's registers, and functions of them; a part, after the
// threads, of every library with such arithmetic.

#include <cstdint>
#include <cstring>
#include <utility>

#define UNROLLED _Pragma("GCC unroll 16")

namespace {

#ifdef __AVX512F__
constexpr int64_t kLanes = 16;
#else
constexpr int64_t kLanes = 8;
#endif
typedef float Vector __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));

inline Vector load(const float* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, Vector value) { std::memcpy(to, &value, sizeof value); }

inline Vector splat(float value) { return value - Vector{}; }

inline Vector as_vector(Words bits) { return reinterpret_cast<Vector>(bits); }

// Return the vector of left's and right's lanes that `index` names; right's begin at kLanes.
template <int Half, bool IsFar, size_t... Lane>
inline Vector pick(Vector left, Vector right, std::index_sequence<Lane...>) {
  constexpr int kFar = IsFar ? Half : 0;
#ifdef __clang__
  return __builtin_shufflevector(left, right, (Lane / Half * 2 * Half + Lane % Half + kFar)...);
#else
  const Bits from = {static_cast<int32_t>(Lane / Half * 2 * Half + Lane % Half + kFar)...};
  return __builtin_shuffle(left, right, from);
#endif
}

using AllLanes = std::make_index_sequence<kLanes>;

inline Vector larger(Vector left, Vector right) { return left <= right ? right : left; }

// Add up the lanes of each of `Count` vectors: the sums are the lanes of the first vectors.
template <int Count, int Half = kLanes / 2>
inline void add_lanes(Vector* sums) {
  UNROLLED for (int i = 0; i < Count / 2; ++i) {
    const Vector left = sums[2 * i], right = sums[2 * i + 1];
    sums[i] =
        pick<Half, false>(left, right, AllLanes()) + pick<Half, true>(left, right, AllLanes());
  }
  if constexpr (Half > 1) add_lanes<Count / 2, Half / 2>(sums);
}

template <int Half = kLanes / 2>
inline float sum_lanes(Vector value) {
  value = pick<Half, false>(value, value, AllLanes()) + pick<Half, true>(value, value, AllLanes());
  if constexpr (Half > 1) return sum_lanes<Half / 2>(value);
  return value[0];
}

template <int Half = kLanes / 2>
inline float max_lanes(Vector value) {
  value = larger(pick<Half, false>(value, value, AllLanes()),
                 pick<Half, true>(value, value, AllLanes()));
  if constexpr (Half > 1) return max_lanes<Half / 2>(value);
  return value[0];
}

// Return exp(x) for x <= 0, within 1.2e-7 of it; 0 where that is below the least normal float.
//
//     n = round(x / log 2),  r = x - n log 2,  exp(x) = 2^n (1 + r + r^2 P(r))
inline Vector exp_of(Vector x) {
  const Vector shifted = x * 0x1.715476p+0f + 0x1.8p23f;  // the lowest bits are n
  const Vector n = shifted - 0x1.8p23f;
  const Vector r = (x - n * 0x1.62e400p-1f) - n * 0x1.7f7d1cp-20f;
  Vector p = r * 0x1.6d4328p-10f + 0x1.120b74p-7f;
  p = p * r + 0x1.5554eap-5f;
  p = p * r + 0x1.5554dcp-3f;
  p = p * r + 0.5f;
  p = (p * r) * r + r;
  p = p + 1.0f;
  const Vector power = as_vector((reinterpret_cast<Words>(shifted) << 23) + 0x3f800000u);
  return x < -87.0f ? Vector{} : p * power;
}

inline float exp_of(float x) { return exp_of(splat(x))[0]; }

// Return tanh(x): near 0 as x + x^3 P(x^2), so that it keeps its relative precision.
inline Vector tanh_of(Vector x) {
  const Vector size = x < 0.0f ? -x : x, square = x * x;
  Vector p = square * 0.00229582f - 0.00834696f;
  p = p * square + 0.02176995f;
  p = p * square - 0.0539594f;
  p = p * square + 0.13333304f;
  p = p * square - 0.33333333f;
  const Vector near = size + size * (square * p);
  const Vector e = exp_of(-2.0f * size);
  const Vector value = size < 0.625f ? near : (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -value : value;
}

}  // namespace
