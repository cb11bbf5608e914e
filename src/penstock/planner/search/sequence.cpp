// The planner's inner loop: evictions between two uses, the times of transfers, and the time of a step.
// `_sequence.py` documents the functions and owns all arrays; nothing here outlives a call except the
// problem, sequences and expanders themselves.
//
// An object is a storage. Between two uses of an object lies a hole; an evicted hole is one in which
// the object is not on the device. Positions are those of the sequence of operators; steps repeat, so
// the hole of a persistent object after its last use goes on at the beginning of the next step.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <queue>
#include <tuple>
#include <vector>

namespace {

using i32 = std::int32_t;
using i64 = std::int64_t;

enum Access : std::uint8_t { kRead = 0, kWrite = 1, kCreate = 2 };
enum ObjectFlags : std::uint8_t { kPersistent = 1, kInput = 2, kKept = 4 };

// Arrays of the `Problem` in Python, which outlives this one.
struct Problem {
  i32 num_operators, num_objects;
  const double* seconds;       // of each operator
  const i64* bytes;            // of each object
  const std::uint8_t* flags;   // of each object
  const i32* first_access;     // CSR over operators
  const i32* access_object;
  const std::uint8_t* access_kind;
  const i32* first_reuse;      // CSR over operators: (operand, result) in one place
  const i32 *reuse_from, *reuse_by;
  const i32* first_predecessor;  // CSR over operators
  const i32* predecessors;
};

// Range maximum under range addition.
class RangeMax {
 public:
  explicit RangeMax(const std::vector<i64>& values) : size_(1) {
    while (size_ < static_cast<i32>(values.size())) size_ *= 2;
    max_.assign(2 * size_, 0);
    add_.assign(2 * size_, 0);
    std::copy(values.begin(), values.end(), max_.begin() + size_);
    for (i32 node = size_ - 1; node > 0; --node) max_[node] = std::max(max_[2 * node], max_[2 * node + 1]);
  }
  void add(i32 begin, i32 end, i64 amount) {
    if (begin < end) add(1, 0, size_, begin, end, amount);
  }
  i64 max(i32 begin, i32 end) const {
    return begin < end ? max(1, 0, size_, begin, end) : std::numeric_limits<i64>::min() / 4;
  }

 private:
  void add(i32 node, i32 low, i32 high, i32 begin, i32 end, i64 amount) {
    if (begin <= low && high <= end) {
      max_[node] += amount;
      add_[node] += amount;
      return;
    }
    const i32 middle = (low + high) / 2;
    if (begin < middle) add(2 * node, low, middle, begin, end, amount);
    if (end > middle) add(2 * node + 1, middle, high, begin, end, amount);
    max_[node] = std::max(max_[2 * node], max_[2 * node + 1]) + add_[node];
  }
  i64 max(i32 node, i32 low, i32 high, i32 begin, i32 end) const {
    if (begin <= low && high <= end) return max_[node];
    const i32 middle = (low + high) / 2;
    i64 best = std::numeric_limits<i64>::min() / 4;
    if (begin < middle) best = max(2 * node, low, middle, begin, end);
    if (end > middle) best = std::max(best, max(2 * node + 1, middle, high, begin, end));
    return best + add_[node];
  }
  i32 size_;
  std::vector<i64> max_, add_;
};

struct Hole {
  i32 object;
  i32 start;  // position of the use before it
  i32 end;    // position of the use after it; beyond the sequence where it goes on in the next step
};

// An object from its definition, or the start of the step, to its last use; an end beyond the sequence
// is in the next step.
struct LiveRange {
  i32 object, begin, end;
};

// One sequence of operators and what follows from it alone.
struct Sequence {
  const Problem& problem;
  i32 length;
  std::vector<i32> operators;
  std::vector<std::uint8_t> again;          // whether the operator is recomputed there
  std::vector<std::vector<i32>> uses;       // positions of each object's uses
  std::vector<std::vector<std::uint8_t>> use_kinds;
  std::vector<Hole> holes;
  std::vector<i32> first_hole;               // CSR over objects; in the order of their starts
  std::vector<LiveRange> live_ranges;
  std::vector<i64> base;                    // live bytes per position if nothing is evicted
  std::vector<i64> reused;                  // bytes of the place that a result reuses
  std::vector<i32> reused_from, reused_by;  // by position; up to one pair each, -1 for none
  std::vector<i64> created;                 // bytes that appear at a position, without reused
  std::vector<std::vector<i32>> dying;      // objects whose last use (of a live range) is there

  Sequence(const Problem& p, const i32* order, const std::uint8_t* recomputed, i32 n)
      : problem(p), length(n), operators(order, order + n), again(recomputed, recomputed + n),
        uses(p.num_objects), use_kinds(p.num_objects), base(n, 0), reused(n, 0),
        reused_from(n, -1), reused_by(n, -1), created(n, 0), dying(n) {
    for (i32 position = 0; position < n; ++position) {
      const i32 op = operators[position];
      for (i32 k = p.first_access[op]; k < p.first_access[op + 1]; ++k) {
        const i32 object = p.access_object[k];
        std::uint8_t kind = p.access_kind[k];
        if (again[position] && kind == kWrite && (p.flags[object] & kPersistent)) continue;
        uses[object].push_back(position);
        use_kinds[object].push_back(kind);
      }
    }
    // A result is read when the step ends: until then it may be elsewhere.
    for (i32 object = 0; object < p.num_objects; ++object) {
      const bool kept = (p.flags[object] & kKept) && !(p.flags[object] & kPersistent);
      if (!kept || uses[object].empty() || uses[object].back() >= n - 1) continue;
      uses[object].push_back(n - 1);
      use_kinds[object].push_back(kRead);
    }
    first_hole.push_back(0);
    for (i32 object = 0; object < p.num_objects; ++object) {
      split_uses(object);
      first_hole.push_back(static_cast<i32>(holes.size()));
    }
    for (i32 position = 0; position < n; ++position) note_reuse(position);
    base = live(p.bytes);
  }

  // Weights of the live objects by position if nothing is evicted; in-place reuse adds none.
  std::vector<i64> live(const i64* weights) const {
    std::vector<i64> change(2 * length + 1, 0), result(length, 0);
    for (const LiveRange& live_range : live_ranges) {
      change[live_range.begin] += weights[live_range.object];
      change[live_range.end] -= weights[live_range.object];
    }
    i64 here = 0;
    for (i32 position = 0; position < 2 * length; ++position) {
      here += change[position];
      result[position % length] += here;
    }
    for (i32 position = 0; position < length; ++position)
      if (reused_from[position] >= 0) result[position] -= weights[reused_from[position]];
    return result;
  }

 private:
  // Splits an object's uses into live ranges (a recomputed value begins a new one) and holes.
  void split_uses(i32 object) {
    const auto& at = uses[object];
    const auto& kinds = use_kinds[object];
    if (at.empty()) {
      // A persistent object that no operator touches still has to be somewhere: in its hole of a step.
      if (problem.flags[object] & kPersistent) {
        holes.push_back({object, -1, length});
        live_ranges.push_back({object, 0, length});
      }
      return;
    }
    const i64 bytes = problem.bytes[object];
    i32 begin = at[0];
    if (problem.flags[object] & kInput) {  // the caller puts it there when the step begins
      begin = 0;
      created[0] += bytes;
    }
    const i32 count = static_cast<i32>(at.size());
    for (i32 k = 0; k < count; ++k) {
      if (kinds[k] == kCreate) created[at[k]] += bytes;
      const bool last = k + 1 == count;
      if (!last && kinds[k + 1] != kCreate) {
        if (at[k + 1] > at[k]) holes.push_back({object, at[k], at[k + 1]});
        continue;
      }
      if (last && (problem.flags[object] & kPersistent)) {
        holes.push_back({object, at[k], at[0] + length});
        live_ranges.push_back({object, begin, at[0] + length});
        return;
      }
      const i32 end = last && (problem.flags[object] & kKept) ? length : at[k] + 1;
      if (end == at[k] + 1) dying[at[k]].push_back(object);
      live_ranges.push_back({object, begin, end});
      if (!last) begin = at[k + 1];
    }
  }

  // A result may reuse the place of an operand whose live range ends here.
  void note_reuse(i32 position) {
    const i32 op = operators[position];
    for (i32 k = problem.first_reuse[op]; k < problem.first_reuse[op + 1]; ++k) {
      const i32 from = problem.reuse_from[k], to = problem.reuse_by[k];
      if (problem.bytes[from] != problem.bytes[to] || problem.bytes[from] == 0) continue;
      auto& dead = dying[position];
      if (std::find(dead.begin(), dead.end(), from) == dead.end()) continue;
      if (problem.flags[from] & kPersistent) continue;
      // A value that is made anew while it is resident already has its place.
      const auto use = std::lower_bound(uses[to].begin(), uses[to].end(), position);
      if (use_kinds[to][use - uses[to].begin()] != kCreate) continue;
      reused[position] = problem.bytes[from];
      reused_from[position] = from;
      reused_by[position] = to;
      return;
    }
  }
};

// The positions in which a hole's object is not used: [first, last) and [0, wrapped).
struct Span { i32 first, last, wrapped; };

Span span(const Sequence& s, const Hole& hole) {
  return {hole.start + 1, std::min(hole.end, s.length), std::max(0, hole.end - s.length)};
}

// Changes of bytes over spans of positions, added up at once.
class Changes {
 public:
  explicit Changes(i32 num_positions) : change_(num_positions + 1, 0) {}
  void add(const Sequence& s, const Hole& hole, i64 amount) {
    const auto [first, last, wrapped] = span(s, hole);
    change_[first] += amount;
    change_[last] -= amount;
    if (!wrapped) return;
    change_[0] += amount;
    change_[wrapped] -= amount;
  }
  // Adds all changes since the last time to the bytes by position.
  void apply(std::vector<i64>& live) {
    i64 here = 0;
    for (size_t position = 0; position < live.size(); ++position) {
      here += change_[position];
      live[position] += here;
    }
    std::fill(change_.begin(), change_.end(), 0);
  }

 private:
  std::vector<i64> change_;
};

void add_span(RangeMax& live, const Sequence& s, const Hole& hole, i64 amount) {
  const auto [first, last, wrapped] = span(s, hole);
  live.add(first, last, amount);
  live.add(0, wrapped, amount);
}

i64 max_span(const RangeMax& live, const Sequence& s, const Hole& hole) {
  const auto [first, last, wrapped] = span(s, hole);
  return std::max(live.max(first, last), live.max(0, wrapped));
}

bool is_empty(const Sequence& s, const Hole& hole) {
  const auto [first, last, wrapped] = span(s, hole);
  return first >= last && wrapped == 0;
}

}  // namespace
