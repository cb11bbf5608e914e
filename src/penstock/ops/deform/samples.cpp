// Samples of deformable convolutions: blocks of channels, places, and products of tiles; after
// `codegen/reals.cpp`.
//
//     p = stride o + dilation k - padding + offset      x(p) = sum of corners q of (1 - |p - q|) x_q
//     y(o) = sum over k, c of w_ck m_k(o) x_c(p_k(o))
//
// Channels are taken in blocks, whose slice of an image lies with its channels together, so that
// lanes run over channels, a sample has its four corners computed once for the block, and its
// gradient needs no sum across pixels. A tile is some pixels of the output, with the block's columns:
// `(pixels, taps, channels)`, the only columns that there are.

#include <atomic>
#include <memory>

namespace {

// Fields of `_native.py`; tensors are contiguous, `(batch, channels, height, width)`.
struct Call {
  const void* x;
  const void* offset;  // of the type of sums, as all that is not x, out, dout and dx
  const void* mask;    // or null
  const void* weight;
  const void* bias;  // or null
  void* out;         // or dout
  void* dx;
  void* doffset;
  void* dmask;
  void* dweight;  // by part
  void* dbias;    // by part
  int64_t batch, channels, height, width;
  int64_t out_channels, kernel_height, kernel_width, out_height, out_width;
  int64_t stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x;
  int64_t groups, offset_groups, num_parts;
  int64_t kind, num_threads;
};

constexpr int64_t kBlockChannels = 32;
constexpr int64_t kRun = 256;  // pixels that are transposed together: their lines stay at hand
#ifdef __AVX512F__
constexpr int kRows = 12;  // rows of a product: with two vectors each, and what they meet, registers
#else
constexpr int kRows = 6;
#endif

// Channels that share an offset group and a weight group, or where each group is one channel with one
// output, of several such groups. Nothing passes from a group to another, no NaN either.
struct Block {
  int64_t first, count, out_first, out_count, offset_group;
  int64_t out_start;  // of its outputs in sums of all, where those of each group are padded
};

inline bool is_depthwise(const Call& call) {
  return call.groups == call.channels && call.out_channels == call.channels;
}

inline std::vector<Block> divide_channels(const Call& call) {
  const int64_t of_group = is_depthwise(call) ? call.channels : call.channels / call.groups;
  const int64_t outs = call.out_channels / call.groups;
  const int64_t of_offset = call.channels / call.offset_groups;
  std::vector<Block> blocks;
  int64_t out_end = 0;
  for (int64_t first = 0; first < call.channels;) {
    const int64_t group = first / of_group, offset_group = first / of_offset;
    const int64_t end = std::min({(offset_group + 1) * of_offset, (group + 1) * of_group,
                                  first + kBlockChannels});
    Block block{first, end - first, group * outs, outs, offset_group, 0};
    if (is_depthwise(call)) block.out_first = first, block.out_count = block.count;
    const bool is_new = blocks.empty() || blocks.back().out_first != block.out_first;
    block.out_start = is_new ? out_end : blocks.back().out_start;
    if (is_new) out_end += pad_to(block.out_count, 2 * kLanes);
    blocks.push_back(block);
    first = end;
  }
  return blocks;
}

// Compute kRows rows of a product, c[r][lane] (+)= sum_t a(r, t) b[t][lane]. `Along`: a(r, t) is
// a[r * a_stride + t]; else a[t * a_stride + r].
template <class Real, bool Along, bool Adds>
inline void multiply_rows(const Real* a, int64_t a_stride, const Real* b, int64_t b_stride, Real* c,
                          int64_t c_stride, int64_t steps) {
  constexpr int kCount = Lanes<Real>::kCount;
  Vec<Real> sums[kRows][2] = {};
  if constexpr (Adds) {
    UNROLLED for (int r = 0; r < kRows; ++r)
      UNROLLED for (int i = 0; i < 2; ++i) sums[r][i] = load_vec<Real>(c + r * c_stride + i * kCount);
  }
  for (int64_t t = 0; t < steps; ++t) {
    const Vec<Real> near = load_vec<Real>(b + t * b_stride);
    const Vec<Real> far = load_vec<Real>(b + t * b_stride + kCount);
    UNROLLED for (int r = 0; r < kRows; ++r) {
      const Real left = Along ? a[r * a_stride + t] : a[t * a_stride + r];
      sums[r][0] += left * near;
      sums[r][1] += left * far;
    }
  }
  UNROLLED for (int r = 0; r < kRows; ++r)
    UNROLLED for (int i = 0; i < 2; ++i) store_vec<Real>(c + r * c_stride + i * kCount, sums[r][i]);
}

// Corners of a sample, as rows of a slice, and how far it is from the first one. A corner outside of
// the image is the row behind the slice, which is 0.
template <class Real>
struct Sample {
  int32_t corners[4];
  Real down, right, mask;
};

// Where samples are without their offsets: that of a tap plus that of a pixel of the output.
struct Grid {
  std::vector<int32_t> pixel_y, pixel_x, tap_y, tap_x;

  explicit Grid(const Call& call) {
    for (int64_t y = 0; y < call.out_height; ++y)
      for (int64_t x = 0; x < call.out_width; ++x) {
        pixel_y.push_back(static_cast<int32_t>(y * call.stride_y - call.padding_y));
        pixel_x.push_back(static_cast<int32_t>(x * call.stride_x - call.padding_x));
      }
    for (int64_t y = 0; y < call.kernel_height; ++y)
      for (int64_t x = 0; x < call.kernel_width; ++x) {
        tap_y.push_back(static_cast<int32_t>(y * call.dilation_y));
        tap_x.push_back(static_cast<int32_t>(x * call.dilation_x));
      }
  }
};

template <class Real>
struct Places {
  const Call& call;
  const Grid& grid;
  int64_t taps = call.kernel_height * call.kernel_width;
  int64_t pixels = call.out_height * call.out_width;

  // Return the offsets of a tap in y, which are followed by those in x.
  const Real* offsets_of(int64_t image, int64_t group, int64_t tap) const {
    const int64_t row = ((image * call.offset_groups + group) * taps + tap) * 2;
    return static_cast<const Real*>(call.offset) + row * pixels;
  }

  // Return the sample of a tap, of a slice that has the rows [first_row, end_row) of the image.
  Sample<Real> sample(int64_t image, int64_t group, int64_t tap, int64_t pixel, int64_t first_row,
                      int64_t end_row) const {
    const Real* offset = offsets_of(image, group, tap) + pixel;
    const Real y = static_cast<Real>(grid.pixel_y[pixel] + grid.tap_y[tap]) + offset[0];
    const Real x = static_cast<Real>(grid.pixel_x[pixel] + grid.tap_x[tap]) + offset[pixels];
    Sample<Real> of;
    const auto outside = static_cast<int32_t>((end_row - first_row) * call.width);
    of.mask = Real{1};
    if (call.mask != nullptr)
      of.mask = static_cast<const Real*>(
          call.mask)[((image * call.offset_groups + group) * taps + tap) * pixels + pixel];
    // What is further outside than one row has no corner inside; a NaN has none, and stays one.
    const bool is_near = y > -2 && y < static_cast<Real>(call.height + 1) && x > -2 &&
                         x < static_cast<Real>(call.width + 1);
    if (!is_near) {
      std::fill_n(of.corners, 4, outside);
      of.down = y == y && x == x ? Real{} : std::numeric_limits<Real>::quiet_NaN();
      of.right = of.down;
      return of;
    }
    const Real top = std::floor(y), left = std::floor(x);
    of.down = y - top;
    of.right = x - left;
    const auto row = static_cast<int32_t>(top), column = static_cast<int32_t>(left);
    const auto width = static_cast<int32_t>(call.width);
    const bool has_top = row >= 0 && row < call.height, has_end = row + 1 >= 0 && row + 1 < call.height;
    const bool has_left = column >= 0 && column < width;
    const bool has_right = column + 1 >= 0 && column + 1 < width;
    const int32_t at = (row - static_cast<int32_t>(first_row)) * width + column;
    of.corners[0] = has_top && has_left ? at : outside;
    of.corners[1] = has_top && has_right ? at + 1 : outside;
    of.corners[2] = has_end && has_left ? at + width : outside;
    of.corners[3] = has_end && has_right ? at + width + 1 : outside;
    return of;
  }

  // Return the rows of the image that samples of pixels reach.
  std::pair<int64_t, int64_t> find_rows(int64_t image, int64_t group, int64_t first,
                                        int64_t end) const {
    const auto beyond = static_cast<Real>(call.height + 1);
    Real least = beyond, most = -2;
    for (int64_t tap = 0; tap < taps; ++tap) {
      const Real* offset = offsets_of(image, group, tap);
      for (int64_t pixel = first; pixel < end; ++pixel) {
        const Real y = static_cast<Real>(grid.pixel_y[pixel] + grid.tap_y[tap]) + offset[pixel];
        const bool is_near = y > -2 && y < beyond;
        least = is_near && y < least ? y : least;
        most = is_near && y > most ? y : most;
      }
    }
    const auto from = std::max<int64_t>(0, static_cast<int64_t>(std::floor(least)));
    const auto upto = std::min(call.height, static_cast<int64_t>(std::floor(most)) + 2);
    return from < upto ? std::pair(from, upto) : std::pair<int64_t, int64_t>(0, 0);
  }
};

// A slice: the channels of a block, of some rows of an image, as `(pixels, width)` and a row of 0.
template <class Real>
struct Slices {
  const Call& call;

  static int64_t width_of(const Block& block) {
    return pad_to(block.count, Lanes<Real>::kCount);
  }

  template <class Element>
  void read(const Element* x, const Block& block, int64_t image, int64_t first_row,
            int64_t end_row, Real* line, Real* to) const {
    const int64_t width = width_of(block), plane = call.height * call.width;
    const int64_t pixels = (end_row - first_row) * call.width;
    std::fill_n(to + pixels * width, width, Real{});
    for (int64_t p = 0; p < pixels; p += kRun) {
      const int64_t count = std::min(kRun, pixels - p);
      if (width > block.count) std::fill_n(to + p * width, count * width, Real{});
      for (int64_t c = 0; c < block.count; ++c) {
        read_row(x + (image * call.channels + block.first + c) * plane + first_row * call.width + p,
                 count, line);
        for (int64_t i = 0; i < count; ++i) to[(p + i) * width + c] = line[i];
      }
    }
  }

  template <class Element>
  void write(const Real* from, const Block& block, int64_t image, Real* line, Element* dx) const {
    const int64_t width = width_of(block), plane = call.height * call.width;
    for (int64_t p = 0; p < plane; p += kRun) {
      const int64_t count = std::min(kRun, plane - p);
      for (int64_t c = 0; c < block.count; ++c) {
        for (int64_t i = 0; i < count; ++i) line[i] = from[(p + i) * width + c];
        write_row(line, count, dx + (image * call.channels + block.first + c) * plane + p);
      }
    }
  }
};

// Return the weight of a block between an output and a tap of a channel, 0 beyond both. Of a depthwise
// block, the output is that of the channel.
template <class Real>
inline Real weight_of(const Call& call, const Block& block, int64_t out, int64_t tap,
                      int64_t channel) {
  if (channel >= block.count || out >= block.out_count) return Real{};
  const int64_t of_group = call.channels / call.groups, o = block.out_first + out;
  const int64_t taps = call.kernel_height * call.kernel_width;
  return static_cast<const Real*>(
      call.weight)[(o * of_group + (block.first + channel) % of_group) * taps + tap];
}

template <class Real>
inline Real add_all(Vec<Real> value) {
  if constexpr (sizeof(Real) == 4) return sum_lanes(value);
  Real sum{};
  for (int lane = 0; lane < Lanes<Real>::kCount; ++lane) sum += value[lane];
  return sum;
}

}  // namespace

