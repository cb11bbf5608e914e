// The base of every generated program: threads, scratch memory, and products of small matrices.
//
// The threads are those of torch: compiled OpenMP code enters its runtime through GOMP_parallel, and
// so does this file, by the weak name that the process resolves to whatever runtime torch has
// loaded. Threads take tasks from a queue; each is computed by one thread in one
// order, so the bits of a result depend neither on how many threads there are nor on which is first.

// The headers of C++ would take longer to compile than most programs: what is needed of them are
// compiler builtins and the few headers of C.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

extern "C" {
void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));
}

namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kTileRows = 6, kTileVectors = 4;  // 24 of 32 registers add up
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kTileRows = 6, kTileVectors = 2;  // 12 of 16
#else
constexpr int kVectorBytes = 16, kTileRows = 6, kTileVectors = 2;
#endif
constexpr int64_t kPanelRows = 64;  // of a weight gradient; two panels of 64 floats fit the L1 cache
constexpr int64_t kBlockRows = 256;  // of a traversal in which the order of rows does not matter

constexpr int64_t kAhead = 8;  // rows between asking for a row and reading it

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes), aligned(sizeof(T)), may_alias));
};
template <class T>
using Vector = typename VectorOf<T>::type;
template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

constexpr int round_up(int count, int step) { return (count + step - 1) / step * step; }

template <class Body>
void parallel(int64_t num_threads, const Body& body) {
  if (num_threads < 2 || GOMP_parallel == nullptr) {
    body();
    return;
  }
  auto call = [](void* data) { (*static_cast<const Body*>(data))(); };
  GOMP_parallel(call, const_cast<Body*>(&body), static_cast<unsigned>(num_threads), 0);
}

class Tasks {
 public:
  explicit Tasks(int64_t count) : count_(count) {}
  bool next(int64_t* task) { return (*task = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED)) < count_; }

 private:
  int64_t next_ = 0;
  int64_t count_;
};

constexpr int kStackNumbers = 4096;  // of a row; a longer one might not fit on a thread's stack

template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 127) / 64 * 64;
    data_ = static_cast<T*>(aligned_alloc(64, bytes));
    if (data_ == nullptr) abort();  // an exception cannot leave a thread of OpenMP
  }
  Scratch(const Scratch&) = delete;
  ~Scratch() { free(data_); }
  operator T*() { return data_; }

 private:
  T* data_;
};

template <class T, int N, bool kIsWide = (N > kStackNumbers)>
class Row : public Scratch<T> {
 public:
  Row() : Scratch<T>(N) { memset(*this, 0, N * sizeof(T)); }
};

template <class T, int N>
class Row<T, N, false> {
 public:
  operator T*() { return data_; }

 private:
  T data_[N] = {};
};

template <class T, int kCount>
inline void prefetch(const T* row) {
  for (int i = 0; i < kCount && i < 512; i += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(row + i);
}

template <class T>
inline T relu(T x) { return x <= 0 ? T(0) : x; }  // NaN stays
template <class T>
inline T relu_gradient(T gradient, T y) { return y <= 0 ? T(0) : gradient; }
template <class T>
inline T leaky_relu(T x, T slope) { return x > 0 ? x : x * slope; }
template <class T>
inline T leaky_relu_slope(T x, T slope) { return x > 0 ? T(1) : slope; }
inline float exponential(float x) { return __builtin_expf(x); }
inline double exponential(double x) { return __builtin_exp(x); }
inline float logarithm(float x) { return __builtin_logf(x); }
inline double logarithm(double x) { return __builtin_log(x); }
inline float hyperbolic_tangent(float x) { return __builtin_tanhf(x); }
inline double hyperbolic_tangent(double x) { return __builtin_tanh(x); }
template <class T>
inline T sigmoid(T x) { return T(1) / (T(1) + exponential(-x)); }
// NaN is larger than all: it must reach the result.
template <class T>
inline T larger(T x, T y) { return x > y || x != x ? x : y; }

// ---- out[row] = in[row] @ weight, some rows at a time -------------------------------------------

// in: kRows rows of K; out: kRows rows; weight: K rows at a distance of `stride`. Of the last vector
// only kRest columns are wanted, if kRest is not 0. kAdds: the product is added to `out`.
template <class T, int K, int kRows, int kVectors, int kRest, bool kAdds>
inline void product_tile(const T* const* in, T* const* out, const T* weight, int stride) {
  Vector<T> sum[kRows][kVectors] = {};
  for (int k = 0; k < K; ++k) {
    Vector<T> right[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      right[v] = *reinterpret_cast<const Vector<T>*>(weight + k * stride + v * kLanes<T>);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vector<T> left = Vector<T>{} + in[r][k];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] += left * right[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      T* place = out[r] + v * kLanes<T>;
      if (kRest != 0 && v == kVectors - 1) {
        if constexpr (kAdds)
          for (int i = 0; i < kRest; ++i) place[i] += sum[r][v][i];
        else
          memcpy(place, &sum[r][v], kRest * sizeof(T));
      } else if constexpr (kAdds) {
        *reinterpret_cast<Vector<T>*>(place) += sum[r][v];
      } else {
        *reinterpret_cast<Vector<T>*>(place) = sum[r][v];
      }
    }
}

// All N columns of kTileRows rows.
template <class T, int K, int N, bool kAdds>
inline void product_rows(const T* const* in, T* const* out, const T* weight) {
  constexpr int kWidth = kTileVectors * kLanes<T>, kStride = round_up(N, kLanes<T>);
  constexpr int kWhole = N / kWidth * kWidth, kRest = N - kWhole;
  T* place[kTileRows];
  for (int column = 0; column < kWhole; column += kWidth) {
    for (int r = 0; r < kTileRows; ++r) place[r] = out[r] + column;
    product_tile<T, K, kTileRows, kTileVectors, 0, kAdds>(in, place, weight + column, kStride);
  }
  if constexpr (kRest > 0) {
    constexpr int kVectors = round_up(kRest, kLanes<T>) / kLanes<T>;
    for (int r = 0; r < kTileRows; ++r) place[r] = out[r] + kWhole;
    product_tile<T, K, kTileRows, kVectors, kRest % kLanes<T>, kAdds>(in, place, weight + kWhole,
                                                                      kStride);
  }
}

// A weight, (K, N) or if transposed (N, K), as `product_rows` reads it.
template <class T, int K, int N, bool kTransposed>
inline void pack(const T* matrix, T* packed) {
  constexpr int kStride = round_up(N, kLanes<T>);
  for (int k = 0; k < K; ++k) {
    for (int n = 0; n < N; ++n) packed[k * kStride + n] = matrix[kTransposed ? n * K + k : k * N + n];
    for (int n = N; n < kStride; ++n) packed[k * kStride + n] = 0;
  }
}

// Each task is a type and a range of rows. Weights are (K, N), or (N, K) if transposed. kBegins: each
// row of `out` is the product and the row `begin` of its type.
template <class T, int K, int N, bool kTransposed, bool kBegins, class Index, class In, class Out,
          class Weight, class Begin>
void segment_product(int64_t num_threads, const Index* tasks, int64_t num_tasks, const Index* order,
                     const In& in, const Out& out, const Weight& weight, const Begin& begin_of) {
  constexpr int kStride = round_up(N, kLanes<T>);
  constexpr bool kPacks = kTransposed || kStride != N;
  Tasks queue(num_tasks);
  parallel(num_threads, [&] {
    Scratch<T> packed(kPacks ? K * kStride : 1), spare(N);
    for (int64_t task; queue.next(&task);) {
      const int64_t begin = tasks[3 * task + 1], end = tasks[3 * task + 2];
      const T* matrix = weight(tasks[3 * task]);
      if constexpr (kPacks) {
        pack<T, K, N, kTransposed>(matrix, packed);
        matrix = packed;
      }
      for (int64_t row = begin; row < end; row += kTileRows) {
        const T* from[kTileRows];
        T* to[kTileRows];
        for (int r = 0; r < kTileRows; ++r) {
          const int64_t at = row + r < end ? row + r : end - 1;
          from[r] = in(order == nullptr ? at : order[at]);
          to[r] = row + r < end ? out(order == nullptr ? at : order[at]) : spare;
          if constexpr (kBegins) memcpy(to[r], begin_of(tasks[3 * task]), N * sizeof(T));
        }
        product_rows<T, K, N, kBegins>(from, to, matrix);
      }
    }
  });
}

// ---- out[node of row] += in[row] @ weight, relation by relation ---------------------------------

// The weights of all types, `step` numbers apart.
template <class T, int K, int N, bool kTransposed, class Weight>
void pack_all(int64_t num_threads, int64_t num_types, int64_t step, T* packed, const Weight& weight) {
  Tasks queue(num_types);
  parallel(num_threads, [&] {
    for (int64_t type; queue.next(&type);) pack<T, K, N, kTransposed>(weight(type), packed + type * step);
  });
}

// Rows of one type, no two of them of one node; the weight is packed.
template <class T, int K, int N, class In, class Out>
inline void add_products(int64_t begin, int64_t end, const T* weight, const In& in, const Out& out) {
  Row<T, N> spare;
  for (int64_t row = begin; row < end; row += kTileRows) {
    const T* from[kTileRows];
    T* to[kTileRows];
    for (int r = 0; r < kTileRows; ++r) {
      const int64_t at = row + r < end ? row + r : end - 1;
      from[r] = in(at);
      to[r] = row + r < end ? out(at) : spare;
    }
    product_rows<T, K, N, true>(from, to, weight);
  }
}

// ---- sums of outer products ---------------------------------------------------------------------

template <class T, int kRows, int kVectors>
inline void outer_tile(const T* const* left, const T* const* right, int64_t num_rows, int first,
                       int column, T* sums, int stride) {
  Vector<T> sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      sum[r][v] = *reinterpret_cast<Vector<T>*>(sums + (first + r) * stride + column + v * kLanes<T>);
  for (int64_t row = 0; row < num_rows; ++row) {
    Vector<T> wide[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      wide[v] = *reinterpret_cast<const Vector<T>*>(right[row] + column + v * kLanes<T>);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vector<T> scale = Vector<T>{} + left[row][first + r];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] += scale * wide[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      *reinterpret_cast<Vector<T>*>(sums + (first + r) * stride + column + v * kLanes<T>) = sum[r][v];
}

template <class T, int K, int kVectors>
inline void outer_columns(const T* const* left, const T* const* right, int64_t num_rows, int column,
                          T* sums, int stride) {
  int k = 0;
  for (; k + kTileRows <= K; k += kTileRows)
    outer_tile<T, kTileRows, kVectors>(left, right, num_rows, k, column, sums, stride);
  if constexpr (K % kTileRows != 0)
    outer_tile<T, K % kTileRows, kVectors>(left, right, num_rows, k, column, sums, stride);
}

// sums (K, kStride) += left (rows, K) transposed @ right (rows, kStride)
template <class T, int K, int kStride>
inline void add_outer(const T* const* left, const T* const* right, int64_t num_rows, T* sums) {
  constexpr int kWidth = kTileVectors * kLanes<T>, kWhole = kStride / kWidth * kWidth;
  for (int column = 0; column < kWhole; column += kWidth)
    outer_columns<T, K, kTileVectors>(left, right, num_rows, column, sums, kStride);
  if constexpr (kStride > kWhole)
    outer_columns<T, K, (kStride - kWhole) / kLanes<T>>(left, right, num_rows, kWhole, sums, kStride);
}

// The memory for a task's part of a sum over the rows of a type; a single part is the sum.
template <class T, class Index>
inline T* part_of(int64_t task, const Index* tasks, const Index* task_starts, int64_t size, T* parts,
                  T* out) {
  const int64_t type = tasks[3 * task];
  return task_starts[type + 1] - task_starts[type] == 1 ? out + type * size : parts + task * size;
}

// Adds up the sums that several tasks have parts of, in the order of the tasks.
template <class T, class Index>
void add_parts(int64_t num_threads, const Index* task_starts, int64_t num_types, int64_t size,
               const T* parts, T* out) {
  Tasks queue(num_types);
  parallel(num_threads, [&] {
    for (int64_t type; queue.next(&type);) {
      const int64_t begin = task_starts[type], end = task_starts[type + 1];
      T* sum = out + type * size;
      if (begin == end) memset(sum, 0, size * sizeof(T));
      if (end - begin < 2) continue;
      memcpy(sum, parts + begin * size, size * sizeof(T));
      for (int64_t part = begin + 1; part < end; ++part)
        for (int64_t i = 0; i < size; ++i) sum[i] += parts[part * size + i];
    }
  });
}

// For each type the sum over its rows (and kPairs vectors of each) of outer(left, right), (K, N).
template <class T, int K, int N, int kPairs, class Index, class Left, class Right, class Part>
void weight_gradient(int64_t num_threads, const Index* tasks, int64_t num_tasks, const Index* order,
                     const Left& left, const Right& right, const Part& part) {
  // The longer side runs along the vectors; what is transposed is put right at the end.
  constexpr bool kSwapped = N < kLanes<T> && K > N;
  constexpr int kHeight = kSwapped ? N : K, kColumns = kSwapped ? K : N;
  constexpr int kStride = round_up(kColumns, kLanes<T>);
  Tasks queue(num_tasks);
  parallel(num_threads, [&] {
    Scratch<T> sums(kHeight * kStride), panel(kStride == kColumns ? 1 : kPanelRows * kStride);
    const T* tall[kPanelRows];
    const T* wide[kPanelRows];
    for (int64_t task; queue.next(&task);) {
      const int64_t begin = tasks[3 * task + 1] * kPairs, end = tasks[3 * task + 2] * kPairs;
      memset(sums, 0, kHeight * kStride * sizeof(T));
      for (int64_t first = begin; first < end; first += kPanelRows) {
        const int64_t num_rows = end - first < kPanelRows ? end - first : kPanelRows;
        for (int64_t r = 0; r < num_rows; ++r) {
          const int64_t at = (first + r) / kPairs, pair = (first + r) % kPairs;
          const int64_t row = order == nullptr ? at : order[at];
          tall[r] = kSwapped ? right(row, pair) : left(row, pair);
          wide[r] = kSwapped ? left(row, pair) : right(row, pair);
          if constexpr (kStride != kColumns) {
            T* place = panel + r * kStride;
            memcpy(place, wide[r], kColumns * sizeof(T));
            memset(place + kColumns, 0, (kStride - kColumns) * sizeof(T));
            wide[r] = place;
          }
        }
        add_outer<T, kHeight, kStride>(tall, wide, num_rows, sums);
      }
      T* out = part(task);
      for (int k = 0; k < K; ++k)
        for (int n = 0; n < N; ++n) out[k * N + n] = sums[kSwapped ? n * kStride + k : k * kStride + n];
    }
  });
}

}  // namespace
