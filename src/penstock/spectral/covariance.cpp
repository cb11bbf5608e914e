// Sums of rows and of their products, X^T X, in double; after `codegen/threads.cpp`.
//
//     x = row - shift,    total += x,    squares_ij += x_i x_j        for i <= j or little below
//
// Rows are converted once and laid out in panels of as many columns as a register has numbers; a
// tile of the result, three registers wide, then takes two loads in a row of the left panel to
// 3 kLanes products. Half of the products of a general matrix product are left out, X^T X being
// symmetric. An element of the result has one thread and one order, so that the bits do not depend
// on the number of threads.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace covariance {

#if defined(__AVX512F__)
constexpr int kLaneBytes = 64;
#elif defined(__AVX__)
constexpr int kLaneBytes = 32;
#else
constexpr int kLaneBytes = 16;
#endif
constexpr int kLanes = kLaneBytes / sizeof(double), kWidth = 3;
typedef double Lanes __attribute__((vector_size(kLaneBytes)));

// As in `_native.py`.
struct Covariance {
  const void* rows;
  const double* shift;  // (num_columns,)
  double* total;        // (num_columns,)
  double* squares;      // (padded, padded): num_columns rounded up to 8
  double* room;         // (padded, room_rows): the panels
  int64_t num_rows, num_columns, row_stride, padded, room_rows, is_double, num_threads;
};

template <class Real>
void pack(const Covariance& c, int64_t first, int64_t begin, int64_t end) {
  const Real* rows = static_cast<const Real*>(c.rows) + first * c.row_stride;
  for (int64_t r = begin; r < end; ++r) {
    const Real* from = rows + r * c.row_stride;
    for (int64_t column = 0; column < c.padded; column += kLanes) {
      double* to = c.room + column * c.room_rows + r * kLanes;
      const int64_t count = std::min<int64_t>(kLanes, c.num_columns - column);
      if (count == kLanes) {
        for (int i = 0; i < kLanes; ++i) to[i] = static_cast<double>(from[column + i]) - c.shift[column + i];
      } else {
        for (int i = 0; i < kLanes; ++i)
          to[i] = i < count ? static_cast<double>(from[column + i]) - c.shift[column + i] : 0.0;
      }
    }
  }
}

inline Lanes load(const double* from) {
  Lanes found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

inline void add(double* to, Lanes sum) {
  sum += load(to);
  std::memcpy(to, &sum, sizeof sum);
}

template <int width>
void add_tile(const Covariance& c, int64_t row, int64_t column, int64_t count) {
  const double* left = c.room + row * c.room_rows;
  const double* right = c.room + column * c.room_rows;
  const int64_t stride = kLanes * c.room_rows;
  Lanes sums[kLanes][width] = {};
  for (int64_t r = 0; r < count; ++r) {
    Lanes x[width];
#pragma GCC unroll 4
    for (int w = 0; w < width; ++w) x[w] = load(right + w * stride + r * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; ++i) {
      const double y = left[r * kLanes + i];
#pragma GCC unroll 4
      for (int w = 0; w < width; ++w) sums[i][w] += y * x[w];
    }
  }
  for (int i = 0; i < kLanes; ++i)
    for (int w = 0; w < width; ++w) add(c.squares + (row + i) * c.padded + column + w * kLanes, sums[i][w]);
}

// Rows of tiles from the diagonal on; a thread takes the tiles whose columns begin in its share.
void add_products(const Covariance& c, int64_t count, int64_t thread, int64_t threads) {
  const int64_t num_panels = c.padded / kLanes, pairs = num_panels * (num_panels + 1) / 2;
  int64_t before = 0;
  for (int64_t i = 0; i < num_panels; ++i) {
    for (int64_t j = i; j < num_panels; j += kWidth) {
      const int64_t width = std::min<int64_t>(kWidth, num_panels - j);
      const bool is_mine = before * threads / pairs == thread;
      before += width;
      if (!is_mine) continue;
      if (width == 3) add_tile<3>(c, i * kLanes, j * kLanes, count);
      else if (width == 2) add_tile<2>(c, i * kLanes, j * kLanes, count);
      else add_tile<1>(c, i * kLanes, j * kLanes, count);
    }
  }
  for (int64_t i = num_panels * thread / threads; i < num_panels * (thread + 1) / threads; ++i) {
    const double* panel = c.room + i * kLanes * c.room_rows;
    Lanes sum = {};
    for (int64_t r = 0; r < count; ++r) sum += load(panel + r * kLanes);
    add(c.total + i * kLanes, sum);
  }
}

}  // namespace covariance

extern "C" void penstock_add_covariance(const covariance::Covariance* call) {
  const covariance::Covariance& c = *call;
  for (int64_t first = 0; first < c.num_rows; first += c.room_rows) {
    const int64_t count = std::min(c.room_rows, c.num_rows - first);
    parallel(static_cast<int>(c.num_threads), [&](int64_t thread, int64_t threads) {
      const int64_t begin = count * thread / threads, end = count * (thread + 1) / threads;
      if (c.is_double) covariance::pack<double>(c, first, begin, end);
      else covariance::pack<float>(c, first, begin, end);
    });
    parallel(static_cast<int>(c.num_threads), [&](int64_t thread, int64_t threads) {
      covariance::add_products(c, count, thread, threads);
    });
  }
}
