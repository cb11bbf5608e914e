// Steps of optimizers on the rows of a table that have a gradient, each row once.
//
// A row's whole step is done while the row is in the cache: the gradients of its duplicates are
// added up, then each element of the row and of its state is read, computed and written, once.
// The same step by operators of torch writes every intermediate result to memory and reads it back.
//
// What the result depends on is fixed: the gradients of a row are added in the order of their
// positions, and every operation is rounded where the operators of torch round on processors that
// have fused multiply-add (std::fma below stands where torch's compiled kernels fuse). A row belongs
// to one thread, so the number of threads changes nothing.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t kNumStates = 3;        // at most
constexpr int64_t kAheadBytes = 8192;    // how far prefetching runs ahead, by bytes of all tables
constexpr int64_t kMaxAhead = 16;        // and by rows
constexpr int64_t kMaxPrefetch = 1024;   // of one row; the hardware follows what is longer

// ------------------------------------------------------------------------------- numbers

enum Kind : int32_t { kFloat = 0, kDouble = 1, kBfloat16 = 2, kHalf = 3 };

struct Bfloat16 {
  uint16_t bits;
};

inline float widened(Bfloat16 number) {
  const uint32_t bits = static_cast<uint32_t>(number.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// To the nearest, ties to even; what is not a number stays so.
inline void narrow(float number, Bfloat16& to) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to.bits = number != number ? uint16_t{0x7fc0} : static_cast<uint16_t>(rounded);
}

#if defined(__FLT16_MAX__)
#define PENSTOCK_HALF 1
using Half = _Float16;
inline float widened(Half number) { return static_cast<float>(number); }
inline void narrow(float number, Half& to) { to = static_cast<Half>(number); }
#else
#define PENSTOCK_HALF 0
#endif

inline float widened(float number) { return number; }
inline double widened(double number) { return number; }

// -------------------------------------------------------------------------------- groups

// Sorts keys by their upper bits, from `shift` on, and keeps the order of equal ones: a radix sort,
// so nothing is compared. The result is in `keys`; `other` has room for as many.
void sort_by_upper_bits(uint64_t* keys, uint64_t* other, int64_t count, int shift, int num_bits) {
  constexpr int kDigit = 11;
  constexpr size_t kBuckets = size_t{1} << kDigit;
  const int num_passes = (num_bits + kDigit - 1) / kDigit;
  if (num_passes % 2) {
    std::copy(keys, keys + count, other);
    std::swap(keys, other);
  }
  for (int pass = 0; pass < num_passes; ++pass, shift += kDigit) {
    int64_t start[kBuckets + 1] = {};
    const auto digit = [&](uint64_t key) { return (key >> shift) & (kBuckets - 1); };
    for (int64_t at = 0; at < count; ++at) ++start[digit(keys[at]) + 1];
    for (size_t bucket = 0; bucket < kBuckets; ++bucket) start[bucket + 1] += start[bucket];
    for (int64_t at = 0; at < count; ++at) other[start[digit(keys[at])]++] = keys[at];
    std::swap(keys, other);
  }
}

// --------------------------------------------------------------------------------- steps

// Each step computes with `Value`, element by element; `row` and the states are changed in place.
// The numbers arrive as double and are rounded to `Value` once, as torch does with its scalars.

// Without branches, so that the compiler makes vectors of it.
template <bool kMaximize, class Value>
inline Value decayed(Value gradient, Value weight, Value decay, bool decays) {
  const Value g = kMaximize ? -gradient : gradient;
  const Value sum = std::fma(weight, decay, g);
  return decays ? sum : g;  // not `sum` in any case: the weight may be infinite
}

// torch.optim.SGD: g += decay p; m = momentum m + (1 - dampening) g; p -= lr (m, or g + momentum m).
template <class Value>
struct Sgd {
  const double* numbers;
  Value minus_lr = static_cast<Value>(-numbers[0]);
  Value decay = static_cast<Value>(numbers[1]);
  Value momentum = static_cast<Value>(numbers[2]);
  Value undampened = static_cast<Value>(1 - numbers[3]);
  bool decays = numbers[1] != 0, has_momentum = numbers[2] != 0;
  bool first = numbers[4] != 0, nesterov = numbers[5] != 0;

  template <bool kMaximize>
  void run(Value* __restrict row, Value* const* states, const Value* __restrict gradient,
           int64_t width) const {
    if (!has_momentum) {
      for (int64_t i = 0; i < width; ++i) {
        const Value p = row[i];
        row[i] = std::fma(decayed<kMaximize>(gradient[i], p, decay, decays), minus_lr, p);
      }
      return;
    }
    Value* __restrict velocity = states[0];
    for (int64_t i = 0; i < width; ++i) {
      const Value p = row[i];
      const Value g = decayed<kMaximize>(gradient[i], p, decay, decays);
      const Value later = std::fma(g, undampened, velocity[i] * momentum);
      const Value m = first ? g : later;
      const Value ahead = std::fma(m, momentum, g);
      velocity[i] = m;
      row[i] = std::fma(nesterov ? ahead : m, minus_lr, p);
    }
  }
};

// torch.optim.Adagrad: g += decay p; s += g^2; p -= lr' g / (sqrt(s) + eps).
template <class Value>
struct Adagrad {
  const double* numbers;
  Value minus_lr = static_cast<Value>(-numbers[0]);
  Value decay = static_cast<Value>(numbers[1]);
  Value eps = static_cast<Value>(numbers[2]);
  bool decays = numbers[1] != 0;

  template <bool kMaximize>
  void run(Value* __restrict row, Value* const* states, const Value* __restrict gradient,
           int64_t width) const {
    Value* __restrict sum = states[0];
    for (int64_t i = 0; i < width; ++i) {
      const Value p = row[i];
      const Value g = decayed<kMaximize>(gradient[i], p, decay, decays);
      const Value s = std::fma(g, g, sum[i]);
      sum[i] = s;
      row[i] = p + minus_lr * g / (std::sqrt(s) + eps);
    }
  }
};

// torch.optim.Adam: g += decay p; m += (1 - beta1) (g - m); v = beta2 v + (1 - beta2) g^2;
// p -= lr' m / (sqrt(v) / sqrt(1 - beta2^t) + eps), with the largest v so far for amsgrad.
template <class Value>
struct Adam {
  const double* numbers;
  Value minus_lr = static_cast<Value>(-numbers[0]);
  Value decay = static_cast<Value>(numbers[1]);
  Value eps = static_cast<Value>(numbers[2]);
  Value mean_weight = static_cast<Value>(numbers[3]);
  Value beta2 = static_cast<Value>(numbers[4]);
  Value square_weight = static_cast<Value>(numbers[5]);
  Value correction = static_cast<Value>(numbers[6]);
  bool decays = numbers[1] != 0, amsgrad = numbers[7] != 0;

  template <bool kMaximize>
  void run(Value* row, Value* const* states, const Value* gradient, int64_t width) const {
    if (amsgrad) {
      elements<kMaximize, true>(row, states[0], states[1], states[2], gradient, width);
    } else {
      elements<kMaximize, false>(row, states[0], states[1], nullptr, gradient, width);
    }
  }

  template <bool kMaximize, bool kAmsgrad>
  void elements(Value* __restrict row, Value* __restrict mean, Value* __restrict square,
                Value* __restrict largest, const Value* __restrict gradient, int64_t width) const {
    // torch.lerp starts from whichever end is nearer.
    const bool near = std::abs(mean_weight) < Value{0.5};
    const Value factor = near ? mean_weight : mean_weight - 1;
    for (int64_t i = 0; i < width; ++i) {
      const Value p = row[i];
      const Value g = decayed<kMaximize>(gradient[i], p, decay, decays);
      const Value m = std::fma(factor, g - mean[i], near ? mean[i] : g);
      Value v = std::fma(square_weight * g, g, square[i] * beta2);
      mean[i] = m;
      square[i] = v;
      if constexpr (kAmsgrad) {
        v = largest[i] > v ? largest[i] : v;  // what is not a number stays so: v does
        largest[i] = v;
      }
      row[i] = p + minus_lr * m / (std::sqrt(v) / correction + eps);
    }
  }
};

// -------------------------------------------------------------------------------- updates

struct Table {
  char* rows;
  int64_t row_bytes;  // rows lie side by side

  char* at(int64_t row) const { return rows + row * row_bytes; }

  void prefetch(int64_t row) const {
    const char* start = at(row);
    const char* end = start + std::min(row_bytes, kMaxPrefetch);
    for (; start < end; start += kLine) __builtin_prefetch(start, 1, 1);
    __builtin_prefetch(end - 1, 1, 1);
  }
};

// The rows to update; `_updates.py` passes these numbers of 64 bits.
struct Update {
  int64_t kind;          // of the rows and gradients; the states of narrow rows are float
  int64_t num_states;
  int64_t maximize;
  int64_t num_threads;
  int64_t width;         // elements of a row
  int64_t num_groups;
  int64_t num_positions;
  const int64_t* rows;   // of each group; null: group k is row k
  const int64_t* starts; // of each group in `order`, and their end
  const int64_t* order;  // positions of gradients
  const char* gradients;
  int64_t gradient_stride;  // bytes from one to the next
  char* table;
  char* states[kNumStates];
};

// Adds up the gradients of a group, in their order. May return the place of the only one.
template <class Stored, class Value>
const Value* summed(const Update& update, int64_t group, Value* sum) {
  const auto gradient = [&](int64_t at) {
    return reinterpret_cast<const Stored*>(update.gradients +
                                           update.order[at] * update.gradient_stride);
  };
  const int64_t begin = update.starts[group], end = update.starts[group + 1];
  const Stored* first = gradient(begin);
  if constexpr (std::is_same_v<Stored, Value>) {
    if (end - begin == 1) return first;
  }
  for (int64_t i = 0; i < update.width; ++i) sum[i] = widened(first[i]);
  for (int64_t at = begin + 1; at < end; ++at) {
    const Stored* next = gradient(at);
    for (int64_t i = 0; i < update.width; ++i) sum[i] += widened(next[i]);
  }
  return sum;
}

template <class Stored, class Value, bool kMaximize, class Step>
void run(const Update& update, const Step& step) {
  const Table table{update.table, update.width * static_cast<int64_t>(sizeof(Stored))};
  Table states[kNumStates];
  for (int number = 0; number < update.num_states; ++number) {
    states[number] = {update.states[number], update.width * static_cast<int64_t>(sizeof(Value))};
  }
  const int64_t line_values = kLine / static_cast<int64_t>(sizeof(Value));
  const int64_t padded = (update.width + line_values - 1) / line_values * line_values + line_values;
  const int num_threads = static_cast<int>(update.num_threads);
  std::vector<Value> scratch(static_cast<size_t>(2 * padded * num_threads));
  const int64_t bytes_of_all =
      table.row_bytes * 2 + update.num_states * (update.num_states ? states[0].row_bytes : 0);
  const int64_t ahead =
      std::clamp(kAheadBytes / std::max<int64_t>(bytes_of_all, 1), int64_t{1}, kMaxAhead);
  const auto row_of = [&](int64_t group) {
    return update.rows == nullptr ? group : update.rows[group];
  };
  const auto prefetch = [&](int64_t group) {
    const int64_t row = row_of(group);
    table.prefetch(row);
    for (int number = 0; number < update.num_states; ++number) states[number].prefetch(row);
    const int64_t position = update.order[update.starts[group]];
    const char* gradient = update.gradients + position * update.gradient_stride;
    for (int64_t byte = 0; byte < std::min(table.row_bytes, kMaxPrefetch); byte += kLine) {
      __builtin_prefetch(gradient + byte, 0, 1);
    }
  };
  parallel(num_threads, [&](int thread, int count) {
    // Equal shares of the gradients; the thread of a group's first gradient has all of the group.
    const auto share = [&](int number) {
      const int64_t* end = update.starts + update.num_groups;
      return std::lower_bound(update.starts, end, update.num_positions * number / count) -
             update.starts;
    };
    Value* sum = scratch.data() + 2 * padded * thread;
    Value* wide = sum + padded;
    const int64_t begin = share(thread), end = share(thread + 1);
    for (int64_t group = begin; group < std::min(begin + ahead, end); ++group) prefetch(group);
    for (int64_t group = begin; group < end; ++group) {
      if (group + ahead < end) prefetch(group + ahead);
      const int64_t row = row_of(group);
      const Value* gradient = summed<Stored, Value>(update, group, sum);
      Value* state_rows[kNumStates] = {};
      for (int number = 0; number < update.num_states; ++number) {
        state_rows[number] = reinterpret_cast<Value*>(states[number].at(row));
      }
      Stored* stored = reinterpret_cast<Stored*>(table.at(row));
      if constexpr (std::is_same_v<Stored, Value>) {
        step.template run<kMaximize>(stored, state_rows, gradient, update.width);
      } else {
        for (int64_t i = 0; i < update.width; ++i) wide[i] = widened(stored[i]);
        step.template run<kMaximize>(wide, state_rows, gradient, update.width);
        for (int64_t i = 0; i < update.width; ++i) narrow(wide[i], stored[i]);
      }
    }
  });
}

template <class Stored, class Value, template <class> class Step>
void run(const Update& update, const double* numbers) {
  const Step<Value> step{numbers};
  if (update.maximize) {
    run<Stored, Value, true>(update, step);
  } else {
    run<Stored, Value, false>(update, step);
  }
}

// Returns 0, 1 if there is no memory, or 2 for a kind that this compiler does not have.
template <template <class> class Step>
int32_t run(const Update& update, const double* numbers) {
  if (update.num_groups == 0 || update.width == 0) return 0;
  try {
    switch (update.kind) {
      case kFloat: run<float, float, Step>(update, numbers); return 0;
      case kDouble: run<double, double, Step>(update, numbers); return 0;
      case kBfloat16: run<Bfloat16, float, Step>(update, numbers); return 0;
#if PENSTOCK_HALF
      case kHalf: run<Half, float, Step>(update, numbers); return 0;
#endif
      default: return 2;
    }
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace

extern "C" {

int32_t penstock_has_half() { return PENSTOCK_HALF; }

// Sorts the positions of `index` by row. Fills in the different rows (rising), where in `order` the
// positions of each begin (and their end), and the positions. `rows` and `order` have room for all
// indices, `starts` for one more. Returns how many rows there are, or -1 - position for the first
// index that is out of range. Together the bits of rows and of positions are 64 at most.
int64_t penstock_group_rows(const int64_t* index, int64_t num_indices, int64_t num_rows,
                            int64_t* rows, int64_t* starts, int64_t* order) {
  bool rising = true;
  for (int64_t at = 0; at < num_indices; ++at) {
    if (static_cast<uint64_t>(index[at]) >= static_cast<uint64_t>(num_rows)) return -1 - at;
    rising = rising && (at == 0 || index[at - 1] <= index[at]);
  }
  // A row and a position in one number, sorted in the memory of the result.
  const int row_bits = std::bit_width(static_cast<uint64_t>(std::max<int64_t>(num_rows - 1, 0)));
  const int position_bits = std::bit_width(static_cast<uint64_t>(num_indices));
  if (rising) {
    for (int64_t at = 0; at < num_indices; ++at) order[at] = at;
  } else {
    uint64_t* keys = reinterpret_cast<uint64_t*>(rows);
    for (int64_t at = 0; at < num_indices; ++at) {
      keys[at] = static_cast<uint64_t>(index[at]) << position_bits | static_cast<uint64_t>(at);
    }
    sort_by_upper_bits(keys, reinterpret_cast<uint64_t*>(order), num_indices, position_bits,
                       row_bits);
    const uint64_t mask = (uint64_t{1} << position_bits) - 1;
    for (int64_t at = 0; at < num_indices; ++at) order[at] = static_cast<int64_t>(keys[at] & mask);
  }
  int64_t count = 0;
  for (int64_t at = 0; at < num_indices; ++at) {
    const int64_t row = index[order[at]];
    if (at == 0 || row != rows[count - 1]) {
      rows[count] = row;
      starts[count++] = at;
    }
  }
  starts[count] = num_indices;
  return count;
}

// `numbers` are those of the step, in the order of its constructor.
int32_t penstock_sgd(const Update* update, const double* numbers) {
  return run<Sgd>(*update, numbers);
}

int32_t penstock_adagrad(const Update* update, const double* numbers) {
  return run<Adagrad>(*update, numbers);
}

int32_t penstock_adam(const Update* update, const double* numbers) {
  return run<Adam>(*update, numbers);
}

}  // extern "C"
