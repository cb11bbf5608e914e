// The planner's inner loop: what leaves the device between two uses, when it moves, how long a step
// takes. `_engine.py` says what the functions mean and owns all memory; nothing here outlives a call
// except the problem itself.
//
// An object is a storage. Between two uses of an object lies a gap; an evicted gap is one in which
// the object is not on the device. Positions are those of the sequence of operators; steps repeat, so
// the gap of a persistent object after its last use goes on at the beginning of the next step.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
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

constexpr int kTiers = 2;  // below the device: the host, and the file

// The links to the tiers below, each with a queue of its own in either direction.
struct Links {
  double out[kTiers], in[kTiers];  // seconds per byte
  const std::uint8_t* tier;        // of each gap; null: all go to the first
  i32 of(i32 gap) const { return tier ? tier[gap] : 0; }
};

// Room by bytes: whatever fits fits, wherever it may lie.
class ByteRoom {
 public:
  static constexpr int kSteps = 3, kRead = 2, kReadOut = 1;  // steps replayed; those that are read off
  static constexpr bool kStopsWhenFull = false;
  ByteRoom(const Sequence& s, i64 capacity, const std::uint8_t* evicted)
      : s_(s), capacity_(capacity), certain_((kSteps + 1) * s.length) {
    std::vector<i64> live(s.base);
    for (i32 g = 0; g < static_cast<i32>(s.gaps.size()); ++g) {
      const Gap& gap = s.gaps[g];
      const i64 bytes = s.problem.bytes[gap.object];
      if (!evicted[g]) {
        if (gap.end >= s.length || gap.start < 0) used_ += bytes;  // there when a step begins
        continue;
      }
      i32 first, last, wrapped;
      span(s, gap, first, last, wrapped);
      for (i32 q = first; q < last; ++q) live[q] -= bytes;
      for (i32 q = 0; q < wrapped; ++q) live[q] -= bytes;
    }
    for (size_t q = 0; q < certain_.size(); ++q) certain_[q] = live[q % s.length];
  }
  void need(i32 position) { need_ = s_.created[position] - s_.handed[position]; }
  void need_arrival(i32 gap) { need_ += bytes(gap); }
  bool fits() const { return used_ + need_ <= capacity_; }
  i64 take() {
    used_ += need_;
    return used_ - capacity_;
  }
  // Whether a gap's object may come back for a use at `use`, both counted over all steps.
  bool take_early(i32 gap, i32 absolute, i32 use) {
    const i64 more = bytes(gap);
    if (used_ + more > capacity_) return false;
    for (i32 q = use - 1; q >= absolute; --q)
      if (certain_[q] + more > capacity_) return false;
    for (i32 q = absolute; q < use; ++q) certain_[q] += more;
    used_ += more;
    return true;
  }
  void leave(i32 gap) { used_ -= bytes(gap); }
  void after(i32 position) {
    for (i32 object : s_.dying[position])
      if (object != s_.handed_from[position]) used_ -= s_.problem.bytes[object];
    if (position != s_.length - 1) return;
    for (i32 object = 0; object < s_.problem.num_objects; ++object)
      if ((s_.problem.flags[object] & kKept) && !(s_.problem.flags[object] & kPersistent))
        used_ -= s_.problem.bytes[object];
  }

 private:
  i64 bytes(i32 gap) const { return s_.problem.bytes[s_.gaps[gap].object]; }
  const Sequence& s_;
  i64 capacity_, used_ = 0, need_ = 0;
  std::vector<i64> certain_;  // live bytes by position, with what was fetched ahead
};

// An object, or several of which each takes over the room of the one before, at one address.
struct Stay {
  i64 offset, bytes;
  double from, until;  // when it would like its room, and when that is free again, if all goes well
  i32 start, end;  // from the first use to behind the last; an end beyond the step is in the next
  i32 arrives;     // gap after which it comes back; -1: made there, -2: there already
  i32 leaves;      // gap in which it leaves; -1: it is not needed any more, -2: it never ends
};

// Room by addresses: who comes to an address waits until all who were there before have gone.
class AddressRoom {
 public:
  static constexpr int kSteps = 4, kRead = 2, kReadOut = 2;
  static constexpr bool kStopsWhenFull = true;
  AddressRoom(const Sequence& s, const Stay* stays, i32 num_stays)
      : s_(s), stays_(stays), num_stays_(num_stays), successors_(num_stays), num_before_(num_stays, 0),
        gone_(num_stays, 0), made_(s.length), dying_(s.length), arriving_(s.gaps.size(), -1),
        leaving_(s.gaps.size(), -1) {
    std::vector<i32> by_start(num_stays);
    std::iota(by_start.begin(), by_start.end(), 0);
    std::stable_sort(by_start.begin(), by_start.end(), [&](i32 a, i32 b) { return stays[a].start < stays[b].start; });
    for (i32 round = 0; round < 2; ++round)
      for (i32 stay : by_start) put(stay, round);
    for (i32 stay = 0; stay < num_stays; ++stay) {
      const Stay& it = stays[stay];
      if (it.arrives >= 0) arriving_[it.arrives] = stay;
      if (it.arrives == -1) made_[it.start].push_back(stay);
      if (it.leaves >= 0) leaving_[it.leaves] = stay;
      if (it.leaves == -1) dying_[(it.end - 1) % s.length].push_back(stay);
    }
  }
  void need(i32 position) { needed_ = made_[position]; }
  void need_arrival(i32 gap) { needed_.push_back(arriving_[gap]); }
  bool fits() const {
    return std::all_of(needed_.begin(), needed_.end(), [&](i32 stay) { return is_free(stay); });
  }
  i64 take() {
    i64 missing = 0;
    for (i32 stay : needed_) {
      if (!is_free(stay)) missing += stays_[stay].bytes;
      gone_[stay] -= num_before_[stay];
    }
    return missing;
  }
  bool take_early(i32 gap, i32, i32) {
    const i32 stay = arriving_[gap];
    if (!is_free(stay)) return false;
    gone_[stay] -= num_before_[stay];
    return true;
  }
  void leave(i32 gap) { end(leaving_[gap]); }
  void after(i32 position) {
    for (i32 stay : dying_[position]) end(stay);
  }
  // Whoever leaves has left when the next one at its address comes, in all steps.
  void clamp(const i32* in_start, i32* out_end) const {
    const i32 n = s_.length;
    for (i32 before = 0; before < num_stays_; ++before) {
      const Stay& it = stays_[before];
      if (it.leaves < 0) continue;
      const i32 around = it.end - 1 >= n ? n : 0;
      for (auto [after, next_step] : successors_[before]) {
        const i32 start = stays_[after].arrives >= 0 ? in_start[stays_[after].arrives] : stays_[after].start;
        out_end[it.leaves] = std::min(out_end[it.leaves], start + (next_step ? n : 0) - around);
      }
    }
  }

 private:
  bool is_free(i32 stay) const { return gone_[stay] >= num_before_[stay]; }
  void end(i32 stay) {
    for (auto [after, next_step] : successors_[stay]) ++gone_[after];
  }
  // Notes who was last at the addresses of a stay; the second round also knows the step before.
  void put(i32 stay, i32 round) {
    const Stay& it = stays_[stay];
    const i64 low = it.offset, high = it.offset + it.bytes;
    auto at = last_.upper_bound(low);
    if (at != last_.begin() && std::prev(at)->second.high > low) --at;
    std::vector<i32> before;
    while (at != last_.end() && at->first < high) {
      const i64 first = at->first;
      const Piece piece = at->second;
      at = last_.erase(at);
      if (first < low) last_[first] = {low, piece.stay, piece.round};
      if (piece.high > high) at = last_.insert({high, {piece.high, piece.stay, piece.round}}).first;
      if (round == 0 || piece.stay == stay) continue;
      if (std::find(before.begin(), before.end(), piece.stay) != before.end()) continue;
      before.push_back(piece.stay);
      const bool next_step = piece.round < round;
      successors_[piece.stay].push_back({stay, next_step});
      ++num_before_[stay];
      if (next_step && stays_[piece.stay].end <= s_.length) ++gone_[stay];
    }
    last_[low] = {high, stay, round};
  }
  struct Piece { i64 high; i32 stay, round; };
  const Sequence& s_;
  const Stay* stays_;
  i32 num_stays_;
  std::vector<std::vector<std::pair<i32, bool>>> successors_;  // and whether in the next step
  std::vector<i32> num_before_, gone_;
  std::vector<std::vector<i32>> made_, dying_;  // by position
  std::vector<i32> arriving_, leaving_;         // stay by gap
  std::vector<i32> needed_;
  std::map<i64, Piece> last_;  // by first address
};

// Replays some steps: what is evicted leaves as soon as it may, what is needed comes back as early
// as there is room for good, in the order of its use. A late step gives the times and the windows.
template <class Room>
Timing replay(const Sequence& s, const Links& links, const std::uint8_t* evicted, i32 horizon, Room& room,
              i32* out_end, i32* in_start, double* starts) {
  constexpr int kSteps = Room::kSteps, kRead = Room::kRead, kReadOut = Room::kReadOut;
  const Problem& p = s.problem;
  const i32 n = s.length, total = kSteps * n;
  const auto dirty = dirty_gaps(s, evicted);
  std::vector<std::vector<i32>> leaving(n);
  std::vector<i32> arriving[kTiers];
  for (i32 g = 0; g < static_cast<i32>(s.gaps.size()); ++g) {
    if (!evicted[g] || s.gaps[g].start < 0) continue;
    leaving[s.gaps[g].start].push_back(g);
    arriving[links.of(g)].push_back(g);
  }
  for (auto& gaps : arriving)
    std::sort(gaps.begin(), gaps.end(), [&](i32 a, i32 b) {
      const i32 x = s.gaps[a].end % n, y = s.gaps[b].end % n;
      return x != y ? x < y : a < b;
    });

  struct Leaving { double done; i32 gap, step; };
  std::vector<Leaving> queue[kTiers];
  size_t head[kTiers] = {};
  double out_free[kTiers] = {}, in_free[kTiers] = {};
  i64 next[kTiers] = {};  // of all arrivals in the order of use: step = next / arriving.size()
  // By gap: the step whose gap has left by now, so that it may come back.
  std::vector<i32> left(s.gaps.size(), -1);
  std::vector<double> due(total + n, 0.0);  // when what was fetched ahead for a position is there
  double now = 0, previous_end = 0;
  Timing timing;

  auto gap_of = [&](int t, i64 index) { return arriving[t][index % arriving[t].size()]; };
  auto position_of = [&](int t, i64 index) {
    return s.gaps[gap_of(t, index)].end % n + static_cast<i32>(index / arriving[t].size()) * n;
  };
  auto start_of = [&](int t, i64 index) {  // absolute position of the use before
    const Gap& gap = s.gaps[gap_of(t, index)];
    return gap.start + (position_of(t, index) - gap.end);
  };
  auto is_last = [&](int t, i64 index) { return index >= static_cast<i64>(kSteps + 1) * static_cast<i64>(arriving[t].size()); };

  for (i32 absolute = 0; absolute < total; ++absolute) {
    const i32 position = absolute % n, step = absolute / n;
    if (position == 0 && absolute > 0 && step <= kRead) previous_end = now;
    auto note_in = [&](int t, i64 index) {
      if (in_start && index / static_cast<i64>(arriving[t].size()) == kRead) in_start[gap_of(t, index)] = absolute - kRead * n;
    };
    // What has left by now.
    auto pop = [&](int t) {
      const Leaving& done = queue[t][head[t]++];
      room.leave(done.gap);
      left[done.gap] = done.step;
      if (out_end && done.step == kReadOut) out_end[done.gap] = absolute - done.step * n;
    };
    auto wait = [&] {  // for the next one to leave
      int first = -1;
      for (int t = 0; t < kTiers; ++t)
        if (head[t] < queue[t].size() && (first < 0 || queue[t][head[t]].done < queue[first][head[first]].done)) first = t;
      if (first < 0) return false;
      now = std::max(now, queue[first][head[first]].done);
      pop(first);
      return true;
    };
    for (int t = 0; t < kTiers; ++t)
      while (head[t] < queue[t].size() && queue[t][head[t]].done <= now) pop(t);

    room.need(position);
    i64 last_needed[kTiers];
    for (int t = 0; t < kTiers; ++t) {
      last_needed[t] = next[t];
      while (!arriving[t].empty() && !is_last(t, last_needed[t]) && position_of(t, last_needed[t]) <= absolute)
        room.need_arrival(gap_of(t, last_needed[t]++));
    }
    while (!room.fits() && wait()) {}
    // What has to come back may still be on its way out.
    for (int t = 0; t < kTiers; ++t)
      for (i64 index = next[t]; index < last_needed[t]; ++index) {
        const i32 gap_step = start_of(t, index) >= 0 ? start_of(t, index) / n : -1;
        while (gap_step >= 0 && left[gap_of(t, index)] < gap_step && wait()) {}
      }
    timing.overflow = std::max(timing.overflow, room.take());
    if (Room::kStopsWhenFull && timing.overflow > 0) return timing;
    const double boundary = now;
    for (int t = 0; t < kTiers; ++t)
      for (; next[t] < last_needed[t]; ++next[t]) {
        in_free[t] = std::max(in_free[t], boundary) + p.bytes[s.gaps[gap_of(t, next[t])].object] * links.in[t];
        note_in(t, next[t]);
        now = std::max(now, in_free[t]);
      }
    const double start = std::max(now, due[absolute]), finish = start + p.seconds[s.operators[position]];
    if (starts && step == kRead) starts[position] = start - previous_end;

    // Prefetch while the link would idle before the next boundary.
    for (int t = 0; t < kTiers; ++t)
      while (!arriving[t].empty() && !is_last(t, next[t]) && in_free[t] < finish) {
        const i32 use = position_of(t, next[t]), before = start_of(t, next[t]), g = gap_of(t, next[t]);
        if (use >= total + n || use > absolute + horizon) break;
        if (before >= absolute) break;  // still in use
        if (before >= 0 && left[g] < before / n) break;  // still on its way out
        if (!room.take_early(g, absolute, use)) break;
        in_free[t] = std::max(in_free[t], boundary) + p.bytes[s.gaps[g].object] * links.in[t];
        due[use] = std::max(due[use], in_free[t]);
        note_in(t, next[t]);
        ++next[t];
      }
    now = finish;
    if (position == n - 1 && step == kRead) timing.step_seconds = now - previous_end;
    room.after(position);
    for (i32 g : leaving[position]) {
      const int t = links.of(g);
      if (dirty[g]) {
        out_free[t] = std::max(out_free[t], now) + p.bytes[s.gaps[g].object] * links.out[t];
        queue[t].push_back({out_free[t], g, step});
      } else {
        room.leave(g);
        left[g] = step;
        if (out_end && step == kReadOut) out_end[g] = position + 1;
      }
    }
  }
  return timing;
}

// Gives stays addresses. They may not meet anybody between their first use and their last, and should
// not meet anybody who is still on the way out or already on the way in, for then one of the two waits.
//
// Whoever is there at the fullest position lies on a stack, in the order in which they come: what a
// step keeps until its turn is freed in the opposite order, so the room above the stack is one piece.
// All others come in the order of their first use, each where it waits the least.
class Stacking {
 public:
  Stacking(Stay* stays, i32 num_stays, i32 num_positions, i64 capacity, i32 fullest, double step_seconds, i32 taste)
      : stays_(stays), num_stays_(num_stays), n_(num_positions), capacity_(capacity), fullest_(fullest),
        step_(step_seconds), taste_(taste) {}

  // Returns the position at which somebody found no room, and how many bytes the largest piece lacks;
  // -1: all have an address.
  i32 run(i64& missing) {
    std::vector<i32> order(num_stays_);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](i32 a, i32 b) { return key(a) < key(b); });
    i64 top = 0;
    for (i32 stay : order) {
      Stay& it = stays_[stay];
      if (rank(stay) < 3) {
        it.offset = top;
        top += it.bytes;
        missing = top - capacity_;
        if (missing > 0) return it.start;
      } else if (!place(stay)) {
        return lacking(stay, missing);
      }
      placed_.push_back(stay);
    }
    return -1;
  }

 private:
  // Always there; there when a step begins; there when most is there; the rest.
  int rank(i32 stay) const {
    const Stay& it = stays_[stay];
    if (it.arrives == -2) return 0;
    if (it.end > n_) return 1;
    return it.start <= fullest_ && fullest_ < it.end ? 2 : 3;
  }
  std::tuple<int, i32, i32> key(i32 stay) const { return {rank(stay), stays_[stay].start, -stays_[stay].end}; }

  // The first position of a stay at which those who are there by then leave no piece that is large
  // enough.
  i32 lacking(i32 stay, i64& missing) const {
    const Stay& it = stays_[stay];
    std::vector<std::pair<i32, i32>> others;  // since when, and who
    for (i32 other : placed_)
      for (int around = -1; around <= 1; ++around) {
        const i32 start = stays_[other].start + around * n_, end = stays_[other].end + around * n_;
        if (start < it.end && it.start < end) others.push_back({std::max(start, it.start), other});
      }
    std::sort(others.begin(), others.end());
    std::map<i64, i64> pieces{{0, capacity_}};  // from, to
    for (auto [since, other] : others) {
      const i64 low = stays_[other].offset, high = low + stays_[other].bytes;
      auto piece = pieces.upper_bound(low);
      if (piece != pieces.begin()) --piece;
      while (piece != pieces.end() && piece->first < high) {
        const auto [from, to] = *piece;
        if (to <= low) {
          ++piece;
          continue;
        }
        piece = pieces.erase(piece);
        if (from < low) pieces[from] = low;
        if (to > high) piece = pieces.insert({high, to}).first;
      }
      i64 largest = 0;
      for (auto [from, to] : pieces) largest = std::max(largest, to - from);
      missing = it.bytes - largest;
      if (missing > 0) return since % n_;
    }
    missing = 1;
    return it.start;
  }

  bool place(i32 stay) {
    Stay& it = stays_[stay];
    struct Other { i64 low, high; double wait; };
    std::vector<Other> others;
    std::vector<std::pair<i64, i64>> blocked;
    for (i32 other : placed_) {
      const Stay& that = stays_[other];
      bool meets = false;
      double wait = 0;
      for (int around = -1; around <= 1; ++around) {
        const i32 start = that.start + around * n_, end = that.end + around * n_;
        if (start < it.end && it.start < end) meets = true;
        else if (end <= it.start) wait = std::max(wait, that.until + around * step_ - it.from);
        else wait = std::max(wait, it.until - that.from - around * step_);
      }
      if (meets || that.arrives == -2) blocked.push_back({that.offset, that.offset + that.bytes});
      else if (wait > 0) others.push_back({that.offset, that.offset + that.bytes, wait});
    }
    blocked.push_back({capacity_, capacity_});
    std::sort(blocked.begin(), blocked.end());
    double least = std::numeric_limits<double>::infinity();
    i64 best = -1, low = 0;
    for (auto [from, to] : blocked) {
      if (from - low >= it.bytes) {
        auto look = [&](i64 at) {
          if (at < low || at + it.bytes > from) return;
          double wait = 0;
          for (const Other& other : others)
            if (other.low < at + it.bytes && at < other.high) wait = std::max(wait, other.wait);
          const double tie = taste_ == 0 ? static_cast<double>(at)
                           : taste_ == 1 ? static_cast<double>(capacity_ - at)
                                         : static_cast<double>(from - low);
          const double cost = wait + 1e-9 * step_ * tie / static_cast<double>(capacity_);
          if (cost < least) least = cost, best = at;
        };
        look(low);
        look(from - it.bytes);
        for (const Other& other : others) look(other.high), look(other.low - it.bytes);
      }
      low = std::max(low, to);
    }
    it.offset = best;
    return best >= 0;
  }

  Stay* stays_;
  i32 num_stays_, n_;
  i64 capacity_;
  i32 fullest_;
  double step_;
  i32 taste_;
  std::vector<i32> placed_;
};

// Which tier each evicted gap goes to: the host first, for what moves much and stays there briefly.
// All gaps of an object go to one tier, for what is written once may come back often. What does not
// fit into `host_bytes` goes to the file.
void place_below(const Sequence& s, const std::uint8_t* evicted, i64 host_bytes, std::uint8_t* tier) {
  const Problem& p = s.problem;
  const i32 n = s.length;
  const auto dirty = dirty_gaps(s, evicted);
  struct Item { double worth; i32 object; };
  std::vector<Item> items;
  std::vector<std::vector<std::pair<i32, i32>>> spans(p.num_objects);  // of its copies below
  for (i32 object = 0; object < p.num_objects; ++object) {
    const i32 begin = s.first_gap[object], end = s.first_gap[object + 1];
    i32 moves = 0, first_dirty = -1;
    for (i32 g = begin; g < end; ++g)
      if (evicted[g]) {
        moves += s.gaps[g].start >= 0;
        moves += dirty[g];
        if (dirty[g] && first_dirty < 0) first_dirty = g;
      }
    auto& own = spans[object];
    bool any = false;
    for (i32 g = begin; g < end; ++g) any = any || evicted[g];
    if (!any) continue;
    if (first_dirty < 0) own.push_back({0, n});  // no step changes it: a copy for ever
    // A copy lasts from the gap in which it is written to the last gap before the next writing.
    for (i32 g = begin; g < end; ++g) {
      if (!evicted[g] || !dirty[g]) continue;
      i32 until = s.gaps[g].end + 1;
      i32 h = g + 1;
      for (; h < end && !(evicted[h] && dirty[h]); ++h)
        if (evicted[h]) until = s.gaps[h].end + 1;
      if (h == end && (p.flags[object] & kPersistent))
        for (h = begin; h < first_dirty; ++h)
          if (evicted[h]) until = s.gaps[h].end + n + 1;
      own.push_back({s.gaps[g].start + 1, std::min(until, s.gaps[g].start + 1 + n)});
    }
    i64 length = 0;
    for (auto [from, to] : own) length += to - from;
    items.push_back({static_cast<double>(moves) / static_cast<double>(std::max<i64>(length, 1)), object});
  }
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.worth > b.worth; });
  RangeMax taken(std::vector<i64>(n, 0));
  auto parts = [&](std::pair<i32, i32> interval, auto&& visit) {
    auto [from, to] = interval;
    if (from >= n) from -= n, to -= n;
    visit(from, std::min(to, n));
    visit(0, std::max(0, to - n));
  };
  for (const Item& item : items) {
    const i64 bytes = p.bytes[item.object];
    i64 most = 0;
    for (auto interval : spans[item.object]) {
      parts(interval, [&](i32 from, i32 to) { taken.add(from, to, bytes); });
      parts(interval, [&](i32 from, i32 to) { most = std::max(most, taken.max(from, to)); });
    }
    const bool fits = most <= host_bytes;
    if (!fits)
      for (auto interval : spans[item.object])
        parts(interval, [&](i32 from, i32 to) { taken.add(from, to, -bytes); });
    for (i32 g = s.first_gap[item.object]; g < s.first_gap[item.object + 1]; ++g) tier[g] = fits ? 0 : 1;
  }
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

i64 sequence_replay(const void* sequence, i64 capacity, const double* out_seconds_per_byte,
                    const double* in_seconds_per_byte, const std::uint8_t* tier, const std::uint8_t* evicted,
                    i32 horizon, i32* out_end, i32* in_start, double* starts, double* step_seconds) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  ByteRoom room(s, capacity, evicted);
  const Links links{{out_seconds_per_byte[0], out_seconds_per_byte[1]},
                    {in_seconds_per_byte[0], in_seconds_per_byte[1]}, tier};
  const auto timing = replay(s, links, evicted, horizon, room, out_end, in_start, starts);
  *step_seconds = timing.step_seconds;
  return timing.overflow;
}

// The same with addresses.
i64 sequence_replay_at(const void* sequence, const void* stays, i32 num_stays,
                       const double* out_seconds_per_byte, const double* in_seconds_per_byte,
                       const std::uint8_t* tier, const std::uint8_t* evicted, i32 horizon, i32* out_end,
                       i32* in_start, double* starts, double* step_seconds) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  AddressRoom room(s, static_cast<const Stay*>(stays), num_stays);
  const Links links{{out_seconds_per_byte[0], out_seconds_per_byte[1]},
                    {in_seconds_per_byte[0], in_seconds_per_byte[1]}, tier};
  const auto timing = replay(s, links, evicted, horizon, room, out_end, in_start, starts);
  room.clamp(in_start, out_end);
  *step_seconds = timing.step_seconds;
  return timing.overflow;
}

i32 stack(void* stays, i32 num_stays, i32 num_positions, i64 capacity, i32 fullest, double step_seconds,
          i32 taste, i64* missing) {
  return Stacking(static_cast<Stay*>(stays), num_stays, num_positions, capacity, fullest, step_seconds, taste).run(*missing);
}

void sequence_place_below(const void* sequence, const std::uint8_t* evicted, i64 host_bytes, std::uint8_t* tier) {
  place_below(*static_cast<const Sequence*>(sequence), evicted, host_bytes, tier);
}

}  // extern "C"
