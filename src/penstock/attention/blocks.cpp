// The call of block-sparse attention, and the blocks of its operands; after `tiles.cpp`.

namespace {

// As `_native.py` passes it. Strides are of elements, that of a column is 1.
struct Strides {
  int64_t batch, head, token;
};

struct Call {
  const void* q;     // (batch, heads, num_queries, dim)
  const void* k;     // (batch, kv_heads, num_keys, dim)
  const void* v;     // (batch, kv_heads, num_keys, value_dim)
  const void* dout;  // as out
  void* out;         // (batch, heads, num_queries, value_dim)
  void* lse;         // (batch, heads, num_queries), contiguous, of the dtype of sums
  const void* bias;  // (batch, heads, num_keys) of the dtype of sums, or null
  void* delta;       // as lse
  void* dq;
  void* dk;
  void* dv;
  void* dbias;  // (batch, heads, num_keys), contiguous, or null
  const int32_t* row_offsets;
  const int32_t* key_blocks;
  const uint8_t* is_partial;
  const int32_t* column_offsets;
  const int32_t* query_blocks;
  const uint8_t* is_partial_of_column;
  const int32_t* first_key;
  const int32_t* end_key;
  const int32_t* end_query;
  Strides q_strides, k_strides, v_strides, dout_strides, out_strides, dq_strides, dk_strides,
      dv_strides, bias_strides;
  int64_t batch, heads, kv_heads, num_queries, num_keys, dim, value_dim;
  int64_t block, layout_heads, num_query_blocks, num_key_blocks, num_blocks;
  int64_t kind;    // of the elements: 0 float, 1 half, 2 bfloat16, 3 double
  int64_t sweeps;  // whether one thread computes all gradients of a KV head
  int64_t num_threads;
  double scale;
};

// Rows of a tensor that pass: as they lie, or as copied.
template <class Real>
struct Rows {
  const Real* data;
  int64_t stride;
};

// Operands of a call by block. All are padded: rows that pass to whole groups, tokens that stay to
// whole panels, and columns to whole vectors; what is added is 0.
template <class Sums>
struct Blocks {
  using Real = Sums;
  static constexpr int64_t kCount = Lanes<Real>::kCount, kWidth = kVecs * kCount;
  static constexpr Real kHidden = -std::numeric_limits<Real>::infinity();

  const Call& call;
  int64_t dim, value_dim;  // in whole vectors and groups
  int64_t num_panels, num_lanes;  // of a block

  explicit Blocks(const Call& of) : call(of) {
    const int64_t multiple = std::max(kCount, kGroup);
    dim = pad_to(call.dim, multiple);
    value_dim = pad_to(call.value_dim, multiple);
    num_panels = divide_up(call.block, kWidth);
    num_lanes = num_panels * kWidth;
  }

  int64_t group() const { return call.heads / call.kv_heads; }
  int64_t queries_of(int64_t row) const {
    return std::min(call.block, call.num_queries - row * call.block);
  }
  int64_t keys_of(int64_t column) const {
    return std::min(call.block, call.num_keys - column * call.block);
  }

  // Return the rows of a block, copied to `room` unless they lie one after the other as they should.
  Rows<Real> read_block(const void* tensor, const Strides& strides, int64_t batch, int64_t head,
                        int64_t first, int64_t count, int64_t columns, int64_t padded, Real* room,
                        int64_t multiple = kGroup) const {
    const int64_t from = batch * strides.batch + head * strides.head + first * strides.token;
    if (are_sums() && strides.token == padded && columns == padded && count % multiple == 0)
      return {static_cast<const Real*>(tensor) + from, padded};
    for (int64_t r = 0; r < count; ++r) {
      read(tensor, from + r * strides.token, columns, room + r * padded);
      std::fill(room + r * padded + columns, room + (r + 1) * padded, Real{});
    }
    std::fill(room + count * padded, room + pad_to(count, multiple) * padded, Real{});
    return {room, padded};
  }

  // Write a block's panels, (panels, padded, kWidth), from its rows; tokens beyond it are 0.
  void transpose_block(Rows<Real> rows, int64_t count, int64_t padded, Real* panels) const {
    const int64_t whole = count / kCount * kCount;
    for (int64_t token = 0; token < num_lanes; token += kCount) {
      Real* to = panels + token / kWidth * padded * kWidth + token % kWidth;
      if (token < whole) {
        for (int64_t c = 0; c < padded; c += kCount)
          transpose_square<Real>(rows.data + token * rows.stride + c, rows.stride, to + c * kWidth,
                                 kWidth);
        continue;
      }
      for (int64_t c = 0; c < padded; ++c)
        for (int64_t i = 0; i < kCount; ++i)
          to[c * kWidth + i] = token + i < count ? rows.data[(token + i) * rows.stride + c] : 0;
    }
  }

  // Write the rows of a tensor from panels, times a factor.
  void write_block(const Real* panels, int64_t padded, Real factor, void* tensor,
                   const Strides& strides, int64_t batch, int64_t head, int64_t first,
                   int64_t count, int64_t columns, Real* room) const {
    const int64_t to = batch * strides.batch + head * strides.head + first * strides.token;
    for (int64_t token = 0; token < count; token += kCount) {
      const Real* from = panels + token / kWidth * padded * kWidth + token % kWidth;
      for (int64_t c = 0; c < padded; c += kCount)
        transpose_square<Real>(from + c * kWidth, kWidth, room + c, padded);
      for (int64_t i = 0; i < std::min(kCount, count - token); ++i)
        write_scaled(room + i * padded, padded, factor, columns, tensor,
                     to + (token + i) * strides.token);
    }
  }

  // Write a row, times a factor; what is in `row` changes.
  void write_scaled(Real* row, int64_t padded, Real factor, int64_t columns, void* tensor,
                    int64_t to) const {
    for (int64_t c = 0; c < padded; c += kCount)
      store_vec<Real>(row + c, factor * load_vec<Real>(row + c));
    with_element<Real>(call.kind, [&](auto element) {
      write_row(row, columns, static_cast<decltype(element)*>(tensor) + to);
    });
  }

  // Read elements of a tensor, from a place on.
  void read(const void* tensor, int64_t from, int64_t count, Real* to) const {
    with_element<Real>(call.kind, [&](auto element) {
      read_row(static_cast<const decltype(element)*>(tensor) + from, count, to);
    });
  }

  // Return whether elements have the type of sums.
  bool are_sums() const { return call.kind == 0 || call.kind == 3; }

  const Real* bias_of(int64_t batch, int64_t head) const {
    if (call.bias == nullptr) return nullptr;
    return static_cast<const Real*>(call.bias) + batch * call.bias_strides.batch +
           head * call.bias_strides.head;
  }
};

// The next of some tasks, which threads take in their order.
class Tasks {
 public:
  explicit Tasks(int64_t count) : count_(count) {}
  // Return whether there was one, and its number.
  bool take(int64_t& number) {
    number = next_++;
    return number < count_;
  }
  int64_t count() const { return count_; }

 private:
  std::atomic<int64_t> next_ = 0;
  const int64_t count_;
};

inline bool are_lists_valid(const int32_t* offsets, int64_t num_offsets, const int32_t* blocks,
                            int64_t num_blocks, int64_t end) {
  for (int64_t i = 0; i < num_offsets; ++i)
    if (offsets[i] < (i == 0 ? 0 : offsets[i - 1]) || offsets[i] > num_blocks) return false;
  for (int64_t i = 0; i < num_blocks; ++i)
    if (blocks[i] < 0 || blocks[i] >= end) return false;
  return true;
}

// Return whether no list leads out of the operands.
inline bool is_valid(const Call& call) {
  const int64_t rows = call.layout_heads * (call.num_query_blocks + 1);
  const int64_t columns = call.layout_heads * (call.num_key_blocks + 1);
  return are_lists_valid(call.row_offsets, rows, call.key_blocks, call.num_blocks,
                         call.num_key_blocks) &&
         are_lists_valid(call.column_offsets, columns, call.query_blocks, call.num_blocks,
                         call.num_query_blocks);
}

}  // namespace

