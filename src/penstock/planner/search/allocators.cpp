// Allocators of the replay: by bytes, or by addresses.

namespace {

struct Timing {
  double step_seconds = 0;
  i64 overflow = 0;
};

constexpr int kTiers = 2;  // below the device: the host, and the file

// The links to the tiers below, each with a queue of its own in either direction.
struct Links {
  double out[kTiers], in[kTiers];  // seconds per byte
  const std::uint8_t* tier;        // of each hole; null: all go to the first
  Links(const double* seconds_per_byte, const std::uint8_t* tier_of) : tier(tier_of) {
    std::copy_n(seconds_per_byte, kTiers, out);
    std::copy_n(seconds_per_byte + kTiers, kTiers, in);
  }
  i32 of(i32 hole) const { return tier ? tier[hole] : 0; }
};

// Allocates by bytes, wherever these may lie.
class ByteAllocator {
 public:
  static constexpr int kSteps = 3, kRead = 2, kReadOut = 1;  // steps replayed; those that times are read from
  static constexpr bool kStopsWhenFull = false;
  ByteAllocator(const Sequence& s, i64 capacity, const std::uint8_t* evicted)
      : s_(s), capacity_(capacity), full_until_(s.holes.size(), -1) {
    std::vector<i64> live(s.base);
    Changes released(s.length);
    for (i32 g = 0; g < static_cast<i32>(s.holes.size()); ++g) {
      const Hole& hole = s.holes[g];
      const i64 bytes = s.problem.bytes[hole.object];
      if (!evicted[g]) {
        if (hole.end >= s.length || hole.start < 0) used_ += bytes;  // there when a step begins
        continue;
      }
      released.add(s, hole, -bytes);
    }
    released.apply(live);
    for (i32 step = 0; step <= kSteps; ++step) committed_.insert(committed_.end(), live.begin(), live.end());
    most_.resize(committed_.size() / kBlock + 1, 0);
    more_.resize(most_.size(), 0);
    for (size_t block = 0; block < most_.size(); ++block) note_most(static_cast<i32>(block));
  }
  void begin(i32 position) { need_ = s_.created[position] - s_.reused[position]; }
  void add_arrival(i32 hole) { need_ += bytes(hole); }
  bool fits() const { return used_ + need_ <= capacity_; }
  i64 allocate() {
    used_ += need_;
    return used_ - capacity_;
  }
  // Allocates for a hole's object that comes back for `use`, if it fits up to there; positions are
  // counted over all steps.
  bool allocate_early(i32 hole, i32 absolute, i32 use) {
    const i64 more = bytes(hole);
    // Committed bytes at a position only grow.
    if (used_ + more > capacity_ || absolute <= full_until_[hole]) return false;
    full_until_[hole] = last_above(capacity_ - more, absolute, use);
    if (full_until_[hole] >= absolute) return false;
    add_committed(absolute, use, more);
    used_ += more;
    return true;
  }
  void release(i32 hole) { used_ -= bytes(hole); }
  void end_position(i32 position) {
    for (i32 object : s_.dying[position])
      if (object != s_.reused_from[position]) used_ -= s_.problem.bytes[object];
    if (position != s_.length - 1) return;
    for (i32 object = 0; object < s_.problem.num_objects; ++object)
      if ((s_.problem.flags[object] & kKept) && !(s_.problem.flags[object] & kPersistent))
        used_ -= s_.problem.bytes[object];
  }

 private:
  static constexpr i32 kBlock = 64;  // positions
  i64 bytes(i32 hole) const { return s_.problem.bytes[s_.holes[hole].object]; }
  // The last position of [from, to) at which more bytes than `limit` are committed; -1 if there is none.
  i32 last_above(i64 limit, i32 from, i32 to) const {
    for (i32 q = to - 1; q >= from;) {
      const i32 block = q / kBlock, first = std::max(from, block * kBlock);
      if (most_[block] > limit)
        for (; q >= first; --q)
          if (committed_[q] + more_[block] > limit) return q;
      q = first - 1;
    }
    return -1;
  }
  void add_committed(i32 from, i32 to, i64 more) {
    while (from < to) {
      const i32 block = from / kBlock, end = std::min(to, (block + 1) * kBlock);
      if (end - from == kBlock) {
        more_[block] += more;
        most_[block] += more;
      } else {
        for (i32 q = from; q < end; ++q) committed_[q] += more;
        note_most(block);
      }
      from = end;
    }
  }
  void note_most(i32 block) {
    const size_t end = std::min<size_t>((block + 1) * kBlock, committed_.size());
    most_[block] = 0;
    for (size_t q = block * kBlock; q < end; ++q) most_[block] = std::max(most_[block], committed_[q] + more_[block]);
  }
  const Sequence& s_;
  i64 capacity_, used_ = 0, need_ = 0;
  // Live and prefetched bytes by position, less those that all positions of a block have in common;
  // these; the maximum of each block; and the position up to which each hole's object does not fit.
  std::vector<i64> committed_, more_, most_;
  std::vector<i32> full_until_;
};

// An object, or several of which each reuses the place of the one before, at one address.
struct Interval {
  i64 offset, bytes;
  double from, until;  // seconds from which its place is occupied, and free again, if no transfer waits
  i32 start, end;  // from the first use to behind the last; an end beyond the step is in the next
  i32 arrives;     // hole after which it comes back; -1: made there, -2: there already
  i32 leaves;      // hole in which it leaves; -1: it is not needed any more, -2: it never ends
};

// Allocates by addresses: an interval waits until all earlier ones at its addresses have ended.
class AddressAllocator {
 public:
  static constexpr int kSteps = 4, kRead = 2, kReadOut = 2;
  static constexpr bool kStopsWhenFull = true;
  AddressAllocator(const Sequence& s, const Interval* intervals, i32 num_intervals)
      : s_(s), intervals_(intervals), num_intervals_(num_intervals), successors_(num_intervals), num_before_(num_intervals, 0),
        ended_(num_intervals, 0), made_(s.length), dying_(s.length), arriving_(s.holes.size(), -1),
        leaving_(s.holes.size(), -1) {
    std::vector<i32> by_start(num_intervals);
    std::iota(by_start.begin(), by_start.end(), 0);
    std::stable_sort(by_start.begin(), by_start.end(), [&](i32 a, i32 b) { return intervals[a].start < intervals[b].start; });
    for (i32 round = 0; round < 2; ++round)
      for (i32 interval : by_start) put(interval, round);
    for (i32 interval = 0; interval < num_intervals; ++interval) {
      const Interval& it = intervals[interval];
      if (it.arrives >= 0) arriving_[it.arrives] = interval;
      if (it.arrives == -1) made_[it.start].push_back(interval);
      if (it.leaves >= 0) leaving_[it.leaves] = interval;
      if (it.leaves == -1) dying_[(it.end - 1) % s.length].push_back(interval);
    }
  }
  void begin(i32 position) { needed_ = made_[position]; }
  void add_arrival(i32 hole) { needed_.push_back(arriving_[hole]); }
  bool fits() const {
    return std::all_of(needed_.begin(), needed_.end(), [&](i32 interval) { return is_free(interval); });
  }
  i64 allocate() {
    i64 missing = 0;
    for (i32 interval : needed_) {
      if (!is_free(interval)) missing += intervals_[interval].bytes;
      ended_[interval] -= num_before_[interval];
    }
    return missing;
  }
  bool allocate_early(i32 hole, i32, i32) {
    const i32 interval = arriving_[hole];
    if (!is_free(interval)) return false;
    ended_[interval] -= num_before_[interval];
    return true;
  }
  void release(i32 hole) { end(leaving_[hole]); }
  void end_position(i32 position) {
    for (i32 interval : dying_[position]) end(interval);
  }
  // Ends transfers out by the start of the next interval at their addresses, in all steps.
  void clamp(const i32* in_start, i32* out_end) const {
    const i32 n = s_.length;
    for (i32 before = 0; before < num_intervals_; ++before) {
      const Interval& it = intervals_[before];
      if (it.leaves < 0) continue;
      const i32 around = it.end - 1 >= n ? n : 0;
      for (auto [after, next_step] : successors_[before]) {
        const i32 start = intervals_[after].arrives >= 0 ? in_start[intervals_[after].arrives] : intervals_[after].start;
        out_end[it.leaves] = std::min(out_end[it.leaves], start + (next_step ? n : 0) - around);
      }
    }
  }

 private:
  bool is_free(i32 interval) const { return ended_[interval] >= num_before_[interval]; }
  void end(i32 interval) {
    for (auto [after, next_step] : successors_[interval]) ++ended_[after];
  }
  // Notes the intervals before one at its addresses; the second round sees those of the step before too.
  void put(i32 interval, i32 round) {
    const Interval& it = intervals_[interval];
    const i64 low = it.offset, high = it.offset + it.bytes;
    auto at = last_.upper_bound(low);
    if (at != last_.begin() && std::prev(at)->second.high > low) --at;
    std::vector<i32> before;
    while (at != last_.end() && at->first < high) {
      const i64 first = at->first;
      const Piece piece = at->second;
      at = last_.erase(at);
      if (first < low) last_[first] = {low, piece.interval, piece.round};
      if (piece.high > high) at = last_.insert({high, {piece.high, piece.interval, piece.round}}).first;
      if (round == 0 || piece.interval == interval) continue;
      if (std::find(before.begin(), before.end(), piece.interval) != before.end()) continue;
      before.push_back(piece.interval);
      const bool next_step = piece.round < round;
      successors_[piece.interval].push_back({interval, next_step});
      ++num_before_[interval];
      if (next_step && intervals_[piece.interval].end <= s_.length) ++ended_[interval];
    }
    last_[low] = {high, interval, round};
  }
  struct Piece { i64 high; i32 interval, round; };
  const Sequence& s_;
  const Interval* intervals_;
  i32 num_intervals_;
  std::vector<std::vector<std::pair<i32, bool>>> successors_;  // and whether in the next step
  std::vector<i32> num_before_, ended_;
  std::vector<std::vector<i32>> made_, dying_;  // by position
  std::vector<i32> arriving_, leaving_;         // interval by hole
  std::vector<i32> needed_;
  std::map<i64, Piece> last_;  // by first address
};

}  // namespace
