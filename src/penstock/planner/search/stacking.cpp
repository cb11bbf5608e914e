// Addresses for stays.

namespace {

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

}  // namespace
