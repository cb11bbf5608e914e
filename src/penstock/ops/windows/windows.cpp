// Windows of images: strips in which each window is one run, and their sum; after the vectors of
// either float type.
//
// Row i of the output has a strip of its own, column by column (Lu et al., arXiv:2306.14316, section
// 3), so window j of it is the run of kernel_height * kernel_width elements that begins at column
// j * stride_width:
//
//     strip[i][w][f] = x[i stride_height + f dilation_height - padding_height][w - padding_width]

namespace {

// As `_geometry.py` packs them.
struct Geometry {
  int64_t kernel_height, kernel_width, stride_height, stride_width, padding_height, padding_width,
      dilation_height, dilation_width;
  int64_t height, width, out_height, out_width;

  // Columns of a strip, from the first to the last one that a window has.
  int64_t span() const {
    return out_width == 0 ? 0
                          : (out_width - 1) * stride_width + (kernel_width - 1) * dilation_width + 1;
  }
};

// As `_native.py` passes it.
struct WindowCall {
  const void* from;  // x (planes, height, width), contiguous; or the windows' gradient
  void* to;          // strips (planes, out_height, span, kernel_height); or dx
  Geometry geometry;
  int64_t num_samples, num_channels;
  int64_t strides[6];  // of the windows' gradient: sample, channel, row, column, kernel's two
  int64_t kind, num_threads;
};

template <class Element>
void write_strips(const WindowCall& call) {
  const Geometry& g = call.geometry;
  const int64_t span = g.span(), rows = g.kernel_height;
  const int64_t first = std::min(g.padding_width, span);
  const int64_t end = std::max(first, std::min(g.padding_width + g.width, span));
  const auto* x = static_cast<const Element*>(call.from);
  const int64_t num_strips = call.num_samples * call.num_channels * g.out_height;
  for_tasks(num_strips, call.num_threads, [&](int64_t task) {
    const int64_t plane = task / g.out_height, i = task % g.out_height;
    Element* strip = static_cast<Element*>(call.to) + task * span * rows;
    for (int64_t f = 0; f < rows; ++f) {
      const int64_t r = i * g.stride_height + f * g.dilation_height - g.padding_height;
      const bool is_inside = 0 <= r && r < g.height;
      const Element* row = x + (plane * g.height + (is_inside ? r : 0)) * g.width - g.padding_width;
      const int64_t begin = is_inside ? first : span, until = is_inside ? end : span;
      for (int64_t w = 0; w < begin; ++w) strip[w * rows + f] = Element{};
      for (int64_t w = begin; w < until; ++w) strip[w * rows + f] = row[w];
      for (int64_t w = until; w < span; ++w) strip[w * rows + f] = Element{};
    }
  });
}

// Sum into each element of a plane its places in windows, in the order of these.
template <class Real, class Element>
void sum_plane(const WindowCall& call, int64_t plane, std::vector<Real>& sums) {
  const Geometry& g = call.geometry;
  const int64_t* strides = call.strides;
  const auto* from = static_cast<const Element*>(call.from) +
                     plane / call.num_channels * strides[0] +
                     plane % call.num_channels * strides[1];
  std::fill(sums.begin(), sums.end(), Real{});
  for (int64_t i = 0; i < g.out_height; ++i)
    for (int64_t f = 0; f < g.kernel_height; ++f) {
      const int64_t r = i * g.stride_height + f * g.dilation_height - g.padding_height;
      if (r < 0 || r >= g.height) continue;
      for (int64_t k = 0; k < g.kernel_width; ++k) {
        const int64_t shift = k * g.dilation_width - g.padding_width;
        const int64_t first = shift < 0 ? divide_up(-shift, g.stride_width) : 0;
        const int64_t end = std::min(
            g.out_width, shift >= g.width ? 0 : (g.width - 1 - shift) / g.stride_width + 1);
        const Element* column = from + i * strides[2] + f * strides[4] + k * strides[5];
        for (int64_t j = first; j < end; ++j) {
          Real value;
          read_row(column + j * strides[3], 1, &value);
          sums[r * g.width + shift + j * g.stride_width] += value;
        }
      }
    }
  write_row(sums.data(), g.height * g.width,
            static_cast<Element*>(call.to) + plane * g.height * g.width);
}

template <class Real>
void sum_windows(const WindowCall& call) {
  const int64_t num_planes = call.num_samples * call.num_channels;
  const auto most = static_cast<int>(std::min(call.num_threads, num_planes));
  parallel(most, [&](int64_t thread, int64_t threads) {
    std::vector<Real> sums(call.geometry.height * call.geometry.width);
    for (int64_t i = num_planes * thread / threads; i < num_planes * (thread + 1) / threads; ++i)
      with_element<Real>(call.kind, [&](auto element) {
        sum_plane<Real, decltype(element)>(call, i, sums);
      });
  });
}

}  // namespace

extern "C" void penstock_unfold_windows(const char* arguments) {
  const WindowCall& call = *reinterpret_cast<const WindowCall*>(arguments);
  switch (call.kind) {
    case 0: return write_strips<uint32_t>(call);
    case 3: return write_strips<uint64_t>(call);
    default: return write_strips<uint16_t>(call);
  }
}

extern "C" void penstock_fold_windows(const char* arguments) {
  const WindowCall& call = *reinterpret_cast<const WindowCall*>(arguments);
  if (call.kind == 3) {
    sum_windows<double>(call);
  } else {
    sum_windows<float>(call);
  }
}

