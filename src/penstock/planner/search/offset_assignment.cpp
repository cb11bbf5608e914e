// Offset assignment: addresses for intervals of objects on the device.

namespace {

// Assigns offsets to intervals. Two intervals at one address must not overlap between their first and
// last uses, and should not overlap with a transfer of the other, for then one of the two waits.
//
// Intervals at the fullest position lie on each other, in the order of their starts: values that a step
// keeps are freed in the opposite order, so the bytes above them are one piece. All others come in the
// order of their first use, each where it waits the least. Where an arena holds few large ones, these
// come first, and small ones are placed in between; or those at the fullest positions come first, while
// all addresses are free. The tiniest, which are most of all and take few bytes, share the lowest
// addresses.
class OffsetAssignment {
 public:
  // The choice among places with equal waits: the lowest, the highest, or in the smallest free piece; by
  // size the highest for large intervals and the lowest for small ones. With the fullest positions
  // first: in the smallest piece, or by size. AGAIN: what has an offset keeps it, and the others come by
  // their priorities, each in the smallest piece.
  enum Strategy : i32 { LOW, HIGH, TIGHT, BY_SIZE, FULLEST_TIGHT, FULLEST_BY_SIZE, AGAIN };
  // Parts of a step: about as many as intervals, so that an interval is noted in few of them.
  static constexpr i32 FEWEST_MOMENTS = 8, MOST_MOMENTS = 512;
  static constexpr i64 kTinyShare = 256;  // this part of the arena is for tiny intervals

  OffsetAssignment(Interval* intervals, i32 num_intervals, i32 num_positions, i64 capacity, i64 large_bytes, i32 fullest,
           double step_seconds, i32 strategy, const double* priority)
      : intervals_(intervals), num_intervals_(num_intervals), n_(num_positions), capacity_(capacity), large_bytes_(large_bytes),
        fullest_(fullest), step_(step_seconds), strategy_(strategy), priority_(priority), least_occupied_(find_least_occupied()),
        num_moments_(std::clamp(num_intervals, FEWEST_MOMENTS, MOST_MOMENTS)), resident_(num_moments_), beginning_(num_moments_),
        seen_(num_intervals, 0) {}

  // Returns for each position the bytes that its largest free piece lacks for an interval without a place.
  // Those are left out, so the others may wait less than they would.
  void run(i64* missing) {
    if (strategy_ == AGAIN) return run_again(missing);
    if (strategy_ >= FULLEST_TIGHT) note_fullness();
    for (i64 part = 1 << 12; part <= 1 << 20 && !reserve_tiny(capacity_ / part); part *= 4) {}
    std::vector<i32> order;
    for (i32 interval = 0; interval < num_intervals_; ++interval)
      if (!is_tiny(interval)) order.push_back(interval);
    std::vector<Key> keys;
    for (i32 interval = 0; interval < num_intervals_; ++interval) keys.push_back(key(interval));
    std::stable_sort(order.begin(), order.end(), [&](i32 a, i32 b) { return keys[a] < keys[b]; });
    i64 top = lowest_;
    for (i32 interval : order) {
      Interval& it = intervals_[interval];
      i32 position = it.start % n_;
      i64 shortage = 0;
      if (strategy_ < BY_SIZE && rank(interval) < 3) {
        shortage = std::max<i64>(top + it.bytes - capacity_, 0);
        it.offset = top;
        if (!shortage) top += it.bytes;
      } else if (!place(interval)) {
        std::tie(position, shortage) = find_shortage(interval);
      }
      if (shortage) {
        missing[position] = std::max(missing[position], shortage);
      } else {
        put(interval);
      }
    }
  }

  // Does the same for the intervals that have no offset yet.
  void run_again(i64* missing) {
    std::vector<i32> order;
    for (i32 interval = 0; interval < num_intervals_; ++interval) {
      if (intervals_[interval].offset < 0) order.push_back(interval);
      else put(interval);
    }
    std::stable_sort(order.begin(), order.end(), [&](i32 a, i32 b) { return priority_[a] > priority_[b]; });
    for (i32 interval : order) {
      if (place(interval)) put(interval);
      else missing[intervals_[interval].start % n_] = 1;
    }
  }

 private:
  // 0: always resident; 1: when a step begins; 2: at the fullest position; 3: the rest. By size, steps
  // begin when the fewest bytes are resident.
  int rank(i32 interval) const {
    const Interval& it = intervals_[interval];
    if (it.arrives == -2) return 0;
    if (strategy_ == BY_SIZE) return since_least_occupied(it) + it.until - it.from > step_ ? 1 : 3;
    if (it.end > n_) return 1;
    return it.start <= fullest_ && fullest_ < it.end ? 2 : 3;
  }
  // By size: tiny ones, then large ones, then the others by the power of two of their bytes. So
  // intervals of similar sizes share few places, which no smaller one has cut in two.
  int size(i32 interval) const {
    if (strategy_ != BY_SIZE) return 0;
    const i64 bytes = intervals_[interval].bytes;
    if (bytes < large_bytes_ / 64) return -2;
    return bytes < large_bytes_ ? std::ilogb(static_cast<double>(large_bytes_) / bytes) : -1;
  }
  // By size, in the order of their transfers: equal ones then need no more places than are resident at
  // once.
  using Key = std::tuple<int, int, double, i32, i32>;
  Key key(i32 interval) const {
    const Interval& it = intervals_[interval];
    if (strategy_ >= FULLEST_TIGHT) return {it.bytes < large_bytes_ / 64 ? -1 : 0, 0, -fullness_[interval] - (priority_ ? priority_[interval] : 0), 0, it.start};
    const double earlier = priority_ ? priority_[interval] * step_ : 0;
    return {size(interval), rank(interval), strategy_ == BY_SIZE ? since_least_occupied(it) - earlier : 0, it.start, -it.end};
  }
  bool is_tiny(i32 interval) const { return intervals_[interval].bytes <= tiny_bytes_; }
  // Assigns addresses from 0 on to the tiny intervals, each the lowest that is free from the start of its
  // transfer in to the end of its transfer out; none counts as tiny if together they take more than a
  // small part of the arena.
  bool reserve_tiny(i64 tiny_bytes) {
    tiny_bytes_ = tiny_bytes;
    lowest_ = 0;
    const i64 most = capacity_ / kTinyShare;
    struct Begin { double from, until; i32 start, interval; };
    std::vector<Begin> begins;
    for (i32 interval = 0; interval < num_intervals_; ++interval) {
      if (!is_tiny(interval)) continue;
      Interval& it = intervals_[interval];
      const double from = it.from - std::floor(it.from / step_) * step_, until = from + it.until - it.from;
      if (it.end <= n_ && it.until - it.from < step_ && until < step_) {
        begins.push_back({from, until, it.start, interval});
      } else {  // resident when a step begins and when it ends
        it.offset = lowest_;
        lowest_ += it.bytes;
      }
    }
    std::sort(begins.begin(), begins.end(), [](const Begin& a, const Begin& b) {
      return std::tie(a.from, a.start, a.interval) < std::tie(b.from, b.start, b.interval);
    });
    std::map<i64, i64> free{{lowest_, most}};  // pieces: from, to
    std::priority_queue<std::pair<double, i32>, std::vector<std::pair<double, i32>>, std::greater<>> there;
    bool fits = lowest_ <= most;
    for (const Begin& next : begins) {
      while (!there.empty() && there.top().first <= next.from) {
        const Interval& gone = intervals_[there.top().second];
        if (gone.end > next.start) break;  // operators in between take no time
        there.pop();
        i64 low = gone.offset, high = low + gone.bytes;
        auto after = free.lower_bound(low);
        if (after != free.end() && after->first == high) high = after->second, after = free.erase(after);
        if (after != free.begin() && std::prev(after)->second == low) low = std::prev(after)->first;
        free[low] = high;
      }
      Interval& it = intervals_[next.interval];
      auto piece = free.begin();
      while (piece != free.end() && piece->second - piece->first < it.bytes) ++piece;
      if (!(fits = fits && piece != free.end())) break;
      it.offset = piece->first;
      lowest_ = std::max(lowest_, it.offset + it.bytes);
      const i64 to = piece->second;
      free.erase(piece);
      if (it.offset + it.bytes < to) free[it.offset + it.bytes] = to;
      there.push({next.until, next.interval});
    }
    if (!fits) tiny_bytes_ = -1, lowest_ = 0;
    return fits;
  }
  // For each interval the share of the arena that is occupied at the fullest of its positions, in steps,
  // so that nearly equal ones count as equal; of equal ones the larger interval comes first.
  void note_fullness() {
    constexpr double steps = 16;
    std::vector<std::vector<i64>> most(1, std::vector<i64>(n_, 0));  // in 2^k positions from each on
    std::vector<i64> change(2 * n_ + 1, 0);
    for (i32 interval = 0; interval < num_intervals_; ++interval)
      change[intervals_[interval].start] += intervals_[interval].bytes, change[intervals_[interval].end] -= intervals_[interval].bytes;
    i64 there = 0;
    for (i32 p = 0; p < 2 * n_; ++p) most[0][p % n_] += there += change[p];
    for (i32 half = 1; 2 * half <= n_; half *= 2) {
      std::vector<i64> next(n_, 0);
      for (i32 p = 0; p + 2 * half <= n_; ++p) next[p] = std::max(most.back()[p], most.back()[p + half]);
      most.push_back(std::move(next));
    }
    auto between = [&](i32 from, i32 to) {
      if (from >= to) return i64{0};
      const i32 k = std::ilogb(to - from);
      return std::max(most[k][from], most[k][to - (1 << k)]);
    };
    fullness_.resize(num_intervals_);
    for (i32 interval = 0; interval < num_intervals_; ++interval) {
      const Interval& it = intervals_[interval];
      const i32 start = it.start % n_, end = start + std::min(it.end - it.start, n_);
      const auto bytes = static_cast<double>(std::max(between(start, std::min(end, n_)), between(0, end - n_)));
      fullness_[interval] = std::floor(steps * bytes / capacity_) / steps + 1e-3 * it.bytes / capacity_;
    }
  }
  double since_least_occupied(const Interval& it) const {
    const double since = std::fmod(it.from - least_occupied_, step_);
    return since < 0 ? since + step_ : since;
  }
  // The time at which the fewest bytes of large intervals are resident, in seconds since a step began.
  double find_least_occupied() const {
    std::vector<std::pair<double, i64>> changes{{0, 0}};
    for (i32 interval = 0; interval < num_intervals_; ++interval) {
      const Interval& it = intervals_[interval];
      if (it.arrives == -2 || it.bytes < large_bytes_ || it.until - it.from >= step_) continue;
      const double from = it.from - std::floor(it.from / step_) * step_, until = from + it.until - it.from;
      changes.push_back({from, it.bytes});
      changes.push_back({until < step_ ? until : until - step_, -it.bytes});
      if (until >= step_) changes.push_back({0, it.bytes});
    }
    std::sort(changes.begin(), changes.end());
    i64 there = 0, least = std::numeric_limits<i64>::max();
    double when = 0;
    for (std::size_t k = 0; k < changes.size(); ++k) {
      there += changes[k].second;
      const bool is_last = k + 1 == changes.size() || changes[k + 1].first > changes[k].first;
      if (is_last && there < least) least = there, when = changes[k].first;
    }
    return when;
  }
  // The first position of an interval at which those placed before leave no piece that is large enough,
  // and the bytes that the largest one lacks.
  std::pair<i32, i64> find_shortage(i32 interval) const {
    const Interval& it = intervals_[interval];
    std::vector<std::pair<i32, i32>> others;  // start, interval
    for (i32 other : placed_)
      for (int around = -1; around <= 1; ++around) {
        const i32 start = intervals_[other].start + around * n_, end = intervals_[other].end + around * n_;
        if (start < it.end && it.start < end) others.push_back({std::max(start, it.start), other});
      }
    std::sort(others.begin(), others.end());
    std::map<i64, i64> pieces{{lowest_, capacity_}};  // from, to
    for (auto [since, other] : others) {
      const i64 low = intervals_[other].offset, high = low + intervals_[other].bytes;
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
      if (largest < it.bytes) return {since % n_, it.bytes - largest};
    }
    return {it.start % n_, 1};
  }

  void put(i32 interval) {
    const Interval& it = intervals_[interval];
    placed_.push_back(interval);
    if (it.arrives == -2) {
      if (always_.empty() || always_.back().second != it.offset) always_.push_back({it.offset, it.offset});
      always_.back().second += it.bytes;
    } else if (is_long(it)) {
      long_.push_back(interval);
    } else {
      for_each_moment(it, [&](i32 moment, bool is_first) {
        resident_[moment].push_back(interval);
        if (is_first) beginning_[moment].push_back(interval);
      });
    }
  }

  // A superset of the intervals, but for those that are always resident, that overlap with an interval
  // or its transfers.
  const std::vector<i32>& around(i32 interval) {
    if (intervals_[interval].arrives == -2 || is_long(intervals_[interval])) {
      near_.clear();
      for (i32 other : placed_)
        if (intervals_[other].arrives != -2) near_.push_back(other);
      return near_;
    }
    near_ = long_;
    ++round_;
    for_each_moment(intervals_[interval], [&](i32 moment, bool is_first) {
      for (i32 other : is_first ? resident_[moment] : beginning_[moment])
        if (seen_[other] != round_) seen_[other] = round_, near_.push_back(other);
    });
    return near_;
  }

  bool is_long(const Interval& it) const { return !(it.until - it.from < step_ * (1 - 1.0 / num_moments_)); }

  // Visits the parts of a step that an interval overlaps, its transfers included.
  template <class Visit>
  void for_each_moment(const Interval& it, Visit visit) const {
    const double part = step_ / num_moments_;
    const i64 first = static_cast<i64>(std::floor(it.from / part));
    const i64 last = static_cast<i64>(std::floor(it.until / part));
    for (i64 moment = first; moment <= last; ++moment)
      visit(static_cast<i32>((moment % num_moments_ + num_moments_) % num_moments_), moment == first);
  }

  // A place that may be used, after a wait.
  struct Other { i64 low, high; double wait; };

  // The longest wait for any of a range of addresses: maxima over 2^k parts between places' ends.
  class LongestWait {
   public:
    // `others` are sorted by their waits, the longest first.
    void note(const std::vector<Other>& others) {
      ends_.clear();
      for (const Other& other : others) ends_.push_back(other.low), ends_.push_back(other.high);
      std::sort(ends_.begin(), ends_.end());
      ends_.erase(std::unique(ends_.begin(), ends_.end()), ends_.end());
      const std::size_t count = ends_.empty() ? 0 : ends_.size() - 1;
      if (most_.empty()) most_.resize(1);
      most_[0].assign(count, 0.0);
      next_.resize(count + 1);  // part that no longer wait was noted for, from each on
      std::iota(next_.begin(), next_.end(), 0);
      for (const Other& other : others) {
        const std::size_t last = index(other.high);
        for (std::size_t part = find(index(other.low)); part < last; part = find(part)) {
          most_[0][part] = other.wait;
          next_[part] = static_cast<i32>(part) + 1;
        }
      }
      std::size_t level = 1;
      for (std::size_t half = 1; 2 * half <= count; half *= 2, ++level) {
        if (most_.size() <= level) most_.resize(level + 1);
        most_[level].resize(count - 2 * half + 1);
        for (std::size_t p = 0; p + 2 * half <= count; ++p)
          most_[level][p] = std::max(most_[level - 1][p], most_[level - 1][p + half]);
      }
    }
    double between(i64 low, i64 high) const {
      if (ends_.empty() || high <= ends_.front() || low >= ends_.back()) return 0;
      const std::size_t from = low <= ends_.front() ? 0 : static_cast<std::size_t>(
          std::upper_bound(ends_.begin(), ends_.end(), low) - ends_.begin() - 1);
      const std::size_t to = std::min(index(high), ends_.size() - 1);
      const int level = std::ilogb(static_cast<double>(to - from));
      return std::max(most_[level][from], most_[level][to - (std::size_t{1} << level)]);
    }

   private:
    std::size_t index(i64 address) const {  // of the first end that is not below
      return static_cast<std::size_t>(std::lower_bound(ends_.begin(), ends_.end(), address) - ends_.begin());
    }
    std::size_t find(std::size_t part) {
      while (next_[part] != static_cast<i32>(part)) {
        next_[part] = next_[next_[part]];
        part = static_cast<std::size_t>(next_[part]);
      }
      return part;
    }
    std::vector<i64> ends_;
    std::vector<std::vector<double>> most_;
    std::vector<i32> next_;
  };

  bool place(i32 interval) {
    Interval& it = intervals_[interval];
    std::vector<Other> others;
    std::vector<std::pair<i64, i64>> blocked = always_;
    for (i32 other : around(interval)) {
      const Interval& that = intervals_[other];
      bool overlaps = false;
      double wait = 0;
      for (int around = -1; around <= 1; ++around) {
        const i32 start = that.start + around * n_, end = that.end + around * n_;
        if (start < it.end && it.start < end) overlaps = true;
        else if (end <= it.start) wait = std::max(wait, that.until + around * step_ - it.from);
        else wait = std::max(wait, it.until - that.from - around * step_);
      }
      if (overlaps) blocked.push_back({that.offset, that.offset + that.bytes});
      else if (wait > 0) others.push_back({that.offset, that.offset + that.bytes, wait});
    }
    blocked.push_back({capacity_, capacity_});
    std::sort(blocked.begin(), blocked.end());
    // The longest wait first, as `LongestWait` requires.
    std::sort(others.begin(), others.end(), [](const Other& a, const Other& b) { return a.wait > b.wait; });
    longest_wait_.note(others);
    std::vector<i64> ends;  // offsets next to a place with a wait
    for (const Other& other : others) ends.push_back(other.high), ends.push_back(other.low - it.bytes);
    std::sort(ends.begin(), ends.end());
    ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
    double least = std::numeric_limits<double>::infinity();
    i64 best = -1, low = lowest_;
    for (auto [from, to] : blocked) {
      if (from - low >= it.bytes) {
        auto look = [&](i64 at) {
          const bool by_size = strategy_ == BY_SIZE || strategy_ == FULLEST_BY_SIZE;
          const bool tight = strategy_ == TIGHT || strategy_ == FULLEST_TIGHT || strategy_ == AGAIN;
          const bool low_first = strategy_ == LOW || (by_size && it.bytes < large_bytes_);
          const double tie = static_cast<double>(low_first ? at : tight ? from - low : capacity_ - at);
          double cost = 1e-9 * step_ * tie / static_cast<double>(capacity_);
          if (cost >= least) return;
          cost += longest_wait_.between(at, at + it.bytes);
          if (cost < least) least = cost, best = at;
        };
        look(low);
        look(from - it.bytes);
        for (auto end = std::lower_bound(ends.begin(), ends.end(), low); end != ends.end() && *end + it.bytes <= from; ++end)
          look(*end);
      }
      low = std::max(low, to);
    }
    it.offset = best;
    return best >= 0;
  }

  Interval* intervals_;
  i32 num_intervals_, n_;
  i64 capacity_, large_bytes_, tiny_bytes_ = -1, lowest_ = 0;  // the lowest address above the tiny ones
  i32 fullest_;
  double step_;
  i32 strategy_;
  const double* priority_;  // of each interval: added to its fullness; may be null
  double least_occupied_;
  i32 num_moments_;
  std::vector<double> fullness_;
  std::vector<i32> placed_;
  // Placed intervals by part of the step, and by their first part; those of a whole step; the addresses
  // of those that are always resident.
  std::vector<std::vector<i32>> resident_, beginning_;
  std::vector<i32> long_;
  std::vector<std::pair<i64, i64>> always_;
  LongestWait longest_wait_;
  std::vector<i32> seen_, near_;
  i32 round_ = 0;
};

}  // namespace
