// Filters that depend on the position, and their gradients; after `windows.cpp`.
//
//     y[b][o][i][j] = sum_cfk weight[o][c][f][k][i][j] x[b][c][row(i, f)][column(j, k)]
//
// The lanes of vectors run over j. A weight is read once, into a register, for several samples, and
// rows of x, as long as they are needed, lie in phases of the stride, so that a window's columns are
// the same row from another place on: no window is ever built. Rows pass by bands.
//
// Instances have weights and planes of their own: groups of channels, or groups of samples.

namespace {

// As `_native.py` passes it. Strides are of elements, those of columns are 1.
struct FilterCall {
  const void* x;       // or null
  const void* weight;  // or null
  const void* dy;      // or null in the forward pass
  void* out;           // y, dx or dweight
  Geometry geometry;
  int64_t instances, batch, channels, outs;
  int64_t x_instance, x_batch, x_channel;  // rows of planes follow each other
  int64_t y_instance, y_batch, y_out;
  int64_t w_instance, w_out, w_channel, w_row, w_column, w_line;  // the last one is that of i
  int64_t kind, num_threads;
};

// Offsets of two factors whose product is a term of a sum.
struct Term {
  int64_t left, right;
};

// out[a][b][at] (+)= sum_t left[a][t.left + at] right[b][t.right + at], for the columns of a range.
template <class Real, int A, int B>
void multiply(const Real* const* left, const Real* const* right, const std::vector<Term>& terms,
              int64_t begin, int64_t end, Real* const* out, int64_t out_stride, bool adds) {
  using V = Vec<Real>;
  for (int64_t at = begin; at < end; at += Lanes<Real>::kCount) {
    V sums[A][B] = {};
    for (const Term& term : terms) {
      V factors[A];
      UNROLLED for (int a = 0; a < A; ++a) factors[a] = load_vec<Real>(left[a] + term.left + at);
      UNROLLED for (int b = 0; b < B; ++b) {
        const V other = load_vec<Real>(right[b] + term.right + at);
        UNROLLED for (int a = 0; a < A; ++a) sums[a][b] += factors[a] * other;
      }
    }
    UNROLLED for (int a = 0; a < A; ++a)
      UNROLLED for (int b = 0; b < B; ++b) {
        Real* to = out[a] + b * out_stride + at;
        store_vec<Real>(to, adds ? load_vec<Real>(to) + sums[a][b] : sums[a][b]);
      }
  }
}

constexpr int kLeft = 2, kRight = 4;  // with their sums they fill the registers of AVX2

template <class Real>
using Multiply = decltype(&multiply<Real, 1, 1>);

template <class Real>
constexpr Multiply<Real> kMultiply[kLeft][kRight] = {
    {multiply<Real, 1, 1>, multiply<Real, 1, 2>, multiply<Real, 1, 3>, multiply<Real, 1, 4>},
    {multiply<Real, 2, 1>, multiply<Real, 2, 2>, multiply<Real, 2, 3>, multiply<Real, 2, 4>}};

// Multiply each left with each right factor: columns outside, so that both stay in the first cache.
template <class Real>
void multiply_all(const std::vector<const Real*>& left, const std::vector<const Real*>& right,
                  const std::vector<Term>& terms, int64_t width, const std::vector<Real*>& out,
                  int64_t out_stride, bool adds) {
  const auto num_left = static_cast<int64_t>(left.size());
  const auto num_right = static_cast<int64_t>(right.size());
  const int64_t step = terms.size() < 32 ? width : Lanes<Real>::kCount;
  for (int64_t at = 0; at < width; at += step)
    for (int64_t a = 0; a < num_left; a += kLeft) {
      const int64_t lefts = std::min<int64_t>(kLeft, num_left - a);
      for (int64_t b = 0; b < num_right; b += kRight) {
        const int64_t rights = std::min<int64_t>(kRight, num_right - b);
        Real* to[kLeft];
        for (int64_t i = 0; i < lefts; ++i) to[i] = out[a + i] + b * out_stride;
        kMultiply<Real>[lefts - 1][rights - 1](left.data() + a, right.data() + b, terms, at,
                                               at + step, to, out_stride, adds);
      }
    }
}

// Return the numerator over the denominator, rounded up; the denominator is positive.
inline int64_t ceil_divide(int64_t numerator, int64_t denominator) {
  return numerator <= 0 ? -(-numerator / denominator) : divide_up(numerator, denominator);
}

// A thread's work on bands of rows.
template <class Real, class Element>
class Filter {
 public:
  static constexpr int64_t kBandBytes = 96 << 10, kBatch = 32;

  explicit Filter(const FilterCall& of) : call(of), g(of.geometry) {
    width = pad_to(g.out_width, Lanes<Real>::kCount);
    phase = width + (g.kernel_width - 1) * g.dilation_width / g.stride_width;
    is_direct = std::is_same_v<Real, Element> && width == g.out_width;
  }

  // Compute y of a band of output rows.
  void multiply_band(int64_t instance, int64_t batch, int64_t first, int64_t end) {
    const int64_t samples = std::min(kBatch, call.batch - batch);
    read_x(instance, batch, samples, first, end);
    sums.resize(call.outs * samples * width);
    for (int64_t i = first; i < end; ++i) {
      clear();
      const Weights weights = read_weights(instance, i);
      for (int64_t c = 0; c < call.channels; ++c)
        for (int64_t f = 0; f < g.kernel_height; ++f)
          for (int64_t k = 0; k < g.kernel_width; ++k)
            terms.push_back({c * weights.channel + f * weights.row + k * weights.column,
                             at_x(0, c, (i - first) * g.stride_height + f * g.dilation_height, k)});
      for (int64_t o = 0; o < call.outs; ++o) {
        left.push_back(weights.data + o * weights.out);
        out.push_back(sums.data() + o * samples * width);
      }
      for (int64_t b = 0; b < samples; ++b) right.push_back(x.data() + at_x(b, 0, 0, -1));
      multiply_all<Real>(left, right, terms, width, out, width, false);
      for (int64_t o = 0; o < call.outs; ++o)
        for (int64_t b = 0; b < samples; ++b)
          write_row(sums.data() + (o * samples + b) * width, g.out_width,
                    static_cast<Element*>(call.out) + at_y(instance, batch + b, o, i));
    }
  }

  // Compute dweight of a band of output rows.
  void differentiate_weights(int64_t instance, int64_t first, int64_t end) {
    read_x(instance, 0, call.batch, first, end);
    read_dy(instance, 0, call.batch, first, end);
    sums.resize(call.outs * g.kernel_width * width);
    for (int64_t i = first; i < end; ++i) {
      clear();
      for (int64_t b = 0; b < call.batch; ++b) terms.push_back({at_dy(b, 0, 0), at_x(b, 0, 0, -1)});
      for (int64_t o = 0; o < call.outs; ++o) {
        left.push_back(dy.data() + at_dy(0, o, i - first));
        out.push_back(sums.data() + o * g.kernel_width * width);
      }
      for (int64_t c = 0; c < call.channels; ++c)
        for (int64_t f = 0; f < g.kernel_height; ++f) {
          right.clear();
          const int64_t row = (i - first) * g.stride_height + f * g.dilation_height;
          for (int64_t k = 0; k < g.kernel_width; ++k) right.push_back(x.data() + at_x(0, c, row, k));
          multiply_all<Real>(left, right, terms, width, out, width, false);
          for (int64_t o = 0; o < call.outs; ++o)
            for (int64_t k = 0; k < g.kernel_width; ++k)
              write_row(sums.data() + (o * g.kernel_width + k) * width, g.out_width,
                        static_cast<Element*>(call.out) + at_weight(instance, o, c, f, k, i));
        }
    }
  }

  // Compute dx of a band of input rows: each of them from all rows of the output that have it.
  void differentiate_x(int64_t instance, int64_t batch, int64_t first, int64_t end) {
    const int64_t samples = std::min(kBatch, call.batch - batch);
    const int64_t reach = (g.kernel_height - 1) * g.dilation_height;
    const int64_t low =
        std::max<int64_t>(0, ceil_divide(first + g.padding_height - reach, g.stride_height));
    const int64_t high =
        std::min(g.out_height, (end - 1 + g.padding_height) / g.stride_height + 1);
    read_dy(instance, batch, samples, low, std::max(low, high));
    const int64_t columns = g.stride_width * phase;
    row.resize(g.width);
    for (int64_t r = first; r < end; ++r)
      for (int64_t c = 0; c < call.channels; c += kLeft) {
        const int64_t channels = std::min<int64_t>(kLeft, call.channels - c);
        sums.assign(channels * samples * columns, Real{});
        for (int64_t f = 0; f < g.kernel_height; ++f) {
          const int64_t from = r + g.padding_height - f * g.dilation_height;
          if (from < 0 || from % g.stride_height || from / g.stride_height >= g.out_height) continue;
          for (int64_t k = 0; k < g.kernel_width; ++k)
            add_line(instance, samples, c, channels, f, k, from / g.stride_height, low);
        }
        for (int64_t a = 0; a < channels; ++a)
          for (int64_t b = 0; b < samples; ++b)
            write_x(sums.data() + (a * samples + b) * columns, instance, batch + b, c + a, r);
      }
  }

 private:
  // A row of output positions, of all weights; strides are of elements.
  struct Weights {
    const Real* data;
    int64_t out, channel, row, column;
  };

  void clear() {
    terms.clear();
    left.clear();
    right.clear();
    out.clear();
  }

  // Add to columns of x, in phases, what row i of the output has of them at a place of the kernel.
  void add_line(int64_t instance, int64_t samples, int64_t c, int64_t channels, int64_t f,
                int64_t k, int64_t i, int64_t low) {
    clear();
    const int64_t columns = g.stride_width * phase;
    const Weights weights = read_column(instance, c, channels, f, k, i);
    for (int64_t o = 0; o < call.outs; ++o) terms.push_back({o * weights.out, at_dy(0, o, 0)});
    for (int64_t a = 0; a < channels; ++a) {
      left.push_back(weights.data + a * weights.channel);
      out.push_back(sums.data() + a * samples * columns + at_column(k));
    }
    for (int64_t b = 0; b < samples; ++b) right.push_back(dy.data() + at_dy(b, 0, i - low));
    multiply_all<Real>(left, right, terms, width, out, columns, true);
  }

  int64_t at_column(int64_t k) const {
    const int64_t column = k * g.dilation_width;
    return column % g.stride_width * phase + column / g.stride_width;
  }
  // Place of a row of x in the band that was read, from the window's column k on; -1 for the row.
  int64_t at_x(int64_t b, int64_t c, int64_t row, int64_t k) const {
    return ((b * call.channels + c) * x_rows + row) * g.stride_width * phase +
           (k < 0 ? 0 : at_column(k));
  }
  int64_t at_dy(int64_t b, int64_t o, int64_t row) const {
    return ((b * call.outs + o) * dy_rows + row) * width;
  }
  int64_t at_y(int64_t instance, int64_t b, int64_t o, int64_t i) const {
    return instance * call.y_instance + b * call.y_batch + o * call.y_out + i * g.out_width;
  }
  int64_t at_weight(int64_t instance, int64_t o, int64_t c, int64_t f, int64_t k, int64_t i) const {
    return instance * call.w_instance + o * call.w_out + c * call.w_channel + f * call.w_row +
           k * call.w_column + i * call.w_line;
  }

  // Read the rows of x that windows of a band of output rows have, with padding, in phases.
  void read_x(int64_t instance, int64_t batch, int64_t samples, int64_t first, int64_t end) {
    x_rows = (end - first - 1) * g.stride_height + (g.kernel_height - 1) * g.dilation_height + 1;
    const int64_t top = first * g.stride_height - g.padding_height;
    x.assign(samples * call.channels * x_rows * g.stride_width * phase, Real{});
    row.resize(g.width);
    const auto* planes = static_cast<const Element*>(call.x);
    for (int64_t b = 0; b < samples; ++b)
      for (int64_t c = 0; c < call.channels; ++c)
        for (int64_t r = std::max<int64_t>(0, -top); r < x_rows && top + r < g.height; ++r) {
          read_row(planes + at_plane(instance, batch + b, c) + (top + r) * g.width, g.width,
                   row.data());
          Real* to = x.data() + at_x(b, c, r, -1);
          for_columns([&](int64_t column, int64_t place) { to[place] = row[column]; });
        }
  }

  void write_x(const Real* from, int64_t instance, int64_t b, int64_t c, int64_t r) {
    std::fill(row.begin(), row.end(), Real{});
    for_columns([&](int64_t column, int64_t place) { row[column] = from[place]; });
    write_row(row.data(), g.width,
              static_cast<Element*>(call.out) + at_plane(instance, b, c) + r * g.width);
  }

  int64_t at_plane(int64_t instance, int64_t b, int64_t c) const {
    return instance * call.x_instance + b * call.x_batch + c * call.x_channel;
  }

  // Call `body` with the columns of x that some window has, and their places in phases.
  template <class Body>
  void for_columns(Body body) const {
    const int64_t end = std::min(g.width, g.span() - g.padding_width);
    if (g.stride_width == 1) {
      for (int64_t w = 0; w < end; ++w) body(w, w + g.padding_width);
      return;
    }
    for (int64_t w = 0; w < end; ++w) {
      const int64_t column = w + g.padding_width;
      body(w, column % g.stride_width * phase + column / g.stride_width);
    }
  }

  void read_dy(int64_t instance, int64_t batch, int64_t samples, int64_t first, int64_t end) {
    dy_rows = end - first;
    dy.assign(samples * call.outs * dy_rows * width, Real{});
    for (int64_t b = 0; b < samples; ++b)
      for (int64_t o = 0; o < call.outs; ++o)
        for (int64_t i = first; i < end; ++i)
          read_row(static_cast<const Element*>(call.dy) + at_y(instance, batch + b, o, i),
                   g.out_width, dy.data() + at_dy(b, o, i - first));
  }

  // Return the weights of a row of output positions: as they lie where that can be multiplied.
  Weights read_weights(int64_t instance, int64_t i) {
    if constexpr (std::is_same_v<Real, Element>) {
      if (is_direct)
        return {static_cast<const Real*>(call.weight) + at_weight(instance, 0, 0, 0, 0, i),
                call.w_out, call.w_channel, call.w_row, call.w_column};
    }
    const int64_t row = g.kernel_width * width, channel = g.kernel_height * row;
    const int64_t out = call.channels * channel;
    room.assign(call.outs * out, Real{});
    for (int64_t o = 0; o < call.outs; ++o)
      for (int64_t c = 0; c < call.channels; ++c)
        for (int64_t f = 0; f < g.kernel_height; ++f)
          for (int64_t k = 0; k < g.kernel_width; ++k)
            read_row(static_cast<const Element*>(call.weight) + at_weight(instance, o, c, f, k, i),
                     g.out_width, room.data() + o * out + c * channel + f * row + k * width);
    return {room.data(), out, channel, row, width};
  }

  // Return the weights of a row of output positions at one place of the kernel, of some channels.
  Weights read_column(int64_t instance, int64_t c, int64_t channels, int64_t f, int64_t k,
                      int64_t i) {
    if constexpr (std::is_same_v<Real, Element>) {
      if (is_direct)
        return {static_cast<const Real*>(call.weight) + at_weight(instance, 0, c, f, k, i),
                call.w_out, call.w_channel, 0, 0};
    }
    room.assign(channels * call.outs * width, Real{});
    for (int64_t a = 0; a < channels; ++a)
      for (int64_t o = 0; o < call.outs; ++o)
        read_row(static_cast<const Element*>(call.weight) + at_weight(instance, o, c + a, f, k, i),
                 g.out_width, room.data() + (a * call.outs + o) * width);
    return {room.data(), width, call.outs * width, 0, 0};
  }

  const FilterCall& call;
  const Geometry& g;
  int64_t width;   // of a row of the output, in whole vectors
  int64_t phase;   // of a row of x: every column that is a stride from the next one
  bool is_direct;  // whether weights can be multiplied where they lie
  int64_t x_rows = 0, dy_rows = 0;
  std::vector<Real> x, dy, room, row, sums;
  std::vector<Term> terms;
  std::vector<const Real*> left, right;
  std::vector<Real*> out;
};

// Return the rows of a band: few enough for the caches, and for every thread to have some.
template <class Real>
int64_t choose_band(const FilterCall& call, int64_t num_rows, int64_t samples, int64_t tasks) {
  const Geometry& g = call.geometry;
  const int64_t planes = samples * std::max(call.channels, call.outs);
  const int64_t row_bytes = planes * std::max(g.width, g.out_width) * sizeof(Real);
  const int64_t fit = Filter<Real, Real>::kBandBytes / std::max<int64_t>(1, row_bytes);
  const int64_t fair = num_rows * tasks / (2 * call.num_threads);
  return std::max<int64_t>(1, std::min({fit, fair, num_rows}));
}

enum class Pass { kForward, kInput, kWeight };

template <class Real>
void filter(const FilterCall& call, Pass pass) {
  const Geometry& g = call.geometry;
  const int64_t samples = pass == Pass::kWeight ? call.batch : Filter<Real, Real>::kBatch;
  const int64_t num_pieces = pass == Pass::kWeight ? 1 : divide_up(call.batch, samples);
  const int64_t num_rows = pass == Pass::kInput ? g.height : g.out_height;
  const int64_t band = choose_band<Real>(call, num_rows, std::min(samples, call.batch),
                                         call.instances * num_pieces);
  const int64_t num_bands = divide_up(num_rows, band);
  const int64_t count = call.instances * num_pieces * num_bands;
  parallel(static_cast<int>(std::min(call.num_threads, count)), [&](int64_t thread,
                                                                    int64_t threads) {
    with_element<Real>(call.kind, [&](auto element) {
      Filter<Real, decltype(element)> work(call);
      for (int64_t i = count * thread / threads; i < count * (thread + 1) / threads; ++i) {
        const int64_t first = i % num_bands * band, end = std::min(first + band, num_rows);
        const int64_t piece = i / num_bands % num_pieces, instance = i / num_bands / num_pieces;
        switch (pass) {
          case Pass::kForward: work.multiply_band(instance, piece * samples, first, end); break;
          case Pass::kInput: work.differentiate_x(instance, piece * samples, first, end); break;
          case Pass::kWeight: work.differentiate_weights(instance, first, end); break;
        }
      }
    });
  });
}

}  // namespace

extern "C" void penstock_filter(const char* arguments, int pass) {
  const FilterCall& call = *reinterpret_cast<const FilterCall*>(arguments);
  if (call.kind == 3) {
    filter<double>(call, static_cast<Pass>(pass));
  } else {
    filter<float>(call, static_cast<Pass>(pass));
  }
}
