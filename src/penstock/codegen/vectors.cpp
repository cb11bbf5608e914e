// Vectors of floats, as wide as the processor's registers, functions of them, and numbers of 16 bits
// as floats; a part, after the threads, of every library with such arithmetic.

#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX512BW__) || defined(__F16C__)
#include <immintrin.h>
#endif

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
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

constexpr int64_t kPair = 2 * kLanes;  // elements that are loaded together

// By the vector's own type: compilers that prefer half a register would copy bytes in two halves.
inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }

inline void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }

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

struct Half { uint16_t bits; };
struct Brain { uint16_t bits; };

inline int64_t divide_up(int64_t number, int64_t by) { return (number + by - 1) / by; }

// kPair elements as two vectors, in the order that is cheapest to make: `place_of` says which.
struct Pair {
  Vector near, far;
};

inline Pair load_pair(const float* from) { return {load(from), load(from + kLanes)}; }

inline Pair split_brains(Words words) {
  return {as_vector(words << 16), as_vector(words & 0xffff0000u)};
}

inline Pair load_pair(const Brain* from) {
  typedef uint32_t Loose __attribute__((vector_size(kLanes * 4), aligned(2), may_alias));
  return split_brains(*reinterpret_cast<const Loose*>(from));
}

#if defined(__AVX512F__)
inline Pair widen_halves(__m512i words) {
  return {reinterpret_cast<Vector>(_mm512_cvtph_ps(_mm512_castsi512_si256(words))),
          reinterpret_cast<Vector>(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1)))};
}
inline Pair load_pair(const Half* from) { return widen_halves(_mm512_loadu_si512(from)); }
#elif defined(__F16C__)
inline Pair load_pair(const Half* from) {
  const auto* words = reinterpret_cast<const __m128i*>(from);
  return {reinterpret_cast<Vector>(_mm256_cvtph_ps(_mm_loadu_si128(words))),
          reinterpret_cast<Vector>(_mm256_cvtph_ps(_mm_loadu_si128(words + 1)))};
}
#else
inline Vector widen_halves(const Half* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const Words words = __builtin_convertvector(halves, Words);
  // The exponent is 5 bits at 10, and becomes 8 bits at 23: 2^112 moves its bias from 15 to 127.
  const Words magnitude = reinterpret_cast<Words>(as_vector((words & 0x7fffu) << 13) * 0x1p112f);
  const Words is_special = reinterpret_cast<Words>((words & 0x7c00u) == 0x7c00u);
  return as_vector(magnitude | (is_special & 0x7f800000u) | ((words & 0x8000u) << 16));
}
inline Pair load_pair(const Half* from) {
  return {widen_halves(from), widen_halves(from + kLanes)};
}
#endif

// Return fewer elements than kPair, and zeros.
template <class Element>
inline Pair load_some(const Element* from, int64_t count) {
  Element filled[kPair] = {};
  std::memcpy(filled, from, count * sizeof(Element));
  return load_pair(filled);
}

#if defined(__AVX512BW__)
inline Pair load_some(const float* from, int64_t count) {
  const uint32_t mask = (1u << count) - 1;
  return {reinterpret_cast<Vector>(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from)),
          reinterpret_cast<Vector>(
              _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), from + kLanes))};
}
inline Pair load_some(const Brain* from, int64_t count) {
  const __m512i words = _mm512_maskz_loadu_epi16((1u << count) - 1, from);
  return split_brains(reinterpret_cast<Words>(words));
}
inline Pair load_some(const Half* from, int64_t count) {
  return widen_halves(_mm512_maskz_loadu_epi16((1u << count) - 1, from));
}
#endif

template <bool IsWhole, class Element>
inline Pair load_elements(const Element* from, int64_t count) {
  return IsWhole ? load_pair(from) : load_some(from, count);
}

}  // namespace

