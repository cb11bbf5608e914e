// What it means that there is room: enough bytes, or a free address.

namespace {

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
      : s_(s), capacity_(capacity), full_until_(s.gaps.size(), -1) {
    std::vector<i64> live(s.base);
    Changes released(s.length);
    for (i32 g = 0; g < static_cast<i32>(s.gaps.size()); ++g) {
      const Gap& gap = s.gaps[g];
      const i64 bytes = s.problem.bytes[gap.object];
      if (!evicted[g]) {
        if (gap.end >= s.length || gap.start < 0) used_ += bytes;  // there when a step begins
        continue;
      }
      released.add(s, gap, -bytes);
    }
    released.apply(live);
    for (i32 step = 0; step <= kSteps; ++step) certain_.insert(certain_.end(), live.begin(), live.end());
    most_.resize(certain_.size() / kBlock + 1, 0);
    more_.resize(most_.size(), 0);
    for (size_t block = 0; block < most_.size(); ++block) note_most(static_cast<i32>(block));
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
    // What is certain at a position only grows.
    if (used_ + more > capacity_ || absolute <= full_until_[gap]) return false;
    full_until_[gap] = last_above(capacity_ - more, absolute, use);
    if (full_until_[gap] >= absolute) return false;
    add_certain(absolute, use, more);
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
  static constexpr i32 kBlock = 64;  // positions
  i64 bytes(i32 gap) const { return s_.problem.bytes[s_.gaps[gap].object]; }
  // The last position of [from, to) at which more is certain than `limit`; -1 if there is none.
  i32 last_above(i64 limit, i32 from, i32 to) const {
    for (i32 q = to - 1; q >= from;) {
      const i32 block = q / kBlock, first = std::max(from, block * kBlock);
      if (most_[block] > limit)
        for (; q >= first; --q)
          if (certain_[q] + more_[block] > limit) return q;
      q = first - 1;
    }
    return -1;
  }
  void add_certain(i32 from, i32 to, i64 more) {
    while (from < to) {
      const i32 block = from / kBlock, end = std::min(to, (block + 1) * kBlock);
      if (end - from == kBlock) {
        more_[block] += more;
        most_[block] += more;
      } else {
        for (i32 q = from; q < end; ++q) certain_[q] += more;
        note_most(block);
      }
      from = end;
    }
  }
  void note_most(i32 block) {
    const size_t end = std::min<size_t>((block + 1) * kBlock, certain_.size());
    most_[block] = 0;
    for (size_t q = block * kBlock; q < end; ++q) most_[block] = std::max(most_[block], certain_[q] + more_[block]);
  }
  const Sequence& s_;
  i64 capacity_, used_ = 0, need_ = 0;
  // Live bytes by position, with what was fetched ahead, less what all positions of a block have more;
  // the most of each block; and until when each gap's object cannot come.
  std::vector<i64> certain_, more_, most_;
  std::vector<i32> full_until_;
};

// An object, or several of which each takes over the room of the one before, at one address.
struct Stay {
  i64 offset, bytes;
  double from, until;  // when it needs its room, so that nothing waits, and when that is free again
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

}  // namespace
