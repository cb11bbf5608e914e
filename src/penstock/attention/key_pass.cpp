// The pass in which a block of keys stays: dK, dV and the gradient of the bias, over the transposed
// list, and with it dQ where one thread computes a whole KV head; after `query_pass.cpp`.

namespace {

// The keys of a panel by lane.
template <class Real>
struct KeyRanges {
  static constexpr int64_t kCount = Lanes<Real>::kCount, kWidth = kVecs * kCount;
  using Number = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
  Int<Real> key[kVecs], end_query[kVecs];
  int64_t first, end, last_query = 0;

  KeyRanges(const Call& call, int64_t first_key, int64_t count) : first(first_key) {
    end = first + std::min(count, kWidth);
    for (int64_t i = 0; i < kWidth; ++i) {
      const int64_t until = i < count ? call.end_query[first + i] : 0;
      key[i / kCount][i % kCount] = static_cast<Number>(first + i);
      end_query[i / kCount][i % kCount] = static_cast<Number>(until);
      last_query = std::max(last_query, until);
    }
  }

  // Return whether a query may see any of the keys.
  bool may_be_seen(const Call& call, int64_t query) const {
    return call.first_key[query] < end && call.end_key[query] > first && query < last_query;
  }

  // Return the lanes that a query sees.
  Int<Real> seen_by(int lanes, int64_t query, int64_t first_key, int64_t end_key) const {
    return (key[lanes] >= static_cast<Number>(first_key)) &
           (key[lanes] < static_cast<Number>(end_key)) &
           (end_query[lanes] > static_cast<Number>(query));
  }
};

// The gradients of a block of keys.
//
//     P = exp(s - lse)    dV = P' dO    dS = P (dO V' - delta)    dK = scale dS' Q    db = sum_i dS
//
// and, in the same order of sums as the pass over queries, dQ += dS K.
template <class Real>
struct KeyGradientPass : Blocks<Real> {
  using Base = Blocks<Real>;
  using Base::call, Base::dim, Base::value_dim, Base::num_panels, Base::kCount, Base::kWidth,
      Base::kHidden;
  using V = Vec<Real>;

  Scratch<Real> scratch;
  Real* keys;           // (panels, dim, kWidth)
  Real* values;         // (panels, value_dim, kWidth)
  Real* key_sums;       // as keys
  Real* value_sums;     // as values
  Real* bias_sums;      // (block,)
  Real* scores;         // (block, kWidth): P
  Real* products;       // (block, kWidth): dP, then dS
  Real* key_room;       // (block, dim): rows of keys
  Real* query_room;     // (block, dim)
  Real* dout_room;      // (block, value_dim)
  Real* dq = nullptr;   // (group, queries, dim) where the gradient itself cannot hold sums
  int64_t batch = 0, kv_head = 0, column = 0, count = 0;
  Rows<Real> key_rows = {};

  explicit KeyGradientPass(const Call& of) : Base(of) {
    const int64_t block = this->num_lanes, widest = std::max(dim, value_dim);
    keys = scratch.take(block * dim);
    values = scratch.take(block * value_dim);
    key_sums = scratch.take(block * dim);
    value_sums = scratch.take(block * value_dim);
    bias_sums = scratch.take(block);
    scores = scratch.take(block * kWidth);
    products = scratch.take(block * kWidth);
    key_room = scratch.take(block * widest);
    query_room = scratch.take(block * widest);
    dout_room = scratch.take(block * value_dim);
    if (call.sweeps && !has_rows_in_place())
      dq = scratch.take(this->group() * pad_to(call.num_queries, call.block) * dim);
  }

  // Return whether the gradient of queries can hold sums: whole vectors, and whole groups of rows.
  bool has_rows_in_place() const {
    return this->are_sums() && call.dim == dim && call.num_queries % kGroup == 0;
  }

  Rows<Real> query_sums(int64_t head) const {
    if (has_rows_in_place())
      return {static_cast<const Real*>(call.dq) + batch * call.dq_strides.batch +
                  head * call.dq_strides.head,
              call.dq_strides.token};
    return {dq + head % this->group() * pad_to(call.num_queries, call.block) * dim, dim};
  }

  void run_task(int64_t number) {
    if (!call.sweeps) {
      run_block(number / call.num_key_blocks, number % call.num_key_blocks);
      return;
    }
    begin_head(number);
    for_query_rows([&](Rows<Real> sums, int64_t, int64_t query) {
      std::fill_n(const_cast<Real*>(sums.data) + query * sums.stride, dim, Real{});
    });
    for (int64_t each = 0; each < call.num_key_blocks; ++each) run_block(number, each);
    for_query_rows([&](Rows<Real> sums, int64_t head, int64_t query) {
      const int64_t to = batch * call.dq_strides.batch + head * call.dq_strides.head +
                         query * call.dq_strides.token;
      this->write_scaled(const_cast<Real*>(sums.data) + query * sums.stride, dim,
                         static_cast<Real>(call.scale), call.dim, call.dq, to);
    });
  }

  void begin_head(int64_t number) {
    kv_head = number % call.kv_heads;
    batch = number / call.kv_heads;
  }

  template <class Body>
  void for_query_rows(Body body) {
    for (int64_t head = kv_head * this->group(); head < (kv_head + 1) * this->group(); ++head) {
      const Rows<Real> sums = query_sums(head);
      for (int64_t query = 0; query < call.num_queries; ++query) body(sums, head, query);
    }
  }

  void run_block(int64_t number, int64_t which) {
    begin_head(number);
    column = which;
    count = this->keys_of(column);
    const int64_t first = column * call.block;
    const Rows<Real> rows = this->read_block(call.v, call.v_strides, batch, kv_head, first, count,
                                             call.value_dim, value_dim, key_room);
    this->transpose_block(rows, count, value_dim, values);
    key_rows = this->read_block(call.k, call.k_strides, batch, kv_head, first, count, call.dim, dim,
                                key_room, kWidth);
    this->transpose_block(key_rows, count, dim, keys);
    std::fill_n(key_sums, this->num_lanes * dim, Real{});
    std::fill_n(value_sums, this->num_lanes * value_dim, Real{});
    for (int64_t head = kv_head * this->group(); head < (kv_head + 1) * this->group(); ++head)
      run_head(head);
    this->write_block(key_sums, dim, static_cast<Real>(call.scale), call.dk, call.dk_strides, batch,
                      kv_head, first, count, call.dim, query_room);
    this->write_block(value_sums, value_dim, Real{1}, call.dv, call.dv_strides, batch, kv_head,
                      first, count, call.value_dim, query_room);
  }

  // Add the query blocks of a head.
  void run_head(int64_t head) {
    const int64_t layout_head = head % call.layout_heads;
    const int32_t* offsets =
        call.column_offsets + layout_head * (call.num_key_blocks + 1) + column;
    const Real* bias = this->bias_of(batch, head);
    std::fill_n(bias_sums, this->num_lanes, Real{});
    for (int64_t entry = offsets[0]; entry < offsets[1]; ++entry) {
      const int64_t row = call.query_blocks[entry], num_rows = this->queries_of(row);
      const bool is_partial = call.is_partial_of_column[entry] ||
                              count < this->num_lanes || num_rows % kGroup != 0;
      const Rows<Real> queries = this->read_block(call.q, call.q_strides, batch, head,
                                                  row * call.block, num_rows, call.dim, dim,
                                                  query_room);
      const Rows<Real> douts = this->read_block(call.dout, call.dout_strides, batch, head,
                                                row * call.block, num_rows, call.value_dim,
                                                value_dim, dout_room);
      for (int64_t panel = 0; panel < num_panels && panel * kWidth < count; ++panel) {
        if (is_partial)
          run_panel<true>(panel, head, row * call.block, num_rows, queries, douts, bias);
        else
          run_panel<false>(panel, head, row * call.block, num_rows, queries, douts, bias);
      }
    }
    if (call.dbias != nullptr)
      std::copy_n(bias_sums, count,
                  static_cast<Real*>(call.dbias) +
                      (batch * call.heads + head) * call.num_keys + column * call.block);
  }

  template <bool IsPartial>
  void run_panel(int64_t panel, int64_t head, int64_t first_query, int64_t num_rows,
                 Rows<Real> queries, Rows<Real> douts, const Real* bias) {
    const int64_t first_key = column * call.block + panel * kWidth;
    const KeyRanges<Real> ranges(call, first_key, count - panel * kWidth);
    int64_t begin = 0, end = num_rows;
    if constexpr (IsPartial) {
      while (begin < end && !ranges.may_be_seen(call, first_query + begin)) ++begin;
      while (begin < end && !ranges.may_be_seen(call, first_query + end - 1)) --end;
      if (begin == end) return;
      begin = begin / kGroup * kGroup;
      end = pad_to(end, kGroup);
    }
    multiply_into_scores<Real>(queries.data, queries.stride, keys + panel * dim * kWidth,
                                     scores, dim, begin, end);
    multiply_into_scores<Real>(douts.data, douts.stride, values + panel * value_dim * kWidth,
                                     products, value_dim, begin, end);
    weigh<IsPartial>(panel, head, first_query, num_rows, begin, end, bias, ranges);
    add_transposed<Real>(douts.data, douts.stride, scores,
                               value_sums + panel * value_dim * kWidth, value_dim, begin, end);
    add_transposed<Real>(queries.data, queries.stride, products,
                               key_sums + panel * dim * kWidth, dim, begin, end);
    if (call.sweeps) {
      const Rows<Real> sums = query_sums(head);
      add_rows<Real>(products, key_rows.data + panel * kWidth * key_rows.stride,
                           key_rows.stride,
                           const_cast<Real*>(sums.data) + first_query * sums.stride, sums.stride,
                           dim, begin, end);
    }
  }

  // Replace products of rows [begin, end) by P and dS.
  template <bool IsPartial>
  void weigh(int64_t panel, int64_t head, int64_t first_query, int64_t num_rows, int64_t begin,
             int64_t end, const Real* bias, const KeyRanges<Real>& ranges) {
    const auto scale = static_cast<Real>(call.scale);
    const int64_t at_head = (batch * call.heads + head) * call.num_queries + first_query;
    const Real* lse = static_cast<const Real*>(call.lse) + at_head;
    const Real* delta = static_cast<const Real*>(call.delta) + at_head;
    V of_keys[kVecs] = {}, total[kVecs];
    UNROLLED for (int i = 0; i < kVecs; ++i) {
      total[i] = load_vec<Real>(bias_sums + panel * kWidth + i * kCount);
      for (int lane = 0; bias != nullptr && lane < kCount; ++lane) {
        const int64_t key = panel * kWidth + i * kCount + lane;
        of_keys[i][lane] = key < count ? bias[column * call.block + key] : Real{};
      }
    }
    for (int64_t r = begin; r < end; ++r) {
      const bool is_there = r < num_rows;
      const Real shift = is_there && lse[r] != kHidden ? lse[r] : Real{};
      const Real of_query = is_there ? delta[r] : Real{};
      const int64_t first = is_there ? call.first_key[first_query + r] : 0;
      const int64_t until = is_there ? call.end_key[first_query + r] : 0;
      UNROLLED for (int i = 0; i < kVecs; ++i) {
        const int64_t at = r * kWidth + i * kCount;
        const V score = scale * load_vec<Real>(scores + at) + of_keys[i];
        V weight = exp_vec<Real>(score - shift);
        if constexpr (IsPartial)
          weight = ranges.seen_by(i, first_query + r, first, until) ? weight : V{};
        const V change = weight * (load_vec<Real>(products + at) - of_query);
        store_vec<Real>(scores + at, weight);
        store_vec<Real>(products + at, change);
        total[i] += change;
      }
    }
    UNROLLED for (int i = 0; i < kVecs; ++i)
      store_vec<Real>(bias_sums + panel * kWidth + i * kCount, total[i]);
  }
};

// delta_i = dO_i . O_i of the queries of a block.
template <class Real>
struct DeltaPass : Blocks<Real> {
  static constexpr int kSums = 16;
  std::vector<Real> left, right;

  explicit DeltaPass(const Call& of)
      : Blocks<Real>(of), left(of.value_dim), right(of.value_dim) {}

  void run_task(int64_t number) {
    const Call& call = this->call;
    const int64_t row = number % call.num_query_blocks;
    const int64_t head = number / call.num_query_blocks % call.heads;
    const int64_t batch = number / call.num_query_blocks / call.heads;
    auto* delta =
        static_cast<Real*>(call.delta) + (batch * call.heads + head) * call.num_queries;
    for (int64_t query = row * call.block; query < row * call.block + this->queries_of(row);
         ++query) {
      this->read(call.out, place(call.out_strides, batch, head, query), call.value_dim,
                 left.data());
      this->read(call.dout, place(call.dout_strides, batch, head, query), call.value_dim,
                 right.data());
      Real sums[kSums] = {};
      for (int64_t c = 0; c < call.value_dim; ++c) sums[c % kSums] += left[c] * right[c];
      for (int i = 1; i < kSums; ++i) sums[0] += sums[i];
      delta[query] = sums[0];
    }
  }

  static int64_t place(const Strides& strides, int64_t batch, int64_t head, int64_t query) {
    return batch * strides.batch + head * strides.head + query * strides.token;
  }
};

// Have threads take tasks until none is left, each with memory of its own.
template <class Make>
void run_tasks(const Call& call, int64_t count, Make make) {
  Tasks tasks(count);
  parallel(static_cast<int>(std::min(call.num_threads, count)), [&](int64_t, int64_t) {
    int64_t number;
    if (!tasks.take(number)) return;
    auto pass = make();
    do pass.run_task(number);
    while (tasks.take(number));
  });
}

template <class Real>
void run_forward(const Call& call) {
  using Block = QueryBlock<Real>;
  struct Pass {
    Block block;
    void run_task(int64_t number) { ForwardPass<Real>{block}.run_task(number); }
  };
  run_tasks(call, call.batch * call.heads * call.num_query_blocks,
            [&] { return Pass{Block(call)}; });
}

template <class Real>
void run_backward(const Call& call) {
  using Block = QueryBlock<Real>;
  struct Pass {
    Block block;
    void run_task(int64_t number) {
      QueryGradientPass<Real>{block}.run_task(number);
    }
  };
  const int64_t num_rows = call.batch * call.heads * call.num_query_blocks;
  run_tasks(call, num_rows, [&] { return DeltaPass<Real>(call); });
  if (call.sweeps) {
    run_tasks(call, call.batch * call.kv_heads,
              [&] { return KeyGradientPass<Real>(call); });
    return;
  }
  run_tasks(call, num_rows, [&] { return Pass{Block(call)}; });
  run_tasks(call, call.batch * call.kv_heads * call.num_key_blocks,
            [&] { return KeyGradientPass<Real>(call); });
}

template <class Real>
void run_call(const Call& call) {
  call.dout == nullptr ? run_forward<Real>(call) : run_backward<Real>(call);
}

}  // namespace

// Compute the output, or gradients where there is a gradient of the output. Return whether the
// lists of blocks lie within the operands; nothing is computed otherwise.
extern "C" int penstock_blocksparse(const char* arguments) {
  const Call& call = *reinterpret_cast<const Call*>(arguments);
  if (!is_valid(call)) return 0;
  call.kind == 3 ? run_call<double>(call) : run_call<float>(call);
  return 1;
}
