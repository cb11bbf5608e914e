// The output of deformable convolutions; after `samples.cpp`.
//
// A task is a band of an image's output pixels. Block after block, the rows that its samples reach
// are read, columns are made for a tile, and multiplied into the sums of the tile at once.

namespace {

constexpr int64_t kForwardTile = 48;               // pixels, whole rows of products
constexpr int64_t kBandPixels = 8 * kForwardTile;  // whose sums stay in a core's cache

// Weights as `(block, panels of two vectors of outputs, columns, outputs)`; depthwise as
// `(block, taps, channels)`.
template <class Real>
struct ForwardWeights {
  static constexpr int64_t kPanel = 2 * Lanes<Real>::kCount;
  std::vector<int64_t> starts;  // of blocks
  std::unique_ptr<Real[]> values;

  ForwardWeights(const Call& call, const std::vector<Block>& blocks) {
    const int64_t taps = call.kernel_height * call.kernel_width;
    int64_t total = 0;
    for (const Block& block : blocks) {
      starts.push_back(total);
      const int64_t outs = is_depthwise(call) ? 1 : pad_to(block.out_count, kPanel);
      total += outs * taps * Slices<Real>::width_of(block);
    }
    values.reset(new Real[total]);
    std::atomic<int64_t> next{0};
    const auto count = static_cast<int64_t>(blocks.size());
    parallel(static_cast<int>(std::min(call.num_threads, count)), [&](int, int) {
      for (int64_t b; (b = next.fetch_add(1)) < count;) pack(call, blocks[b], &values[starts[b]]);
    });
  }

  static void pack(const Call& call, const Block& block, Real* to) {
    const int64_t taps = call.kernel_height * call.kernel_width;
    const int64_t width = Slices<Real>::width_of(block);
    if (is_depthwise(call)) {
      for (int64_t tap = 0; tap < taps; ++tap)
        for (int64_t c = 0; c < width; ++c) *to++ = weight_of<Real>(call, block, c, tap, c);
      return;
    }
    for (int64_t out = 0; out < block.out_count; out += kPanel)
      for (int64_t tap = 0; tap < taps; ++tap)
        for (int64_t c = 0; c < width; ++c)
          for (int64_t i = 0; i < kPanel; ++i) *to++ = weight_of<Real>(call, block, out + i, tap, c);
  }
};

template <class Real, class Element>
struct ForwardPass {
  static constexpr int64_t kPanel = ForwardWeights<Real>::kPanel;
  const Call& call;
  const std::vector<Block>& blocks;
  const ForwardWeights<Real>& weights;
  const Grid& grid;
  Places<Real> places{call, grid};
  Slices<Real> slices{call};
  int64_t outs = blocks.back().out_start + pad_to(blocks.back().out_count, kPanel) + kPanel;
  Scratch<Real> scratch;
  Real* sums = scratch.take(kBandPixels * outs);
  Real* columns = scratch.take(kForwardTile * places.taps * kBlockChannels);
  Real* line = scratch.take(kRun);
  std::vector<Real> slice;

  void run_band(int64_t image, int64_t first, int64_t end) {
    std::fill_n(sums, kBandPixels * outs, Real{});
    for (size_t b = 0; b < blocks.size(); ++b) {
      const Block& block = blocks[b];
      const auto [from, upto] = places.find_rows(image, block.offset_group, first, end);
      const int64_t width = slices.width_of(block);
      const size_t needed = ((upto - from) * call.width + 1) * width;
      if (slice.size() < needed) slice.resize(needed);
      slices.read(static_cast<const Element*>(call.x), block, image, from, upto, line, slice.data());
      for (int64_t tile = first; tile < end; tile += kForwardTile) {
        const int64_t count = std::min(kForwardTile, end - tile);
        make_columns(image, block, tile, count, from, upto);
        Real* to = sums + (tile - first) * outs + block.out_start;
        const Real* packed = &weights.values[weights.starts[b]];
        is_depthwise(call) ? add_by_channel(block, packed, to, count) : multiply(block, packed, to);
      }
    }
    write(image, first, end);
  }

  // columns[pixel][tap][channel] = m x(p)
  void make_columns(int64_t image, const Block& block, int64_t tile, int64_t count, int64_t from,
                    int64_t upto) {
    constexpr int kCount = Lanes<Real>::kCount;
    const int64_t width = slices.width_of(block), stride = places.taps * width;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t tap = 0; tap < places.taps; ++tap) {
        const Sample<Real> of =
            places.sample(image, block.offset_group, tap, tile + i, from, upto);
        const Real up = of.mask * (1 - of.down), down = of.mask * of.down;
        const Real w0 = up * (1 - of.right), w1 = up * of.right;
        const Real w2 = down * (1 - of.right), w3 = down * of.right;
        const Real* x0 = slice.data() + of.corners[0] * width;
        const Real* x1 = slice.data() + of.corners[1] * width;
        const Real* x2 = slice.data() + of.corners[2] * width;
        const Real* x3 = slice.data() + of.corners[3] * width;
        Real* to = columns + i * stride + tap * width;
        for (int64_t c = 0; c < width; c += kCount)
          store_vec<Real>(to + c, w0 * load_vec<Real>(x0 + c) + w1 * load_vec<Real>(x1 + c) +
                                      w2 * load_vec<Real>(x2 + c) + w3 * load_vec<Real>(x3 + c));
      }
    std::fill(columns + count * stride, columns + kForwardTile * stride, Real{});
  }

  void multiply(const Block& block, const Real* packed, Real* to) {
    const int64_t steps = places.taps * slices.width_of(block);
    for (int64_t out = 0; out < block.out_count; out += kPanel)
      for (int64_t row = 0; row < kForwardTile; row += kRows)
        multiply_rows<Real, true, true>(columns + row * steps, steps, packed + out * steps, kPanel,
                                        to + row * outs + out, outs, steps);
  }

  void add_by_channel(const Block& block, const Real* packed, Real* to, int64_t count) {
    constexpr int kCount = Lanes<Real>::kCount;
    const int64_t width = slices.width_of(block), stride = places.taps * width;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t c = 0; c < width; c += kCount) {
        Vec<Real> sum{};
        for (int64_t at = c; at < stride; at += width)
          sum += load_vec<Real>(packed + at) * load_vec<Real>(columns + i * stride + at);
        store_vec<Real>(to + i * outs + c, sum);
      }
  }

  void write(int64_t image, int64_t first, int64_t end) {
    const auto* bias = static_cast<const Real*>(call.bias);
    for (const Block& block : blocks)
      if (&block == blocks.data() || block.out_first != (&block)[-1].out_first)
        for (int64_t out = 0; out < block.out_count; ++out)
          write_output(image, first, end, block.out_first + out, block.out_start + out, bias);
  }

  void write_output(int64_t image, int64_t first, int64_t end, int64_t o, int64_t place,
                    const Real* bias) {
    const Real added = bias == nullptr ? Real{} : bias[o];
    auto* to = static_cast<Element*>(call.out) + (image * call.out_channels + o) * places.pixels;
    for (int64_t pixel = first; pixel < end; pixel += kRun) {
      const int64_t count = std::min(kRun, end - pixel);
      for (int64_t i = 0; i < count; ++i) line[i] = sums[(pixel - first + i) * outs + place] + added;
      write_row(line, count, to + pixel);
    }
  }
};

template <class Real, class Element>
void run_forward(const Call& call) {
  const std::vector<Block> blocks = divide_channels(call);
  const ForwardWeights<Real> weights(call, blocks);
  const Grid grid(call);
  const int64_t pixels = call.out_height * call.out_width;
  const int64_t bands = divide_up(pixels, kBandPixels), num_tasks = call.batch * bands;
  std::atomic<int64_t> next{0};
  parallel(static_cast<int>(std::min(call.num_threads, num_tasks)), [&](int, int) {
    ForwardPass<Real, Element> pass{call, blocks, weights, grid};
    for (int64_t task; (task = next.fetch_add(1)) < num_tasks;) {
      const int64_t first = task % bands * kBandPixels;
      pass.run_band(task / bands, first, std::min(pixels, first + kBandPixels));
    }
  });
}

}  // namespace

