// Attention of few tokens over records of keys and values by address; `_kernel.py` calls it.
//
// A record has T keys and then T values of one KV head. For each row q of the queries that share
// the head, over the tokens t of all its records that are valid and visible:
//
//     s_t = softcap(scale q . k_t) + bias_t     m = max s_t     l = sum exp(s_t - m)
//     out = sum exp(s_t - m) v_t / l            lse = m + log l
//
// Maximum and sums run along (Milakov, Gimelshein, arXiv:1805.02867) within a task of some records,
// which are read once for all rows; tasks are merged in their order. The cut into tasks depends on
// shapes alone, so the result does not depend on the number of threads.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kTaskTokens = 1024;    // tokens of a task, unless one record has more
constexpr int64_t kValueTokens = 32;     // tokens whose values a first-level cache holds
constexpr int64_t kAheadBytes = 16384;   // distance of what the second-level cache fetches
constexpr int64_t kNearBytes = 2048;     // and of what the first-level cache takes from it
constexpr int64_t kCopyBytes = 1 << 20;  // fewer are copied by one thread
constexpr float kHidden = -std::numeric_limits<float>::infinity();

// As `_kernel.py` passes it; strides are of elements, that of a token is 1.
struct Call {
  const float* query;        // (B, H, rows, key_dim), contiguous
  const int64_t* addresses;  // (B, H, num_records)
  const int32_t* counts;     // (B, H, num_records)
  const uint8_t* visible;    // or null
  const float* bias;         // or null
  float* out;                // (B, H, rows, value_dim): of the parts so far, and with this one
  float* lse;                // (B, H, rows): the same
  float* record_lse;         // (B, H, rows, num_records), or null
  int64_t batch;
  int64_t num_heads;
  int64_t num_rows;  // of a KV head: query heads of its group times tokens, tokens innermost
  int64_t num_tokens;
  int64_t num_records;
  int64_t record_tokens;
  int64_t key_dim;
  int64_t value_dim;
  int64_t kind;  // of the records' elements: 0 float, 1 half, 2 bfloat16
  int64_t num_threads;
  int64_t has_parts;  // whether out and lse hold the result of other records
  int64_t visible_batch, visible_head, visible_token;
  int64_t bias_batch, bias_head, bias_token;  // `bias_head` is that of a query head
  double scale;
  double softcap;  // 0: none
};

// Return the place, in two vectors of a pair, of an element.
template <class Element>
inline int64_t place_of(int64_t element) {
  return std::is_same_v<Element, Brain> ? element % 2 * kLanes + element / 2 : element;
}

// Records of a task, as one row of bytes to fetch ahead.
struct Ahead {
  const char* now;
  const char* next;  // the record after it, or null
  int64_t record_bytes;

  // Return the distance from a byte of this record to what is fetched while it is read.
  int64_t distance(int64_t offset) const {
    const int64_t ahead = std::min(kAheadBytes, record_bytes);
    if (offset + ahead < record_bytes) return ahead;
    return next == nullptr ? 0 : next - now + ahead - record_bytes;
  }
};

// Fetch the lines of a pair twice: from memory early, and from the second-level cache late.
template <class Element>
inline void fetch(const Element* from, int64_t distance) {
  const char* now = reinterpret_cast<const char*>(from);
  __builtin_prefetch(now + distance, 0, 2);
  __builtin_prefetch(now + kNearBytes, 0, 3);
  if (kPair * sizeof(Element) > kLine) {
    __builtin_prefetch(now + distance + kLine, 0, 2);
    __builtin_prefetch(now + kNearBytes + kLine, 0, 3);
  }
}

// Turns at which rows fetch ahead: memory is slower than arithmetic, and its work is to be even.
enum Turn : int { kNoTurn = 0, kEvenTurns = 1, kOddTurns = 2, kAllTurns = 3 };

// Call `body` for rows by fours, then by two and one; the first ones fetch ahead for all.
template <class Body>
inline void for_rows(int64_t num_rows, Body body) {
  using Two = std::integral_constant<int, 2>;
  using One = std::integral_constant<int, 1>;
  const int64_t num_fours = num_rows / 4;
  int64_t row = 0;
  for (int64_t i = 0; i < num_fours; ++i, row += 4)
    body(std::integral_constant<int, 4>(), row,
         i > 1 ? kNoTurn : num_fours == 1 ? kAllTurns : i == 0 ? kEvenTurns : kOddTurns);
  if (num_rows & 2) body(Two(), row, row == 0 ? kAllTurns : kNoTurn);
  row += num_rows & 2;
  if (num_rows & 1) body(One(), row, row == 0 ? kAllTurns : kNoTurn);
}

inline bool is_turn(Turn turn, int64_t number) { return turn >> (number & 1) & 1; }

// Some records of one KV head, with the sums of its rows.
template <class Element>
struct Task {
  const Call& call;
  int64_t head;   // number among all of the batch
  int64_t width;  // floats of a row of sums: whole pairs of value_dim
  int64_t key_width;
  int64_t padded;  // tokens of a record in whole vectors
  const float* query;  // rows in the order of pairs, with the scale in them
  float* scores;       // (rows, padded)
  float* sums;         // (rows, width): of exp(s - m) v
  float* maxima;       // (rows,)
  float* totals;       // (rows,): of exp(s - m)
  float* lane_totals;  // (rows, kLanes): the same, by lane

  // Write q . k of `Rows` rows and kLanes keys.
  template <int Rows>
  void score_rows(const Element* const* keys, const float* rows, float* to, Turn turn,
                  int64_t distance) const {
    constexpr int kKeys = kLanes / Rows;
    const int64_t whole = call.key_dim / kPair * kPair, rest = call.key_dim - whole;
    for (int part = 0; part < Rows; ++part, keys += kKeys, to += kKeys) {
      Vector products[kLanes] = {};
      const bool fetches = is_turn(turn, part);
      const auto add = [&](int64_t column, auto load_key) {
        Vector near[Rows], far[Rows];
        UNROLLED for (int j = 0; j < Rows; ++j) {
          near[j] = load(rows + j * key_width + column);
          far[j] = load(rows + j * key_width + column + kLanes);
        }
        UNROLLED for (int i = 0; i < kKeys; ++i) {
          if (fetches) fetch(keys[i] + column, distance);
          const Pair key = load_key(keys[i] + column);
          UNROLLED for (int j = 0; j < Rows; ++j) {
            products[j * kKeys + i] += near[j] * key.near;
            products[j * kKeys + i] += far[j] * key.far;
          }
        }
      };
      for (int64_t column = 0; column < whole; column += kPair)
        add(column, [](const Element* from) { return load_pair(from); });
      if (rest > 0) add(whole, [&](const Element* from) { return load_some(from, rest); });
      add_lanes<kLanes>(products);
      float found[kLanes];
      store(found, products[0]);
      UNROLLED for (int j = 0; j < Rows; ++j)
        std::memcpy(to + j * padded, found + j * kKeys, kKeys * sizeof(float));
    }
  }

  void score_record(const Element* keys, int64_t count, const Ahead& ahead) const {
    const int64_t dim = call.key_dim, num_rows = call.num_rows;
    for (int64_t token = 0; token < count; token += kLanes) {
      const int64_t distance = ahead.distance(token * dim * static_cast<int64_t>(sizeof(Element)));
      const Element* tile[kLanes];
      for (int64_t i = 0; i < kLanes; ++i)
        tile[i] = keys + std::min(token + i, count - 1) * dim;  // the last one again
      for_rows(num_rows, [&](auto rows, int64_t row, Turn turn) {
        score_rows<rows()>(tile, query + row * key_width, scores + row * padded + token, turn,
                           distance);
      });
    }
  }

  // Cap, shift and hide the scores of a row.
  void change_scores(int64_t row, int64_t record, int64_t count) const {
    float* of_row = scores + row * padded;
    const int64_t token = row % call.num_tokens, group = row / call.num_tokens;
    const int64_t batch = head / call.num_heads, kv_head = head % call.num_heads;
    const int64_t first = record * call.record_tokens;
    if (call.softcap != 0) {
      const auto cap = static_cast<float>(call.softcap), inverse = 1.0f / cap;
      for (int64_t t = 0; t < count; t += kLanes)
        store(of_row + t, cap * tanh_of(load(of_row + t) * inverse));
    }
    if (call.bias != nullptr) {
      const int64_t query_head = kv_head * (call.num_rows / call.num_tokens) + group;
      const float* bias = call.bias + batch * call.bias_batch + query_head * call.bias_head +
                          token * call.bias_token + first;
      for (int64_t t = 0; t < count; ++t) of_row[t] += bias[t];
    }
    if (call.visible != nullptr) {
      const uint8_t* visible = call.visible + batch * call.visible_batch +
                               kv_head * call.visible_head + token * call.visible_token + first;
      for (int64_t t = 0; t < count; ++t) of_row[t] = visible[t] ? of_row[t] : kHidden;
    }
    for (int64_t t = count; t < divide_up(count, kLanes) * kLanes; ++t) of_row[t] = kHidden;
  }

  // Replace the scores of a record by exp(s - m), with the new m, and add them to l.
  void weigh_record(int64_t record, int64_t count) const {
    for (int64_t row = 0; row < call.num_rows; ++row) {
      change_scores(row, record, count);
      float* of_row = scores + row * padded;
      Vector most = splat(kHidden);
      for (int64_t t = 0; t < count; t += kLanes) most = larger(most, load(of_row + t));
      const float before = maxima[row];
      const float now = std::max(before, max_lanes(most));
      const float shift = now == kHidden ? 0.0f : now;  // rows that see nothing have weights of 0
      float* of_lanes = lane_totals + row * kLanes;
      if (now != before) {
        const float factor = exp_of(before - shift);
        store(of_lanes, factor * load(of_lanes));
        float* sum = sums + row * width;
        for (int64_t i = 0; i < width; i += kLanes) store(sum + i, factor * load(sum + i));
        maxima[row] = now;
      }
      Vector total = {};
      for (int64_t t = 0; t < count; t += kLanes) {
        const Vector weight = exp_of(load(of_row + t) - shift);
        store(of_row + t, weight);
        total += weight;
      }
      store(of_lanes, load(of_lanes) + total);
      if (call.record_lse != nullptr)
        call.record_lse[(head * call.num_rows + row) * call.num_records + record] =
            shift + std::log(sum_lanes(total));
    }
  }

  // Add weights times some tokens' values to `Pairs` pairs of `Rows` rows.
  template <int Rows, int Pairs, bool IsWhole>
  void add_values(const Element* values, int64_t num_tokens, const float* weights, float* to,
                  int64_t rest, Turn turn, int64_t distance) const {
    Vector near[Rows][Pairs], far[Rows][Pairs];
    UNROLLED for (int j = 0; j < Rows; ++j)
      UNROLLED for (int p = 0; p < Pairs; ++p) {
        near[j][p] = load(to + j * width + p * kPair);
        far[j][p] = load(to + j * width + p * kPair + kLanes);
      }
    for (int64_t t = 0; t < num_tokens; ++t, values += call.value_dim) {
      const bool fetches = is_turn(turn, t);
      float weight[Rows];
      UNROLLED for (int j = 0; j < Rows; ++j) weight[j] = weights[j * padded + t];
      UNROLLED for (int p = 0; p < Pairs; ++p) {
        if (fetches) fetch(values + p * kPair, distance);
        const Pair value = load_elements<IsWhole>(values + p * kPair, rest);
        UNROLLED for (int j = 0; j < Rows; ++j) {
          near[j][p] += weight[j] * value.near;
          far[j][p] += weight[j] * value.far;
        }
      }
    }
    UNROLLED for (int j = 0; j < Rows; ++j)
      UNROLLED for (int p = 0; p < Pairs; ++p) {
        store(to + j * width + p * kPair, near[j][p]);
        store(to + j * width + p * kPair + kLanes, far[j][p]);
      }
  }

  // Add to all columns of `Rows` rows.
  template <int Rows>
  void add_columns(const Element* values, int64_t num_tokens, const float* weights, float* to,
                   Turn turn, int64_t distance) const {
    constexpr int kMost = kLanes == 8 ? 4 / Rows : Rows == 4 ? 2 : 4;
    constexpr int kPairs = kMost < 1 ? 1 : kMost;
    const int64_t whole = call.value_dim / kPair * kPair;
    int64_t column = 0;
    for (; column + kPairs * kPair <= whole; column += kPairs * kPair)
      add_values<Rows, kPairs, true>(values + column, num_tokens, weights, to + column, 0, turn,
                                distance);
    for (; column < whole; column += kPair)
      add_values<Rows, 1, true>(values + column, num_tokens, weights, to + column, 0, turn,
                                distance);
    if (const int64_t rest = call.value_dim - whole; rest > 0)
      add_values<Rows, 1, false>(values + whole, num_tokens, weights, to + whole, rest, turn,
                                distance);
  }

  void add_record(const Element* values, int64_t count, const Ahead& ahead) const {
    const int64_t num_rows = call.num_rows, element = sizeof(Element);
    const int64_t before = call.record_tokens * call.key_dim * element;
    for (int64_t token = 0; token < count; token += kValueTokens) {
      const int64_t num_tokens = std::min(kValueTokens, count - token);
      const Element* from = values + token * call.value_dim;
      const int64_t distance = ahead.distance(before + token * call.value_dim * element);
      for_rows(num_rows, [&](auto rows, int64_t row, Turn turn) {
        add_columns<rows()>(from, num_tokens, scores + row * padded + token, sums + row * width,
                            turn, distance);
      });
    }
  }

  void run(int64_t first, int64_t end) const {
    const int64_t num_rows = call.num_rows, *at = call.addresses + head * call.num_records;
    const int32_t* counts = call.counts + head * call.num_records;
    const int64_t record_bytes = call.record_tokens * (call.key_dim + call.value_dim) *
                                 static_cast<int64_t>(sizeof(Element));
    std::fill_n(sums, num_rows * width, 0.0f);
    std::fill_n(maxima, num_rows, kHidden);
    std::fill_n(lane_totals, num_rows * kLanes, 0.0f);
    for (int64_t record = first; record < end; ++record) {
      const int64_t count = counts[record];
      if (count == 0) {
        for (int64_t row = 0; row < num_rows && call.record_lse != nullptr; ++row)
          call.record_lse[(head * num_rows + row) * call.num_records + record] = kHidden;
        continue;
      }
      int64_t next = record + 1;
      while (next < end && counts[next] == 0) ++next;
      const auto* keys = reinterpret_cast<const Element*>(at[record]);
      const Ahead ahead = {reinterpret_cast<const char*>(keys),
                           next < end ? reinterpret_cast<const char*>(at[next]) : nullptr,
                           record_bytes};
      score_record(keys, count, ahead);
      weigh_record(record, count);
      add_record(keys + call.record_tokens * call.key_dim, count, ahead);
    }
    for (int64_t row = 0; row < num_rows; ++row)
      totals[row] = sum_lanes(load(lane_totals + row * kLanes));
  }
};

// Tasks of a call, with the memory of their sums.
template <class Element>
struct Work {
  const Call& call;
  int64_t task_records, num_splits, width, key_width, padded, task_floats;
  std::unique_ptr<float[]> memory;  // of each task: sums, maxima, totals

  explicit Work(const Call& of) : call(of) {
    task_records = std::max<int64_t>(1, kTaskTokens / call.record_tokens);
    num_splits = std::max<int64_t>(1, divide_up(call.num_records, task_records));
    width = divide_up(call.value_dim, kPair) * kPair;
    key_width = divide_up(call.key_dim, kPair) * kPair;
    padded = divide_up(call.record_tokens, kLanes) * kLanes;
    task_floats = call.num_rows * (width + 2);
    memory.reset(new float[num_tasks() * task_floats]);
  }

  int64_t num_all_heads() const { return call.batch * call.num_heads; }
  int64_t num_tasks() const { return num_all_heads() * num_splits; }

  // Write the rows of a KV head in the order of pairs, times the scale.
  void arrange_query(int64_t head, float* to) const {
    const float* from = call.query + head * call.num_rows * call.key_dim;
    const auto scale = static_cast<float>(call.scale);
    std::fill_n(to, call.num_rows * key_width, 0.0f);
    for (int64_t row = 0; row < call.num_rows; ++row, from += call.key_dim, to += key_width)
      for (int64_t i = 0; i < call.key_dim; ++i)
        to[i / kPair * kPair + place_of<Element>(i % kPair)] = scale * from[i];
  }

  void run_tasks(std::atomic<int64_t>& next) const {
    const int64_t num_rows = call.num_rows;
    std::vector<float> query(num_rows * key_width), scores(num_rows * padded),
        lane_totals(num_rows * kLanes);
    int64_t arranged = -1;
    for (int64_t number = next++; number < num_tasks(); number = next++) {
      const int64_t head = number / num_splits, first = number % num_splits * task_records;
      if (head != arranged) arrange_query(head, query.data());
      arranged = head;
      float* sums = memory.get() + number * task_floats;
      float* maxima = sums + num_rows * width;
      const Task<Element> task = {
          call, head,   width,  key_width,         padded,            query.data(), scores.data(),
          sums, maxima, maxima + num_rows, lane_totals.data()};
      task.run(first, std::min(first + task_records, call.num_records));
    }
  }

  // Merge the tasks of a row: each has its sums relative to its own maximum.
  void merge_row(int64_t head, int64_t row) const {
    const float* first = memory.get() + head * num_splits * task_floats;
    const int64_t maximum = call.num_rows * width + row, total = maximum + call.num_rows;
    const int64_t number = head * call.num_rows + row;
    const float before = call.has_parts ? call.lse[number] : kHidden;
    float most = before;
    for (int64_t i = 0; i < num_splits; ++i) {
      const float own = first[i * task_floats + maximum];
      most = own <= most ? most : own;
    }
    const float shift = most == kHidden ? 0.0f : most;
    std::vector<float> merged(width);
    // What came before has sums relative to its log-sum-exp: of the weights, 1; of values, `out`.
    float sum = call.has_parts ? exp_of(before - shift) : 0.0f;
    if (sum != 0.0f)
      for (int64_t i = 0; i < call.value_dim; ++i)
        merged[i / kPair * kPair + place_of<Element>(i % kPair)] =
            sum * call.out[number * call.value_dim + i];
    for (int64_t i = 0; i < num_splits; ++i) {
      const float* task = first + i * task_floats;
      const float factor = exp_of(task[maximum] - shift);
      sum += factor * task[total];
      for (int64_t j = 0; j < width; j += kLanes)
        store(&merged[j], load(&merged[j]) + factor * load(task + row * width + j));
    }
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (int64_t i = 0; i < call.value_dim; ++i)
      call.out[number * call.value_dim + i] =
          inverse * merged[i / kPair * kPair + place_of<Element>(i % kPair)];
    call.lse[number] = shift + std::log(sum);
  }

  void run() const {
    std::atomic<int64_t> next_task = 0;
    const auto num_threads = static_cast<int>(std::min(call.num_threads, num_tasks()));
    parallel(num_threads, [&](int64_t, int64_t) { run_tasks(next_task); });
    const int64_t num_rows = num_all_heads() * call.num_rows;
    parallel(num_rows * num_splits < 256 ? 1 : num_threads, [&](int64_t thread, int64_t count) {
      for (int64_t i = num_rows * thread / count; i < num_rows * (thread + 1) / count; ++i)
        merge_row(i / call.num_rows, i % call.num_rows);
    });
  }
};

}  // namespace

// Return whether all counts are from 0 to the tokens of a record; nothing is computed otherwise.
extern "C" int penstock_attend_records(const char* arguments) {
  const Call& call = *reinterpret_cast<const Call*>(arguments);
  const int64_t num_counts = call.batch * call.num_heads * call.num_records;
  uint64_t most = 0;  // of the counts as unsigned numbers, where negative ones are large
  for (int64_t i = 0; i < num_counts; ++i)
    most = std::max<uint64_t>(most, static_cast<uint32_t>(call.counts[i]));
  if (most > static_cast<uint64_t>(call.record_tokens)) return 0;
  switch (call.kind) {
    case 0: Work<float>(call).run(); break;
    case 1: Work<Half>(call).run(); break;
    default: Work<Brain>(call).run();
  }
  return 1;
}

// Copy `count` pieces of memory of the same length.
extern "C" void penstock_copy_pieces(const int64_t* destinations, const int64_t* sources,
                                     int64_t num_bytes, int64_t count, int64_t num_threads) {
  const bool is_small = num_bytes * count < kCopyBytes;
  parallel(is_small ? 1 : static_cast<int>(num_threads), [&](int64_t thread, int64_t of) {
    for (int64_t i = count * thread / of; i < count * (thread + 1) / of; ++i)
      std::memcpy(reinterpret_cast<void*>(destinations[i]),
                  reinterpret_cast<const void*>(sources[i]), num_bytes);
  });
}
