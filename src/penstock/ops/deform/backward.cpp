// Gradients of deformable convolutions; after `forward.cpp`.
//
//     dcolumn = W' dout      dx_q += (1 - |p - q|) m dcolumn    dW += dout column'
//     dm = sum_c dcolumn x(p)      dp = m sum_c dcolumn dx(p) / dp
//
// A task is a block of channels, of some images: it alone writes their dx and their weights, so that
// samples are scattered without atomic additions. Gradients of offsets and masks are sums over
// blocks: a block adds to those of a tile after the block before.

#include <sched.h>

namespace {

constexpr int64_t kBackwardTile = 96;  // pixels, whole rows of products

template <class Real, class Element>
struct BackwardPass {
  static constexpr int kCount = Lanes<Real>::kCount;
  static constexpr int64_t kPanel = 2 * kCount;
  const Call& call;
  std::atomic<int32_t>* turns;  // by image and tile: blocks that have added
  const Grid& grid;
  Places<Real> places{call, grid};
  Slices<Real> slices{call};
  int64_t taps = places.taps, plane = call.height * call.width;
  int64_t num_tiles = divide_up(places.pixels, kBackwardTile);

  Block block{};
  int64_t number = 0, width = 0, steps = 0, outs = 0;  // of the block; steps and outs are padded
  std::unique_ptr<Scratch<Real>> scratch;
  Real *slice, *dslice, *packed, *dweight, *dbias, *douts, *columns, *terms, *line;

  // Compute the gradients of a block, of images [first, end).
  void run_block(const Block& of, int64_t number_of, int64_t part, int64_t first, int64_t end) {
    begin(of, number_of);
    for (int64_t image = first; image < end; ++image) {
      slices.read(static_cast<const Element*>(call.x), block, image, 0, call.height, line, slice);
      std::fill_n(dslice, (plane + 1) * width, Real{});
      for (int64_t tile = 0; tile < num_tiles; ++tile) run_tile(image, tile);
      slices.write(dslice, block, image, line, static_cast<Element*>(call.dx));
    }
    write_weights(part);
  }

  void begin(const Block& of, int64_t number_of) {
    block = of;
    number = number_of;
    width = slices.width_of(block);
    steps = pad_to(taps * width, kPanel);
    outs = pad_to(block.out_count, kRows);
    scratch = std::make_unique<Scratch<Real>>();
    slice = scratch->take((plane + 1) * width);
    dslice = scratch->take((plane + 1) * width);
    packed = scratch->take(is_depthwise(call) ? steps : block.out_count * steps);
    dweight = scratch->take(is_depthwise(call) ? steps : outs * steps);
    dbias = scratch->take(outs);
    douts = scratch->take(outs * kBackwardTile);
    columns = scratch->take(kBackwardTile * steps);
    terms = scratch->take(3 * taps * kBackwardTile);
    line = scratch->take(kRun);
    if (is_depthwise(call)) {  // weights as (taps, channels)
      for (int64_t i = 0; i < taps * width; ++i)
        packed[i] = weight_of<Real>(call, block, i % width, i / width, i % width);
      return;
    }
    // Weights as (panels of two vectors of columns, outputs, columns).
    Real* to = packed;
    for (int64_t panel = 0; panel < steps; panel += kPanel)
      for (int64_t out = 0; out < block.out_count; ++out)
        for (int64_t i = panel; i < panel + kPanel; ++i)
          *to++ = i / width < taps ? weight_of<Real>(call, block, out, i / width, i % width) : Real{};
  }

  void run_tile(int64_t image, int64_t tile) {
    const int64_t first = tile * kBackwardTile;
    const int64_t count = std::min(kBackwardTile, places.pixels - first);
    read_douts(image, first, count);
    is_depthwise(call) ? spread_by_channel(count) : multiply_weights();
    for (int64_t i = 0; i < count; ++i)
      for (int64_t tap = 0; tap < taps; ++tap) run_sample(image, tap, first, i);
    add_terms(image, tile, first, count);
    is_depthwise(call) ? add_by_channel(count) : add_weights(count);
  }

  void multiply_weights() {
    for (int64_t panel = 0; panel < steps; panel += kPanel)
      for (int64_t row = 0; row < kBackwardTile; row += kRows)
        multiply_rows<Real, false, false>(douts + row, kBackwardTile,
                                          packed + panel * block.out_count, kPanel,
                                          columns + row * steps + panel, steps, block.out_count);
  }

  void add_weights(int64_t count) {
    for (int64_t panel = 0; panel < steps; panel += kPanel)
      for (int64_t out = 0; out < outs; out += kRows)
        multiply_rows<Real, true, true>(douts + out * kBackwardTile, kBackwardTile, columns + panel,
                                        steps, dweight + out * steps + panel, steps, count);
  }

  void spread_by_channel(int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t tap = 0; tap < taps; ++tap)
        for (int64_t c = 0; c < width; ++c)
          columns[i * steps + tap * width + c] =
              c < block.count ? packed[tap * width + c] * douts[c * kBackwardTile + i] : Real{};
  }

  void add_by_channel(int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t tap = 0; tap < taps; ++tap)
        for (int64_t c = 0; c < block.count; ++c)
          dweight[tap * width + c] += douts[c * kBackwardTile + i] * columns[i * steps + tap * width + c];
  }

  // Read the gradients of the block's outputs as (outputs, pixels), and add them up.
  void read_douts(int64_t image, int64_t first, int64_t count) {
    const auto* from = static_cast<const Element*>(call.out);
    for (int64_t out = 0; out < block.out_count; ++out) {
      Real* to = douts + out * kBackwardTile;
      read_row(from + (image * call.out_channels + block.out_first + out) * places.pixels + first,
               count, to);
      std::fill(to + count, to + kBackwardTile, Real{});
      Real sum{};
      for (int64_t i = 0; i < count; ++i) sum += to[i];
      dbias[out] += sum;
    }
  }

  // Take the gradient of a column, scatter it, and leave the column in its place.
  void run_sample(int64_t image, int64_t tap, int64_t first, int64_t i) {
    const Sample<Real> of =
        places.sample(image, block.offset_group, tap, first + i, 0, call.height);
    const Real up = 1 - of.down, left = 1 - of.right;
    const Real w0 = up * left, w1 = up * of.right, w2 = of.down * left, w3 = of.down * of.right;
    const int64_t at[4] = {of.corners[0] * width, of.corners[1] * width, of.corners[2] * width,
                           of.corners[3] * width};
    Real* column = columns + i * steps + tap * width;
    Vec<Real> dy{}, dx{}, dm{};
    for (int64_t c = 0; c < width; c += kCount) {
      const Vec<Real> given = load_vec<Real>(column + c), masked = of.mask * given;
      const Vec<Real> x0 = load_vec<Real>(slice + at[0] + c), x1 = load_vec<Real>(slice + at[1] + c);
      const Vec<Real> x2 = load_vec<Real>(slice + at[2] + c), x3 = load_vec<Real>(slice + at[3] + c);
      const Vec<Real> value = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3;
      dm += given * value;
      dy += masked * (left * (x2 - x0) + of.right * (x3 - x1));
      dx += masked * (up * (x1 - x0) + of.down * (x3 - x2));
      store_vec<Real>(column + c, of.mask * value);
      add(dslice + at[0] + c, w0 * masked);  // one after the other: corners outside are the same
      add(dslice + at[1] + c, w1 * masked);
      add(dslice + at[2] + c, w2 * masked);
      add(dslice + at[3] + c, w3 * masked);
    }
    Real* term = terms + 3 * tap * kBackwardTile + i;
    term[0] = add_all<Real>(dy);
    term[kBackwardTile] = add_all<Real>(dx);
    term[2 * kBackwardTile] = add_all<Real>(dm);
  }

  static void add(Real* to, Vec<Real> value) { store_vec<Real>(to, load_vec<Real>(to) + value); }

  // Add to the gradients of offsets and masks, after the block before.
  void add_terms(int64_t image, int64_t tile, int64_t first, int64_t count) {
    std::atomic<int32_t>& turn = turns[image * num_tiles + tile];
    while (turn.load(std::memory_order_acquire) != number) sched_yield();
    const int64_t rows = (image * call.offset_groups + block.offset_group) * taps;
    for (int64_t tap = 0; tap < taps; ++tap) {
      const Real* term = terms + 3 * tap * kBackwardTile;
      Real* dy = static_cast<Real*>(call.doffset) + 2 * (rows + tap) * places.pixels + first;
      for (int64_t i = 0; i < count; ++i) dy[i] += term[i];
      for (int64_t i = 0; i < count; ++i) dy[places.pixels + i] += term[kBackwardTile + i];
      if (call.dmask == nullptr) continue;
      Real* dm = static_cast<Real*>(call.dmask) + (rows + tap) * places.pixels + first;
      for (int64_t i = 0; i < count; ++i) dm[i] += term[2 * kBackwardTile + i];
    }
    turn.store(static_cast<int32_t>(number + 1), std::memory_order_release);
  }

  void write_weights(int64_t part) {
    const int64_t of_group = call.channels / call.groups;
    Real* to = static_cast<Real*>(call.dweight) + part * call.out_channels * of_group * taps;
    for (int64_t out = 0; out < block.out_count; ++out)
      for (int64_t channel = 0; channel < block.count; ++channel) {
        if (is_depthwise(call) && channel != out) continue;
        const int64_t row = is_depthwise(call) ? 0 : out * steps;
        const int64_t place = (block.out_first + out) * of_group + (block.first + channel) % of_group;
        for (int64_t tap = 0; tap < taps; ++tap)
          to[place * taps + tap] = dweight[row + tap * width + channel];
      }
    if (call.dbias == nullptr || block.first % of_group != 0) return;
    Real* sums = static_cast<Real*>(call.dbias) + part * call.out_channels + block.out_first;
    std::copy_n(dbias, block.out_count, sums);
  }
};

template <class Real, class Element>
void run_backward(const Call& call) {
  const std::vector<Block> blocks = divide_channels(call);
  const auto num_blocks = static_cast<int64_t>(blocks.size());
  const int64_t num_tasks = num_blocks * call.num_parts;
  const int64_t tiles = divide_up(call.out_height * call.out_width, kBackwardTile);
  const Grid grid(call);
  std::vector<std::atomic<int32_t>> turns(call.batch * tiles);
  std::atomic<int64_t> next{0};
  // Blocks of a part are taken in their order, so the one that is waited for is done or at work.
  parallel(static_cast<int>(std::min(call.num_threads, num_tasks)), [&](int, int) {
    BackwardPass<Real, Element> pass{call, turns.data(), grid};
    for (int64_t task; (task = next.fetch_add(1)) < num_tasks;) {
      const int64_t part = task / num_blocks, number = task % num_blocks;
      pass.run_block(blocks[number], number, part, call.batch * part / call.num_parts,
                     call.batch * (part + 1) / call.num_parts);
    }
  });
}

}  // namespace

extern "C" {

// Compute the output, or the gradients where there is room for them.
void penstock_deform(const Call* call) {
  const auto run = [&](auto real) {
    using Real = decltype(real);
    with_element<Real>(call->kind, [&](auto element) {
      using Element = decltype(element);
      if (call->dx == nullptr)
        run_forward<Real, Element>(*call);
      else
        run_backward<Real, Element>(*call);
    });
  };
  if (call->kind == 3)
    run(double{});
  else
    run(float{});
}

}  // extern "C"
