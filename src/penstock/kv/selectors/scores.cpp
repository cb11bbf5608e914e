// Products of queries with numbers of 4 bits, and their largest per block; `_packing.py` calls it.
//
// A block has T tokens of r channels; channel i of token t is level[i][t] step[i] + offset[i]. So
//
//     q . x_t = sum_i (q_i step_i) level[i][t]  +  sum_i q_i offset_i
//
// with lanes over the tokens: two channels of a token are one byte, and bytes of tokens are side by
// side. Each block is computed by one thread, in one order.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int64_t kMostRows = 4;           // that are computed together
constexpr int64_t kFewProducts = 1 << 18;  // fewer are computed by one thread
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// As `_packing.py` passes it; strides are of elements, the inner ones those of contiguous blocks.
struct Call {
  const float* rows;       // (B, H, num_rows, r), contiguous
  const uint8_t* levels;   // (B, H, num_blocks, r / 2, T): low bits the even channels
  const Half* offset;      // (B, H, num_blocks, r)
  const Half* step;        // the same
  float* best;             // (B, H, num_rows, num_blocks): the largest product
  float* sums;             // the same shape: of exp(product - best); or null
  int64_t batch;
  int64_t num_heads;
  int64_t num_rows;
  int64_t num_blocks;
  int64_t num_tokens;
  int64_t num_channels;
  int64_t levels_batch, levels_head;
  int64_t offset_batch, offset_head;
  int64_t step_batch, step_head;
  int64_t num_threads;
};

// Return a vector of bytes as integers. GCC converts them one by one where the type asks for it.
inline Bits load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Bits>(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__) && defined(__F16C__)
  return reinterpret_cast<Bits>(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  Bits bytes;
  for (int64_t i = 0; i < kLanes; ++i) bytes[i] = from[i];
  return bytes;
#endif
}

// Return `count` bytes, at most a vector, and zeros.
inline Bits load_bytes(const uint8_t* from, int64_t count) {
  if (count == kLanes) return load_bytes(from);
  uint8_t filled[kLanes] = {};
  std::memcpy(filled, from, count);
  return load_bytes(filled);
}

// One thread's work.
class Worker {
 public:
  explicit Worker(const Call& call)
      : call(call),
        padded(divide_up(call.num_tokens, kLanes) * kLanes),
        width(divide_up(call.num_channels, kPair) * kPair),
        scaled(kMostRows * width),
        products(kMostRows * padded) {}

  void compute(int64_t block_number) {
    const int64_t head = block_number / call.num_blocks, block = block_number % call.num_blocks;
    const int64_t b = head / call.num_heads, h = head % call.num_heads, r = call.num_channels;
    offset = call.offset + b * call.offset_batch + h * call.offset_head + block * r;
    step = call.step + b * call.step_batch + h * call.step_head + block * r;
    levels = call.levels + b * call.levels_batch + h * call.levels_head +
             block * (r / 2) * call.num_tokens;
    for (int64_t row = 0; row < call.num_rows; row += kMostRows) {
      const int64_t first = (head * call.num_rows + row);
      const int64_t count = std::min(kMostRows, call.num_rows - row);
      switch (count) {
        case 1: compute_rows<1>(first); break;
        case 2: compute_rows<2>(first); break;
        case 3: compute_rows<3>(first); break;
        default: compute_rows<4>(first);
      }
      for (int64_t j = 0; j < count; ++j) reduce(j, (first + j) * call.num_blocks + block);
    }
  }

 private:
  // Multiply channels of rows by their steps, and add their products with offsets to `sums`.
  template <bool IsWhole, int Rows>
  void scale(int64_t first, int64_t i, Vector* sums) {
    const int64_t count = call.num_channels - i;
    const Pair by = load_elements<IsWhole>(step + i, count);
    const Pair shift = load_elements<IsWhole>(offset + i, count);
    UNROLLED for (int j = 0; j < Rows; ++j) {
      const Pair row = load_elements<IsWhole>(call.rows + (first + j) * call.num_channels + i, count);
      store(scaled.data() + j * width + i, row.near * by.near);
      store(scaled.data() + j * width + i + kLanes, row.far * by.far);
      sums[j] += row.near * shift.near + row.far * shift.far;
    }
  }

  // Set the products of `Rows` rows with the tokens of a block.
  template <int Rows>
  void compute_rows(int64_t first) {
    const int64_t r = call.num_channels;
    Vector sums[Rows] = {};
    int64_t i = 0;
    for (; i + kPair <= r; i += kPair) scale<true, Rows>(first, i, sums);
    if (i < r) scale<false, Rows>(first, i, sums);
    float constant[Rows];
    UNROLLED for (int j = 0; j < Rows; ++j) constant[j] = sum_lanes(sums[j]);
    for (int64_t t = 0; t < call.num_tokens; t += kLanes) {
      const int64_t count = std::min(kLanes, call.num_tokens - t);
      Vector even[Rows], odd[Rows];
      UNROLLED for (int j = 0; j < Rows; ++j) {
        even[j] = splat(constant[j]);
        odd[j] = Vector{};
      }
      const uint8_t* from = levels + t;
      const float* factor = scaled.data();
      for (int64_t i = 0; i < r; i += 2, from += call.num_tokens, factor += 2) {
        const Bits both = load_bytes(from, count);
        const Vector low = __builtin_convertvector(both & 15, Vector);
        const Vector high = __builtin_convertvector(both >> 4, Vector);
        UNROLLED for (int j = 0; j < Rows; ++j) {
          even[j] += factor[j * width] * low;
          odd[j] += factor[j * width + 1] * high;
        }
      }
      UNROLLED for (int j = 0; j < Rows; ++j) {
        float* to = products.data() + j * padded + t;
        store(to, even[j] + odd[j]);
        std::fill(to + count, to + kLanes, kNothing);
      }
    }
  }

  void reduce(int64_t row, int64_t place) const {
    const float* of_row = products.data() + row * padded;
    Vector most = load(of_row);
    for (int64_t t = kLanes; t < padded; t += kLanes) most = larger(most, load(of_row + t));
    const float best = max_lanes(most);
    call.best[place] = best;
    if (call.sums == nullptr) return;
    Vector sum = {};
    for (int64_t t = 0; t < padded; t += kLanes) sum += exp_of(load(of_row + t) - best);
    call.sums[place] = sum_lanes(sum);
  }

  const Call& call;
  const int64_t padded;  // tokens, to whole vectors
  const int64_t width;   // channels, to whole pairs of vectors
  const uint8_t* levels = nullptr;
  const Half* offset = nullptr;
  const Half* step = nullptr;
  std::vector<float> scaled;    // (kMostRows, width): rows times steps
  std::vector<float> products;  // (kMostRows, padded)
};

}  // namespace

extern "C" void penstock_best_products(const char* arguments) {
  const Call& call = *reinterpret_cast<const Call*>(arguments);
  const int64_t num_blocks = call.batch * call.num_heads * call.num_blocks;
  const int64_t work = num_blocks * call.num_rows * call.num_tokens * call.num_channels;
  const bool is_small = work < kFewProducts;
  parallel(is_small ? 1 : static_cast<int>(call.num_threads), [&](int64_t thread, int64_t of) {
    Worker worker(call);
    const int64_t end = num_blocks * (thread + 1) / of;
    for (int64_t i = num_blocks * thread / of; i < end; ++i) worker.compute(i);
  });
}
