// Passes in which a block of queries stays: the output, and dQ; after `blocks.cpp`.

namespace {

// The queries of a block by lane: which keys they see.
template <class Real>
struct QueryRanges {
  static constexpr int64_t kCount = Lanes<Real>::kCount, kWidth = kVecs * kCount;
  Int<Real> first_key[kVecs], end_key[kVecs], query[kVecs];
  int64_t least = 0, most = 0;  // keys that any of them sees

  QueryRanges(const Call& call, int64_t first_query, int64_t count) {
    least = call.num_keys;
    for (int64_t i = 0; i < kWidth; ++i) {
      const bool is_there = i < count;
      const int64_t first = is_there ? call.first_key[first_query + i] : 0;
      const int64_t end = is_there ? call.end_key[first_query + i] : 0;
      first_key[i / kCount][i % kCount] = first;
      end_key[i / kCount][i % kCount] = end;
      query[i / kCount][i % kCount] = first_query + i;
      if (end <= first) continue;
      least = std::min(least, first);
      most = std::max(most, end);
    }
  }

  // Return the lanes that see a key.
  Int<Real> see(int lanes, int64_t key, int64_t end_query) const {
    using Number = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
    const auto number = static_cast<Number>(key), end = static_cast<Number>(end_query);
    return (first_key[lanes] <= number) & (end_key[lanes] > number) & (query[lanes] < end);
  }
};

// A block of queries that stays, with the memory of a thread.
template <class Real>
struct QueryBlock : Blocks<Real> {
  using Base = Blocks<Real>;
  using Base::call, Base::dim, Base::value_dim, Base::num_panels, Base::kCount, Base::kWidth,
      Base::kHidden;
  using V = Vec<Real>;

  Scratch<Real> scratch;
  Real* queries;   // (panels, dim, kWidth)
  Real* douts;     // (panels, value_dim, kWidth)
  Real* sums;      // (panels, dim or value_dim, kWidth)
  Real* scores;    // (block, kWidth)
  Real* products;  // (block, kWidth): dP, then dS
  Real* maxima;    // (block,): the log-sum-exp in the backward pass
  Real* totals;    // (block,): delta in the backward pass
  Real* room;      // a block of keys, or rows that come or go
  Real* value_room;
  int64_t batch = 0, head = 0, row = 0, count = 0;

  explicit QueryBlock(const Call& of) : Base(of) {
    const int64_t widest = std::max(dim, value_dim), block = this->num_lanes;
    queries = scratch.take(block * dim);
    douts = scratch.take(call.dout == nullptr ? 0 : block * value_dim);
    sums = scratch.take(block * widest);
    scores = scratch.take(block * kWidth);
    products = scratch.take(call.dout == nullptr ? 0 : block * kWidth);
    maxima = scratch.take(block);
    totals = scratch.take(block);
    room = scratch.take(block * widest);
    value_room = scratch.take(block * widest);
  }

  void begin(int64_t number) {
    row = number % call.num_query_blocks;
    head = number / call.num_query_blocks % call.heads;
    batch = number / call.num_query_blocks / call.heads;
    count = this->queries_of(row);
    const Rows<Real> rows = this->read_block(call.q, call.q_strides, batch, head, row * call.block,
                                             count, call.dim, dim, room);
    this->transpose_block(rows, count, dim, queries);
  }

  // Call `body` with each panel and each key block, and the rows of it that the panel sees.
  template <class Body>
  void for_key_blocks(Body body) {
    const int64_t layout_head = head % call.layout_heads, kv_head = head / this->group();
    const int32_t* offsets = call.row_offsets + layout_head * (call.num_query_blocks + 1) + row;
    for (int64_t entry = offsets[0]; entry < offsets[1]; ++entry) {
      const int64_t first = call.key_blocks[entry] * call.block;
      const int64_t num_keys = this->keys_of(call.key_blocks[entry]);
      const bool is_partial = call.is_partial[entry] || num_keys < call.block;
      const Rows<Real> keys = this->read_block(call.k, call.k_strides, batch, kv_head, first,
                                               num_keys, call.dim, dim, room);
      const Rows<Real> values = this->read_block(call.v, call.v_strides, batch, kv_head, first,
                                                 num_keys, call.value_dim, value_dim, value_room);
      for (int64_t panel = 0; panel < num_panels && panel * kWidth < count; ++panel) {
        if (!is_partial) {
          body.template run<false>(panel, keys, values, first, num_keys, 0, num_keys, nullptr);
          continue;
        }
        const QueryRanges<Real> ranges(call, row * call.block + panel * kWidth,
                                             count - panel * kWidth);
        const int64_t begin = std::max<int64_t>(0, ranges.least - first);
        const int64_t end = std::min(num_keys, ranges.most - first);
        if (begin < end)
          body.template run<true>(panel, keys, values, first, num_keys, begin / kGroup * kGroup,
                                  pad_to(end, kGroup), &ranges);
      }
    }
  }
};

// The output of a block of queries: by online softmax over its key blocks.
//
//     m' = max(m, max_j s_j)    l' = exp(m - m') l + sum_j exp(s_j - m')
//     O' = exp(m - m') O + sum_j exp(s_j - m') v_j
template <class Real>
struct ForwardPass {
  using Block = QueryBlock<Real>;
  using V = Vec<Real>;
  static constexpr int64_t kCount = Block::kCount, kWidth = Block::kWidth;

  Block& of;
  const Real* bias = nullptr;

  void run_task(int64_t number) {
    of.begin(number);
    bias = of.bias_of(of.batch, of.head);
    std::fill_n(of.sums, of.num_lanes * of.value_dim, Real{});
    std::fill_n(of.maxima, of.num_lanes, Block::kHidden);
    std::fill_n(of.totals, of.num_lanes, Real{});
    of.for_key_blocks(*this);
    finish();
  }

  template <bool IsPartial>
  void run(int64_t panel, Rows<Real> keys, Rows<Real> values, int64_t first_key, int64_t num_keys,
           int64_t begin, int64_t end, const QueryRanges<Real>* ranges) {
    multiply_into_scores<Real>(keys.data, keys.stride, of.queries + panel * of.dim * kWidth,
                                     of.scores, of.dim, begin, end);
    Real* sums = of.sums + panel * of.value_dim * kWidth;
    weigh<IsPartial>(of.maxima + panel * kWidth, of.totals + panel * kWidth, sums, first_key,
                     num_keys, begin, end, ranges);
    add_transposed<Real>(values.data, values.stride, of.scores, sums, of.value_dim, begin,
                               end);
  }

  // Replace products of rows [begin, end) by weights, and bring sums to the new maxima.
  template <bool IsPartial>
  void weigh(Real* maxima, Real* totals, Real* sums, int64_t first_key, int64_t num_keys,
             int64_t begin, int64_t end, const QueryRanges<Real>* ranges) {
    const auto scale = static_cast<Real>(of.call.scale);
    V most[kVecs], shift[kVecs], total[kVecs] = {};
    UNROLLED for (int i = 0; i < kVecs; ++i) most[i] = load_vec<Real>(maxima + i * kCount);
    for (int64_t j = begin; j < end; ++j) {
      const Real of_key = bias != nullptr && j < num_keys ? bias[first_key + j] : Real{};
      UNROLLED for (int i = 0; i < kVecs; ++i) {
        Real* at = of.scores + j * kWidth + i * kCount;
        V score = scale * load_vec<Real>(at) + of_key;
        if constexpr (IsPartial) {
          const int64_t end_query = j < num_keys ? of.call.end_query[first_key + j] : 0;
          score = ranges->see(i, first_key + j, end_query) ? score : fill_vec(Block::kHidden);
        }
        store_vec<Real>(at, score);
        most[i] = score <= most[i] ? most[i] : score;
      }
    }
    bool has_changed = false;
    UNROLLED for (int i = 0; i < kVecs; ++i) {
      const V before = load_vec<Real>(maxima + i * kCount);
      for (int lane = 0; lane < kCount; ++lane) has_changed |= most[i][lane] != before[lane];
      shift[i] = most[i] == Block::kHidden ? V{} : most[i];
    }
    for (int64_t j = begin; j < end; ++j)
      UNROLLED for (int i = 0; i < kVecs; ++i) {
        Real* at = of.scores + j * kWidth + i * kCount;
        const V weight = exp_vec<Real>(load_vec<Real>(at) - shift[i]);
        store_vec<Real>(at, weight);
        total[i] += weight;
      }
    if (has_changed) rescale(maxima, totals, sums, most, shift);
    UNROLLED for (int i = 0; i < kVecs; ++i)
      store_vec<Real>(totals + i * kCount, load_vec<Real>(totals + i * kCount) + total[i]);
  }

  void rescale(Real* maxima, Real* totals, Real* sums, const V* most, const V* shift) {
    V factor[kVecs];
    UNROLLED for (int i = 0; i < kVecs; ++i) {
      factor[i] = exp_vec<Real>(load_vec<Real>(maxima + i * kCount) - shift[i]);
      store_vec<Real>(totals + i * kCount, factor[i] * load_vec<Real>(totals + i * kCount));
      store_vec<Real>(maxima + i * kCount, most[i]);
    }
    for (int64_t c = 0; c < of.value_dim; ++c)
      UNROLLED for (int i = 0; i < kVecs; ++i) {
        Real* at = sums + c * kWidth + i * kCount;
        store_vec<Real>(at, factor[i] * load_vec<Real>(at));
      }
  }

  // Write O / l and m + log l.
  void finish() {
    const Call& call = of.call;
    const int64_t first = of.row * call.block;
    auto* lse = static_cast<Real*>(call.lse) +
                (of.batch * call.heads + of.head) * call.num_queries + first;
    for (int64_t i = 0; i < of.count; ++i)
      lse[i] = of.totals[i] == 0 ? Block::kHidden : of.maxima[i] + std::log(of.totals[i]);
    for (int64_t panel = 0; panel < of.num_panels; ++panel)
      for (int64_t i = 0; i < kVecs; ++i) {
        const V total = load_vec<Real>(of.totals + panel * kWidth + i * kCount);
        const V inverse = total == Real{} ? V{} : Real{1} / total;
        Real* sums = of.sums + panel * of.value_dim * kWidth + i * kCount;
        for (int64_t c = 0; c < of.value_dim; ++c)
          store_vec<Real>(sums + c * kWidth, inverse * load_vec<Real>(sums + c * kWidth));
      }
    of.write_block(of.sums, of.value_dim, Real{1}, call.out, call.out_strides, of.batch, of.head,
                   first, of.count, call.value_dim, of.room);
  }
};

// The gradient of a block of queries.
//
//     P = exp(s - lse)    dS = P (dO V' - delta)    dQ = scale dS K
template <class Real>
struct QueryGradientPass {
  using Block = QueryBlock<Real>;
  using V = Vec<Real>;
  static constexpr int64_t kCount = Block::kCount, kWidth = Block::kWidth;

  Block& of;
  const Real* bias = nullptr;

  void run_task(int64_t number) {
    of.begin(number);
    const Call& call = of.call;
    const int64_t first = of.row * call.block;
    bias = of.bias_of(of.batch, of.head);
    const Rows<Real> rows = of.read_block(call.dout, call.dout_strides, of.batch, of.head, first,
                                          of.count, call.value_dim, of.value_dim, of.room);
    of.transpose_block(rows, of.count, of.value_dim, of.douts);
    const int64_t at = (of.batch * call.heads + of.head) * call.num_queries + first;
    for (int64_t i = 0; i < of.num_lanes; ++i) {
      const Real lse = i < of.count ? static_cast<const Real*>(call.lse)[at + i] : Real{};
      of.maxima[i] = lse == Block::kHidden ? Real{} : lse;
      of.totals[i] = i < of.count ? static_cast<const Real*>(call.delta)[at + i] : Real{};
    }
    std::fill_n(of.sums, of.num_lanes * of.dim, Real{});
    of.for_key_blocks(*this);
    of.write_block(of.sums, of.dim, static_cast<Real>(call.scale), call.dq, call.dq_strides,
                   of.batch, of.head, first, of.count, call.dim, of.room);
  }

  template <bool IsPartial>
  void run(int64_t panel, Rows<Real> keys, Rows<Real> values, int64_t first_key, int64_t num_keys,
           int64_t begin, int64_t end, const QueryRanges<Real>* ranges) {
    multiply_into_scores<Real>(keys.data, keys.stride, of.queries + panel * of.dim * kWidth,
                                     of.scores, of.dim, begin, end);
    multiply_into_scores<Real>(values.data, values.stride,
                                     of.douts + panel * of.value_dim * kWidth, of.products,
                                     of.value_dim, begin, end);
    const auto scale = static_cast<Real>(of.call.scale);
    for (int64_t j = begin; j < end; ++j) {
      const Real of_key = bias != nullptr && j < num_keys ? bias[first_key + j] : Real{};
      UNROLLED for (int i = 0; i < kVecs; ++i) {
        const int64_t at = j * kWidth + i * kCount, lane = panel * kWidth + i * kCount;
        const V score = scale * load_vec<Real>(of.scores + at) + of_key;
        V weight = exp_vec<Real>(score - load_vec<Real>(of.maxima + lane));
        if constexpr (IsPartial) {
          const int64_t end_query = j < num_keys ? of.call.end_query[first_key + j] : 0;
          weight = ranges->see(i, first_key + j, end_query) ? weight : V{};
        }
        const V change = load_vec<Real>(of.products + at) - load_vec<Real>(of.totals + lane);
        store_vec<Real>(of.products + at, weight * change);
      }
    }
    add_transposed<Real>(keys.data, keys.stride, of.products,
                               of.sums + panel * of.dim * kWidth, of.dim, begin, end);
  }
};

}  // namespace

