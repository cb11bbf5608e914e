// Rational activations by group of channels, forward and backward; after `columns.cpp`.
//
// kPowers and kRoots are the numbers of coefficients: one library for each pair of degrees, in which
// all coefficients and sums of a group are registers.
//
//     P = sum_i a_i x^i     S = sum_j |b_j| |x|^(j-1)     Q = 1 + |x| S     y = P / Q
//     dx   = g (P' - y sgn(x) (S + |x| S')) / Q
//     da_i = sum g x^i / Q            db_j = -sgn(b_j) sum g y |x|^j / Q
//
// Elements of a group pass by chunks: from as many rows as fill one, converted and with zeros behind
// them. A chunk's sums are those of lanes, and are added to the tile's in double.

namespace {

constexpr int kPowers = PENSTOCK_NUMERATOR;    // a_0, a_1, ...
constexpr int kRoots = PENSTOCK_DENOMINATOR;   // b_1, b_2, ...
constexpr int kSums = kPowers + kRoots;
constexpr int64_t kChunk = 512;

// As `_native.py` passes it.
struct Call {
  const void* x;            // (num_rows, num_groups * width), contiguous
  const void* dy;           // as x; not read in the forward pass
  void* out;                // y, or dx in the backward pass
  const void* numerator;    // (num_groups, kPowers), of the dtype of sums
  const void* denominator;  // (num_groups, kRoots)
  double* partials;         // (tiles, num_groups, kSums), or null
  double* sums;             // (num_groups, kSums), or null in the forward pass
  int64_t num_rows, num_groups, width, tile_rows, kind, num_threads;
};

template <class Real>
struct Group {
  using V = Vec<Real>;
  static constexpr int64_t kCount = Lanes<Real>::kCount;

  V a[kPowers];
  V b[kRoots + 1];  // |b|; arrays have at least one element

  Group(const Call& call, int64_t number) {
    const Real* numerator = static_cast<const Real*>(call.numerator) + number * kPowers;
    const Real* denominator = static_cast<const Real*>(call.denominator) + number * kRoots;
    for (int i = 0; i < kPowers; ++i) a[i] = fill_vec<Real>(numerator[i]);
    for (int j = 0; j < kRoots; ++j) b[j] = fill_vec<Real>(std::abs(denominator[j]));
  }

  void evaluate(const Real* from, int64_t count, Real* to) const {
    for (int64_t k = 0; k < count; k += kCount) {
      const V x = load_vec<Real>(from + k), size = x < Real{} ? -x : x;
      V p = a[kPowers - 1], s = kRoots > 0 ? b[kRoots - 1] : V{};
      UNROLLED for (int i = kPowers - 2; i >= 0; --i) p = p * x + a[i];
      UNROLLED for (int j = kRoots - 2; j >= 0; --j) s = s * size + b[j];
      store_vec<Real>(to + k, kRoots > 0 ? p / (Real{1} + size * s) : p);
    }
  }

  // Write dx, and add the sums of the coefficients' gradients to `totals`.
  void differentiate(const Real* from, const Real* dy, int64_t count, Real* to,
                     double* totals) const {
    V sums[kSums] = {};
    for (int64_t k = 0; k < count; k += kCount) {
      const V x = load_vec<Real>(from + k), size = x < Real{} ? -x : x;
      V p = a[kPowers - 1], dp = {}, s = kRoots > 0 ? b[kRoots - 1] : V{}, ds = {};
      UNROLLED for (int i = kPowers - 2; i >= 0; --i) {
        dp = dp * x + p;
        p = p * x + a[i];
      }
      UNROLLED for (int j = kRoots - 2; j >= 0; --j) {
        ds = ds * size + s;
        s = s * size + b[j];
      }
      const V inverse = kRoots > 0 ? Real{1} / (Real{1} + size * s) : fill_vec<Real>(1);
      const V y = p * inverse, dq = s + size * ds;
      const V sign_dq = x > Real{} ? dq : (x < Real{} ? -dq : V{});
      V term = load_vec<Real>(dy + k) * inverse;
      store_vec<Real>(to + k, term * (dp - y * sign_dq));
      V of_b = term * y;
      UNROLLED for (int i = 0; i < kPowers; ++i) {
        sums[i] += term;
        term *= x;
      }
      UNROLLED for (int j = 0; j < kRoots; ++j) {
        of_b *= size;
        sums[kPowers + j] -= of_b;
      }
    }
    for (int i = 0; i < kSums; ++i)
      for (int64_t lane = 0; lane < kCount; ++lane) totals[i] += sums[i][lane];
  }
};

// A place among the elements of a group, which go on from row to row.
struct Place {
  int64_t row, channel;
};

// Call `body` with the pieces of rows that make up the next `count` elements at most.
template <class Body>
inline int64_t for_pieces(const Call& call, int64_t group, int64_t end_row, Place& place,
                          Body body) {
  int64_t done = 0;
  while (done < kChunk && place.row < end_row) {
    const int64_t piece = std::min(kChunk - done, call.width - place.channel);
    body((place.row * call.num_groups + group) * call.width + place.channel, piece, done);
    done += piece;
    place.channel += piece;
    if (place.channel < call.width) break;
    place = {place.row + 1, 0};
  }
  return done;
}

template <class Real, class Element>
void pass_tile(const Call& call, int64_t tile, int64_t number) {
  constexpr int64_t kCount = Lanes<Real>::kCount;
  const Group<Real> group(call, number);
  const int64_t end = std::min((tile + 1) * call.tile_rows, call.num_rows);
  const auto* x = static_cast<const Element*>(call.x);
  const auto* dy = static_cast<const Element*>(call.dy);
  double totals[kSums] = {};
  Real xs[kChunk], dys[kChunk], outs[kChunk];
  for (Place place = {tile * call.tile_rows, 0}; place.row < end;) {
    const Place first = place;
    const int64_t count = for_pieces(
        call, number, end, place, [&](int64_t at, int64_t piece, int64_t done) {
          read_row(x + at, piece, xs + done);
          if (call.sums != nullptr) read_row(dy + at, piece, dys + done);
        });
    const int64_t padded = pad_to(count, kCount);
    std::fill(xs + count, xs + padded, Real{});
    std::fill(dys + count, dys + padded, Real{});
    if (call.sums == nullptr) {
      group.evaluate(xs, padded, outs);
    } else {
      group.differentiate(xs, dys, padded, outs, totals);
    }
    place = first;
    for_pieces(call, number, end, place, [&](int64_t at, int64_t piece, int64_t done) {
      write_row(outs + done, piece, static_cast<Element*>(call.out) + at);
    });
  }
  if (call.sums == nullptr) return;
  const Real* denominator = static_cast<const Real*>(call.denominator) + number * kRoots;
  for (int j = 0; j < kRoots; ++j)
    totals[kPowers + j] *= (denominator[j] > 0) - (denominator[j] < 0);
  std::copy_n(totals, kSums, call.partials + (tile * call.num_groups + number) * kSums);
}

template <class Real>
void pass(const Call& call) {
  const int64_t num_tiles = divide_up(call.num_rows, call.tile_rows);
  for_tasks(num_tiles * call.num_groups, call.num_threads, [&](int64_t task) {
    with_element<Real>(call.kind, [&](auto element) {
      pass_tile<Real, decltype(element)>(call, task / call.num_groups, task % call.num_groups);
    });
  });
  if (call.sums != nullptr)
    add_tiles(call.partials, num_tiles, call.num_groups * kSums, call.sums, call.num_threads);
}

}  // namespace

extern "C" void penstock_group_rational(const char* arguments) {
  const Call& call = *reinterpret_cast<const Call*>(arguments);
  if (call.kind == 3) {
    pass<double>(call);
  } else {
    pass<float>(call);
  }
}
