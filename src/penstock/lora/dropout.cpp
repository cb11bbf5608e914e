// Rows of a matrix under a dropout mask that is made from a counter; `_dropout.py` has its formula.
//
// The mask selects and does not scale, so elements of 2 bytes need no arithmetic.

#include <cstdint>

namespace {

// As `_dropout.py` passes them; strides are of elements.
struct Rows {
  const char* source;
  char* target;
  int64_t num_rows;
  int64_t num_columns;
  int64_t source_stride;
  int64_t target_stride;
  int64_t element_bytes;
  int64_t seed_low;
  int64_t seed_high;
  int64_t first;  // number of the first row
  int64_t threshold;
  int64_t accumulate;  // whether kept elements are added to the target, else written
  int64_t num_threads;
};

inline uint32_t mix(uint32_t word) {
  word = (word ^ (word >> 16)) * 0x7feb352du;
  word = (word ^ (word >> 15)) * 0x846ca68bu;
  return word ^ (word >> 16);
}

inline bool is_kept(uint32_t key, int64_t column, uint32_t threshold) {
  return mix(key + static_cast<uint32_t>(column) * 0x9e3779b9u) >= threshold;
}

// Write the kept elements, zero elsewhere; or add them to what is there.
template <class Element, bool kAdds>
void write_rows(const Rows& rows, uint32_t seed, int64_t begin, int64_t end) {
  const auto threshold = static_cast<uint32_t>(rows.threshold);
  for (int64_t row = begin; row < end; ++row) {
    const uint32_t key = mix(seed + static_cast<uint32_t>(rows.first + row));
    const auto* source = reinterpret_cast<const Element*>(rows.source) + row * rows.source_stride;
    auto* target = reinterpret_cast<Element*>(rows.target) + row * rows.target_stride;
    for (int64_t column = 0; column < rows.num_columns; ++column) {
      const Element value = source[column];
      const Element kept = is_kept(key, column, threshold) ? value : Element(0);
      target[column] = kAdds ? target[column] + kept : kept;
    }
  }
}

void mask_rows(const Rows& rows, uint32_t seed, int64_t begin, int64_t end) {
  if (rows.accumulate) {
    return rows.element_bytes == 4 ? write_rows<float, true>(rows, seed, begin, end)
                                   : write_rows<double, true>(rows, seed, begin, end);
  }
  switch (rows.element_bytes) {
    case 2: return write_rows<uint16_t, false>(rows, seed, begin, end);
    case 4: return write_rows<uint32_t, false>(rows, seed, begin, end);
    default: return write_rows<uint64_t, false>(rows, seed, begin, end);
  }
}

}  // namespace

extern "C" void penstock_mask_rows(const char* arguments) {
  const Rows& rows = *reinterpret_cast<const Rows*>(arguments);
  const uint32_t seed = mix(mix(static_cast<uint32_t>(rows.seed_low)) +
                            static_cast<uint32_t>(rows.seed_high));
  const auto num_threads = static_cast<int>(rows.num_threads);
  parallel(num_threads, [&](int64_t thread, int64_t num_threads) {
    mask_rows(rows, seed, rows.num_rows * thread / num_threads,
              rows.num_rows * (thread + 1) / num_threads);
  });
}
