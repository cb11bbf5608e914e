// Combinations of vectors and the products between them, in double; after `codegen/threads.cpp`.
//
//     v'_j = sum_i y_ij v_i,    g_ab = <v'_a, v'_b>
//
// A strip of all vectors stays in a cache while its combinations are computed, three at a time over
// four registers of elements; they are written when the strip has been used, so that the result may
// lie where the vectors do. Sums of products are kept for each piece of fixed length and added in
// order, so that the bits do not depend on the number of threads.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace rotation {

#if defined(__AVX512F__)
constexpr int kLaneBytes = 64;
#elif defined(__AVX__)
constexpr int kLaneBytes = 32;
#else
constexpr int kLaneBytes = 16;
#endif
constexpr int kLanes = kLaneBytes / sizeof(double), kWidth = 3, kRegisters = 4;
constexpr int64_t kStrip = 256, kPiece = 2048;  // elements
typedef double Lanes __attribute__((vector_size(kLaneBytes)));

// As in `_native.py`.
struct Rotation {
  const double* from;  // (num_vectors, length)
  double* to;          // (num_kept, length), which may be the first rows of `from`
  const double* y;     // (num_vectors, num_kept)
  double* grams;       // (pieces, num_kept, num_kept), zero
  int64_t num_vectors, num_kept, length, from_stride, to_stride, num_threads;
};

inline Lanes load(const double* from) {
  Lanes found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

template <int width>
void combine_strip(const Rotation& c, int64_t begin, int64_t kept, double* room) {
  for (int64_t e = 0; e < kStrip; e += kRegisters * kLanes) {
    Lanes sums[width][kRegisters] = {};
    for (int64_t i = 0; i < c.num_vectors; ++i) {
      const double* from = c.from + i * c.from_stride + begin + e;
      const double* y = c.y + i * c.num_kept + kept;
      Lanes v[kRegisters];
#pragma GCC unroll 4
      for (int r = 0; r < kRegisters; ++r) v[r] = load(from + r * kLanes);
#pragma GCC unroll 4
      for (int w = 0; w < width; ++w)
#pragma GCC unroll 4
        for (int r = 0; r < kRegisters; ++r) sums[w][r] += y[w] * v[r];
    }
    for (int w = 0; w < width; ++w)
      std::memcpy(room + (kept + w) * kStrip + e, sums[w], sizeof sums[w]);
  }
}

void combine_rest(const Rotation& c, int64_t begin, int64_t count, double* room) {
  for (int64_t j = 0; j < c.num_kept; ++j) {
    double* to = room + j * kStrip;
    std::fill(to, to + kStrip, 0.0);
    for (int64_t i = 0; i < c.num_vectors; ++i) {
      const double* from = c.from + i * c.from_stride + begin;
      for (int64_t e = 0; e < count; ++e) to[e] += c.y[i * c.num_kept + j] * from[e];
    }
  }
}

template <int width>
void add_products(const double* left, const double* right, double* gram) {
  Lanes sums[width] = {};
  for (int64_t e = 0; e < kStrip; e += kLanes) {
    const Lanes x = load(left + e);
#pragma GCC unroll 4
    for (int w = 0; w < width; ++w) sums[w] += x * load(right + w * kStrip + e);
  }
  for (int w = 0; w < width; ++w)
    for (int i = 0; i < kLanes; ++i) gram[w] += sums[w][i];
}

void rotate_piece(const Rotation& c, int64_t piece, double* room) {
  double* gram = c.grams + piece * c.num_kept * c.num_kept;
  const int64_t end = std::min(c.length, (piece + 1) * kPiece);
  for (int64_t begin = piece * kPiece; begin < end; begin += kStrip) {
    const int64_t count = std::min(kStrip, end - begin);
    int64_t j = 0;
    if (count < kStrip) combine_rest(c, begin, count, room), j = c.num_kept;
    for (; j + kWidth <= c.num_kept; j += kWidth) combine_strip<kWidth>(c, begin, j, room);
    for (; j < c.num_kept; ++j) combine_strip<1>(c, begin, j, room);
    for (int64_t a = 0; a < c.num_kept; ++a) {
      int64_t b = a;
      const double* left = room + a * kStrip;
      for (; b + 4 <= c.num_kept; b += 4)
        add_products<4>(left, room + b * kStrip, gram + a * c.num_kept + b);
      for (; b < c.num_kept; ++b)
        add_products<1>(left, room + b * kStrip, gram + a * c.num_kept + b);
    }
    for (int64_t a = 0; a < c.num_kept; ++a)
      std::memcpy(c.to + a * c.to_stride + begin, room + a * kStrip, count * sizeof(double));
  }
}

}  // namespace rotation

// Upper triangles of the sums of products are left in `grams`.
extern "C" void penstock_rotate_rows(const rotation::Rotation* call) {
  const rotation::Rotation& c = *call;
  const int64_t pieces = (c.length + rotation::kPiece - 1) / rotation::kPiece;
  parallel(static_cast<int>(c.num_threads), [&](int64_t thread, int64_t threads) {
    std::vector<double> room(c.num_kept * rotation::kStrip);
    for (int64_t piece = pieces * thread / threads; piece < pieces * (thread + 1) / threads; ++piece)
      rotation::rotate_piece(c, piece, room.data());
  });
}
