// The planner's inner loop: what leaves the device between two uses, when it moves, how long a step
// takes. `_engine.py` says what the functions mean and owns all memory; nothing here outlives a call
// except the problem itself.
//
// An object is a storage. Between two uses of an object lies a gap; an evicted gap is one in which
// the object is not on the device. Positions are those of the sequence of operators; steps repeat, so
// the gap of a persistent object after its last use goes on at the beginning of the next step.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <queue>
#include <vector>

namespace {

using i32 = std::int32_t;
using i64 = std::int64_t;

enum Access : std::uint8_t { kRead = 0, kWrite = 1, kCreate = 2 };
enum ObjectFlags : std::uint8_t { kPersistent = 1, kInput = 2, kKept = 4, kPinned = 8 };

struct Problem {
  i32 num_operators, num_objects;
  std::vector<double> seconds;          // of each operator
  std::vector<i64> bytes;               // of each object
  std::vector<std::uint8_t> flags;      // of each object
  std::vector<i32> first_access;        // CSR over operators
  std::vector<i32> access_object;
  std::vector<std::uint8_t> access_kind;
  std::vector<i32> first_handover;      // CSR over operators: (operand, result) that may share room
  std::vector<i32> handover_from, handover_to;
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

struct Gap {
  i32 object;
  i32 start;  // position of the use before it
  i32 end;    // position of the use after it; beyond the sequence where it goes on in the next step
};

// One sequence of operators and what follows from it alone.
struct Sequence {
  const Problem& problem;
  i32 length;
  std::vector<i32> operators;
  std::vector<std::uint8_t> again;          // whether the operator is recomputed there
  std::vector<std::vector<i32>> uses;       // positions of each object's uses
  std::vector<std::vector<std::uint8_t>> use_kinds;
  std::vector<Gap> gaps;
  std::vector<i32> first_gap;               // CSR over objects; in the order of their starts
  std::vector<i64> base;                    // live bytes per position if nothing is evicted
  std::vector<i64> handed;                  // bytes that a result takes over from an operand
  std::vector<i32> handed_from, handed_to;  // by position; up to one pair each, -1 for none
  std::vector<i64> created;                 // bytes that appear at a position, without handed
  std::vector<std::vector<i32>> dying;      // objects whose last use (of this life) is there

  Sequence(const Problem& p, const i32* order, const std::uint8_t* recomputed, i32 n)
      : problem(p), length(n), operators(order, order + n), again(recomputed, recomputed + n),
        uses(p.num_objects), use_kinds(p.num_objects), base(n, 0), handed(n, 0),
        handed_from(n, -1), handed_to(n, -1), created(n, 0), dying(n) {
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
    std::vector<i64> change(2 * n + 2, 0);
    first_gap.push_back(0);
    for (i32 object = 0; object < p.num_objects; ++object) {
      lives(object, change);
      first_gap.push_back(static_cast<i32>(gaps.size()));
    }
    i64 live = 0;
    std::vector<i64> unrolled(2 * n, 0);
    for (i32 position = 0; position < 2 * n; ++position) {
      live += change[position];
      unrolled[position] = live;
    }
    for (i32 position = 0; position < n; ++position) base[position] = unrolled[position] + unrolled[position + n];
    for (i32 position = 0; position < n; ++position) hand_over(position);
  }

 private:
  // Splits an object's uses into lives (a recomputed value begins a new one) and gaps.
  void lives(i32 object, std::vector<i64>& change) {
    const auto& at = uses[object];
    const auto& kinds = use_kinds[object];
    if (at.empty()) {
      // A persistent object that no operator touches still has to be somewhere: in its gap of a step.
      if (problem.flags[object] & kPersistent) {
        gaps.push_back({object, -1, length});
        change[0] += problem.bytes[object];
        change[length] -= problem.bytes[object];
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
        if (at[k + 1] > at[k]) gaps.push_back({object, at[k], at[k + 1]});
        continue;
      }
      if (last && (problem.flags[object] & kPersistent)) {
        gaps.push_back({object, at[k], at[0] + length});
        change[begin] += bytes;
        change[at[0] + length] -= bytes;
        return;
      }
      const i32 end = last && (problem.flags[object] & kKept) ? length : at[k] + 1;
      if (end == at[k] + 1) dying[at[k]].push_back(object);
      change[begin] += bytes;
      change[end] -= bytes;
      if (!last) begin = at[k + 1];
    }
  }

  // An operand that dies here may give its room to a result.
  void hand_over(i32 position) {
    const i32 op = operators[position];
    for (i32 k = problem.first_handover[op]; k < problem.first_handover[op + 1]; ++k) {
      const i32 from = problem.handover_from[k], to = problem.handover_to[k];
      if (problem.bytes[from] != problem.bytes[to] || problem.bytes[from] == 0) continue;
      auto& dead = dying[position];
      if (std::find(dead.begin(), dead.end(), from) == dead.end()) continue;
      if (problem.flags[from] & kPersistent) continue;
      // A value that is made anew while it is there already has its room.
      const auto use = std::lower_bound(uses[to].begin(), uses[to].end(), position);
      if (use_kinds[to][use - uses[to].begin()] != kCreate) continue;
      if (std::find(dead.begin(), dead.end(), to) != dead.end()) continue;
      handed[position] = problem.bytes[from];
      handed_from[position] = from;
      handed_to[position] = to;
      base[position] -= problem.bytes[from];
      return;
    }
  }
};

void span(const Sequence& s, const Gap& gap, i32& first, i32& last, i32& wrapped) {
  // The positions in which the gap's object is not used: [first, last) and [0, wrapped).
  first = gap.start + 1;
  last = std::min(gap.end, s.length);
  wrapped = std::max(0, gap.end - s.length);
}

void add_span(RangeMax& live, const Sequence& s, const Gap& gap, i64 amount) {
  i32 first, last, wrapped;
  span(s, gap, first, last, wrapped);
  live.add(first, last, amount);
  live.add(0, wrapped, amount);
}

i64 max_span(const RangeMax& live, const Sequence& s, const Gap& gap) {
  i32 first, last, wrapped;
  span(s, gap, first, last, wrapped);
  return std::max(live.max(first, last), live.max(0, wrapped));
}

bool is_empty(const Sequence& s, const Gap& gap) {
  i32 first, last, wrapped;
  span(s, gap, first, last, wrapped);
  return first >= last && wrapped == 0;
}

// Chooses what leaves: at every position that does not fit, the object with the latest next use
// (Belady), shifted by `bias`; then takes back what was not necessary. `evicted` may hold a choice
// to begin with. Returns how many bytes are still too many at the worst position.
i64 choose(const Sequence& s, const i64* capacity, i64 min_bytes, const double* bias, std::uint8_t* evicted) {
  const i32 n = s.length, num_gaps = static_cast<i32>(s.gaps.size());
  std::vector<i64> live(s.base);
  auto release = [&](const Gap& gap, i64 amount) {
    i32 first, last, wrapped;
    span(s, gap, first, last, wrapped);
    for (i32 p = first; p < last; ++p) live[p] += amount;
    for (i32 p = 0; p < wrapped; ++p) live[p] += amount;
  };
  std::vector<std::vector<i32>> starting(n), wrapping(1);
  for (i32 g = 0; g < num_gaps; ++g) {
    const Gap& gap = s.gaps[g];
    if (evicted[g]) release(gap, -s.problem.bytes[gap.object]);
    if (gap.end > n || gap.start < 0) wrapping[0].push_back(g);
    if (gap.start + 1 < n && gap.start >= 0) starting[gap.start + 1].push_back(g);
  }
  i64 worst = 0;
  for (int pass = 0; pass < 2; ++pass) {
    // First large objects only; small ones where these are not enough.
    const i64 least = pass == 0 ? min_bytes : 1;
    worst = 0;
    std::priority_queue<std::pair<double, i32>> heap;
    auto push = [&](i32 g, i32 end) {
      const Gap& gap = s.gaps[g];
      if (evicted[g] || s.problem.bytes[gap.object] < least || (s.problem.flags[gap.object] & kPinned)) return;
      heap.push({end + (bias ? bias[g] : 0.0), g});
    };
    for (i32 g : wrapping[0]) push(g, s.gaps[g].start < 0 ? n : s.gaps[g].end - n);
    for (i32 position = 0; position < n; ++position) {
      for (i32 g : starting[position]) push(g, s.gaps[g].end);
      while (live[position] > capacity[position] && !heap.empty()) {
        const i32 g = heap.top().second;
        const Gap& gap = s.gaps[g];
        heap.pop();
        if (evicted[g]) continue;
        i32 first, last, wrapped;
        span(s, gap, first, last, wrapped);
        if (!((first <= position && position < last) || position < wrapped)) continue;
        evicted[g] = 1;
        release(gap, -s.problem.bytes[gap.object]);
      }
      worst = std::max(worst, live[position] - capacity[position]);
    }
    if (worst <= 0) break;
  }
  // Take back, largest first, what fits after all.
  for (i32 position = 0; position < n; ++position) live[position] -= capacity[position];
  RangeMax tree(live);
  std::vector<i32> back;
  for (i32 g = 0; g < num_gaps; ++g)
    if (evicted[g]) back.push_back(g);
  std::sort(back.begin(), back.end(), [&](i32 a, i32 b) {
    const i64 x = s.problem.bytes[s.gaps[a].object], y = s.problem.bytes[s.gaps[b].object];
    const i32 u = s.gaps[a].end - s.gaps[a].start, v = s.gaps[b].end - s.gaps[b].start;
    return x != y ? x > y : u != v ? u < v : a < b;
  });
  for (i32 g : back) {
    const Gap& gap = s.gaps[g];
    const i64 bytes = s.problem.bytes[gap.object];
    if (is_empty(s, gap) || max_span(tree, s, gap) + bytes <= 0) {
      evicted[g] = 0;
      add_span(tree, s, gap, bytes);
    }
  }
  return worst;
}

// Whether what is evicted has to be written first: not if a copy below is still right.
std::vector<std::uint8_t> dirty_gaps(const Sequence& s, const std::uint8_t* evicted) {
  std::vector<std::uint8_t> dirty(s.gaps.size(), 0);
  for (i32 object = 0; object < s.problem.num_objects; ++object) {
    const i32 begin = s.first_gap[object], end = s.first_gap[object + 1];
    if (begin == end) continue;
    const auto& at = s.uses[object];
    const auto& kinds = s.use_kinds[object];
    const bool persistent = s.problem.flags[object] & kPersistent;
    bool stale = !persistent;
    // Persistent objects: what the last step left decides, hence twice.
    for (int round = 0; round < (persistent ? 2 : 1); ++round) {
      i32 g = begin;
      for (size_t k = 0; k < at.size(); ++k) {
        if (kinds[k] != kRead) stale = true;
        if (g < end && s.gaps[g].start == at[k] && (k + 1 == at.size() || at[k + 1] > at[k])) {
          if (evicted[g]) {
            dirty[g] = stale;
            stale = false;
          }
          ++g;
        }
      }
    }
  }
  return dirty;
}

struct Timing {
  double step_seconds = 0;
  i64 overflow = 0;
};

// Replays three steps: what is evicted leaves as soon as it may, what is needed comes back as early
// as there is room for good, in the order of its use. The third gives the times and the windows.
Timing replay(const Sequence& s, i64 capacity, double out_seconds_per_byte, double in_seconds_per_byte,
              const std::uint8_t* evicted, i32 horizon, i32* out_end, i32* in_start, double* starts) {
  constexpr int kSteps = 3;
  const Problem& p = s.problem;
  const i32 n = s.length, total = kSteps * n;
  const auto dirty = dirty_gaps(s, evicted);

  std::vector<i64> live(s.base);
  std::vector<std::vector<i32>> leaving(n);
  std::vector<i32> arriving;
  for (i32 g = 0; g < static_cast<i32>(s.gaps.size()); ++g) {
    if (!evicted[g]) continue;
    i32 first, last, wrapped;
    span(s, s.gaps[g], first, last, wrapped);
    for (i32 q = first; q < last; ++q) live[q] -= p.bytes[s.gaps[g].object];
    for (i32 q = 0; q < wrapped; ++q) live[q] -= p.bytes[s.gaps[g].object];
    if (s.gaps[g].start < 0) continue;
    leaving[s.gaps[g].start].push_back(g);
    arriving.push_back(g);
  }
  std::sort(arriving.begin(), arriving.end(), [&](i32 a, i32 b) {
    const i32 x = s.gaps[a].end % n, y = s.gaps[b].end % n;
    return x != y ? x < y : a < b;
  });
  const i32 num_arriving = static_cast<i32>(arriving.size());
  // Live bytes that are certain, for the steps replayed and one more.
  std::vector<i64> certain(total + n);
  for (i32 q = 0; q < total + n; ++q) certain[q] = live[q % n];

  struct Leaving { double done; i64 bytes; i32 gap; i32 step; };
  std::vector<Leaving> queue;
  size_t head = 0;
  // By gap: the step whose gap has left by now, so that it may come back.
  std::vector<i32> left(s.gaps.size(), -1);
  std::vector<double> due(total + n, 0.0);  // when what was fetched ahead for a position is there
  double now = 0, out_free = 0, in_free = 0, previous_end = 0;
  i64 used = 0;  // persistent objects that are there when a step begins
  for (size_t g = 0; g < s.gaps.size(); ++g)
    if (!evicted[g] && (s.gaps[g].end >= n || s.gaps[g].start < 0)) used += p.bytes[s.gaps[g].object];
  i64 next = 0;  // of all arrivals in the order of use: step = next / num_arriving
  Timing timing;

  auto position_of = [&](i64 index) {
    return s.gaps[arriving[index % num_arriving]].end % n + static_cast<i32>(index / num_arriving) * n;
  };
  auto start_of = [&](i64 index) {  // absolute position of the use before
    const Gap& gap = s.gaps[arriving[index % num_arriving]];
    return gap.start + (position_of(index) - gap.end);
  };

  for (i32 absolute = 0; absolute < total; ++absolute) {
    const i32 position = absolute % n, step = absolute / n;
    if (absolute > 0 && position == 0) previous_end = now;
    // What has left by now.
    auto pop = [&] {
      const Leaving& done = queue[head++];
      used -= done.bytes;
      left[done.gap] = done.step;
      if (out_end && done.step == kSteps - 2) out_end[done.gap] = absolute - done.step * n;
    };
    while (head < queue.size() && queue[head].done <= now) pop();

    i64 need = s.created[position] - s.handed[position];
    i64 last_needed = next;
    while (num_arriving && last_needed < static_cast<i64>(kSteps + 1) * num_arriving && position_of(last_needed) <= absolute) {
      need += p.bytes[s.gaps[arriving[last_needed % num_arriving]].object];
      ++last_needed;
    }
    while (used + need > capacity && head < queue.size()) {
      now = std::max(now, queue[head].done);
      pop();
    }
    // What has to come back may still be on its way out.
    for (i64 index = next; index < last_needed; ++index) {
      const i32 g = arriving[index % num_arriving];
      const i32 gap_step = start_of(index) >= 0 ? start_of(index) / n : -1;
      while (gap_step >= 0 && left[g] < gap_step && head < queue.size()) {
        now = std::max(now, queue[head].done);
        pop();
      }
    }
    timing.overflow = std::max(timing.overflow, used + need - capacity);
    used += need;
    const double boundary = now;
    for (; next < last_needed; ++next) {
      const i32 g = arriving[next % num_arriving];
      in_free = std::max(in_free, now) + p.bytes[s.gaps[g].object] * in_seconds_per_byte;
      if (in_start && next / num_arriving == kSteps - 1) in_start[g] = absolute - (kSteps - 1) * n;
      now = std::max(now, in_free);
    }
    const double finish = std::max(now, due[absolute]) + p.seconds[s.operators[position]];

    if (starts && step == kSteps - 1) starts[position] = finish - p.seconds[s.operators[position]] - previous_end;

    // Prefetch while the link would idle before the next boundary.
    while (num_arriving && next < static_cast<i64>(kSteps + 1) * num_arriving && in_free < finish) {
      const i32 use = position_of(next);
      if (use >= total + n || use > absolute + horizon) break;
      const i32 before = start_of(next);
      const i32 g = arriving[next % num_arriving];
      const i64 bytes = p.bytes[s.gaps[g].object];
      if (before >= absolute) break;  // still in use
      if (before >= 0 && left[g] < before / n) break;  // still on its way out
      if (used + bytes > capacity) break;
      bool fits = true;
      for (i32 q = use - 1; q >= absolute && fits; --q) fits = certain[q] + bytes <= capacity;
      if (!fits) break;
      for (i32 q = absolute; q < use; ++q) certain[q] += bytes;
      used += bytes;
      in_free = std::max(in_free, boundary) + bytes * in_seconds_per_byte;
      due[use] = std::max(due[use], in_free);
      if (in_start && next / num_arriving == kSteps - 1) in_start[g] = absolute - (kSteps - 1) * n;
      ++next;
    }
    now = finish;
    for (i32 object : s.dying[position])
      if (object != s.handed_from[position]) used -= p.bytes[object];
    if (position == n - 1)
      for (i32 object = 0; object < p.num_objects; ++object)
        if ((p.flags[object] & kKept) && !(p.flags[object] & kPersistent)) used -= p.bytes[object];
    for (i32 g : leaving[position]) {
      const i64 bytes = p.bytes[s.gaps[g].object];
      if (dirty[g]) {
        out_free = std::max(out_free, now) + bytes * out_seconds_per_byte;
        queue.push_back({out_free, bytes, g, step});
      } else {
        used -= bytes;
        left[g] = step;
        if (out_end && step == kSteps - 2) out_end[g] = position + 1;
      }
    }
  }
  timing.step_seconds = now - previous_end;
  return timing;
}

// What a greedy order prefers: little to fetch, little new room, much freed, early in the program.
struct Taste {
  double fetch, create, release, late;
  i64 capacity;  // bytes touched since an object's last use after which it counts as gone
  i32 window;    // candidates that are looked at, the earliest of the program first
};

// List scheduling of positions [begin, end) of `base`; the others stay where they are.
void greedy(const Problem& p, const i32* first_predecessor, const i32* predecessors, const i32* base,
            i32 begin, i32 end, const Taste& taste, const float* noise, i32* order) {
  const i32 n = p.num_operators;
  std::copy(base, base + n, order);
  std::vector<i32> rank(n), waiting(n, 0), uses(p.num_objects, 0);
  std::vector<double> touched(p.num_objects, -1e300);
  std::vector<std::vector<i32>> successors(n);
  for (i32 position = 0; position < n; ++position) rank[base[position]] = position;
  for (i32 position = begin; position < end; ++position) {
    const i32 op = base[position];
    for (i32 k = first_predecessor[op]; k < first_predecessor[op + 1]; ++k) {
      const i32 before = predecessors[k];
      if (rank[before] < begin) continue;
      ++waiting[op];
      successors[before].push_back(op);
    }
  }
  double clock = 0;
  auto touch = [&](i32 op) {
    for (i32 k = p.first_access[op]; k < p.first_access[op + 1]; ++k) {
      const i32 object = p.access_object[k];
      if (clock - touched[object] > static_cast<double>(taste.capacity) || p.access_kind[k] == kCreate)
        clock += static_cast<double>(p.bytes[object]);
      touched[object] = clock;
      --uses[object];
    }
  };
  for (i32 k = 0; k < p.first_access[n]; ++k) ++uses[p.access_object[k]];
  for (i32 position = 0; position < begin; ++position) touch(base[position]);
  // Ready operators by rank: few are looked at, so a sorted vector of ranks will do.
  std::vector<i32> ready;
  for (i32 position = begin; position < end; ++position)
    if (waiting[base[position]] == 0) ready.push_back(position);
  for (i32 position = begin; position < end; ++position) {
    double best = std::numeric_limits<double>::infinity();
    size_t chosen = 0;
    const size_t looked_at = std::min<size_t>(ready.size(), taste.window);
    for (size_t r = 0; r < looked_at; ++r) {
      const i32 op = base[ready[r]];
      double fetch = 0, create = 0, release = 0;
      for (i32 k = p.first_access[op]; k < p.first_access[op + 1]; ++k) {
        const i32 object = p.access_object[k];
        const double bytes = static_cast<double>(p.bytes[object]);
        if (p.access_kind[k] == kCreate) create += bytes;
        else if (clock - touched[object] > static_cast<double>(taste.capacity)) fetch += bytes;
        if (uses[object] == 1 && !(p.flags[object] & (kPersistent | kKept))) release += bytes;
      }
      double score = taste.fetch * fetch + taste.create * create - taste.release * release +
                     taste.late * (ready[r] - ready[0]);
      if (noise) score *= 1 + noise[op];
      if (score < best) {
        best = score;
        chosen = r;
      }
    }
    const i32 op = base[ready[chosen]];
    ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(chosen));
    order[position] = op;
    touch(op);
    for (i32 next : successors[op])
      if (--waiting[next] == 0) ready.insert(std::lower_bound(ready.begin(), ready.end(), rank[next]), rank[next]);
  }
}

}  // namespace

extern "C" {

void problem_greedy_order(const void* problem, const i32* first_predecessor, const i32* predecessors,
                          const i32* base, i32 begin, i32 end, double fetch, double create,
                          double release, double late, i64 capacity, i32 window, const float* noise,
                          i32* order) {
  greedy(*static_cast<const Problem*>(problem), first_predecessor, predecessors, base, begin, end,
         {fetch, create, release, late, capacity, window}, noise, order);
}

void* problem_new(i32 num_operators, i32 num_objects, const double* seconds, const i64* bytes,
                  const std::uint8_t* flags, const i32* first_access, const i32* access_object,
                  const std::uint8_t* access_kind, const i32* first_handover, const i32* handover_from,
                  const i32* handover_to) {
  const i32 num_accesses = first_access[num_operators], num_handovers = first_handover[num_operators];
  return new Problem{num_operators,
                     num_objects,
                     {seconds, seconds + num_operators},
                     {bytes, bytes + num_objects},
                     {flags, flags + num_objects},
                     {first_access, first_access + num_operators + 1},
                     {access_object, access_object + num_accesses},
                     {access_kind, access_kind + num_accesses},
                     {first_handover, first_handover + num_operators + 1},
                     {handover_from, handover_from + num_handovers},
                     {handover_to, handover_to + num_handovers}};
}

void problem_free(void* problem) { delete static_cast<Problem*>(problem); }

void* sequence_new(const void* problem, const i32* order, const std::uint8_t* again, i32 length) {
  return new Sequence(*static_cast<const Problem*>(problem), order, again, length);
}

void sequence_free(void* sequence) { delete static_cast<Sequence*>(sequence); }

i32 sequence_num_gaps(const void* sequence) {
  return static_cast<i32>(static_cast<const Sequence*>(sequence)->gaps.size());
}

// The gaps by object and start, live bytes by position with everything resident, and the handovers.
void sequence_read(const void* sequence, i32* gap_object, i32* gap_start, i32* gap_end, i64* base,
                   i32* handed_from, i32* handed_to) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  for (size_t g = 0; g < s.gaps.size(); ++g) {
    gap_object[g] = s.gaps[g].object;
    gap_start[g] = s.gaps[g].start;
    gap_end[g] = s.gaps[g].end;
  }
  std::copy(s.base.begin(), s.base.end(), base);
  std::copy(s.handed_from.begin(), s.handed_from.end(), handed_from);
  std::copy(s.handed_to.begin(), s.handed_to.end(), handed_to);
}

i64 sequence_choose(const void* sequence, const i64* capacity, i64 min_bytes, const double* bias,
                    std::uint8_t* evicted) {
  return choose(*static_cast<const Sequence*>(sequence), capacity, min_bytes, bias, evicted);
}

void sequence_dirty(const void* sequence, const std::uint8_t* evicted, std::uint8_t* dirty) {
  const auto result = dirty_gaps(*static_cast<const Sequence*>(sequence), evicted);
  std::copy(result.begin(), result.end(), dirty);
}

i64 sequence_replay(const void* sequence, i64 capacity, double out_seconds_per_byte,
                    double in_seconds_per_byte, const std::uint8_t* evicted, i32 horizon, i32* out_end,
                    i32* in_start, double* starts, double* step_seconds) {
  const auto timing = replay(*static_cast<const Sequence*>(sequence), capacity, out_seconds_per_byte,
                             in_seconds_per_byte, evicted, horizon, out_end, in_start, starts);
  *step_seconds = timing.step_seconds;
  return timing.overflow;
}

}  // extern "C"
