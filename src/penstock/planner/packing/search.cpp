// Branch and bound over canonical packings, in the spirit of MiniMalloc (Moffitt, ASPLOS 2023).
//
// In a packing where nothing can sink, every buffer rests on address zero or on another buffer.
// Such a packing is built by placing the buffers in the order of their offsets (ties by number),
// each at the lowest address above all that it overlaps and that is placed. So the search chooses
// only the next buffer. At each node
//   - a buffer that would lie below the last placed one cannot be next: it has to be raised first;
//   - a buffer that would lie so high that another one fits entirely below it need not be next;
//   - in every section the buffers that are not placed must still fit above their lowest addresses,
//     like jobs with release times on one machine;
//   - buffers that are not placed and share no moment any more are independent problems;
//   - a set of buffers with the same lowest addresses that failed before fails again.

namespace {

struct Fingerprint {
  uint64_t high = 0, low = 0;
  bool operator==(const Fingerprint& other) const { return high == other.high && low == other.low; }
};

uint64_t scramble(uint64_t x) {  // the finaliser of splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

enum class Verdict { kFound, kImpossible, kGaveUp };

class Search {
 public:
  // `order` gives the buffers their numbers: among equals the earlier one is tried first.
  Search(const Part& part, const std::vector<int>& order, Size capacity)
      : order_(order), capacity_(capacity), n_(part.count()), failed_(kTableSize) {
    std::vector<int> number(n_);
    for (int i = 0; i < n_; ++i) number[order[i]] = i;
    for (int i = 0; i < n_; ++i) {
      const int b = order[i];
      size_.push_back(part.size[b]);
      alignment_.push_back(part.alignment[b]);
      fixed_.push_back(part.fixed[b]);
      ranges_.push_back(part.ranges[b]);
      overlaps_.emplace_back();
      for (int other : part.overlaps[b]) overlaps_.back().push_back(number[other]);
      std::sort(overlaps_.back().begin(), overlaps_.back().end());
    }
    is_placed_.assign(n_, 0);
    offset_.assign(n_, 0);
    lowest_.assign(n_, 0);
    end_.assign(part.num_sections, 0);
    total_.assign(part.num_sections, 0);
    crossing_.assign(part.num_sections + 1, 0);
    obstacles_.resize(n_);
    for (int b = 0; b < n_; ++b) {
      if (fixed_[b] == kFree) continue;
      offset_[b] = fixed_[b];
      is_placed_[b] = 1;
      for (int other : overlaps_[b]) obstacles_[other].push_back({fixed_[b], fixed_[b] + size_[b]});
    }
    for (int b = 0; b < n_; ++b) {
      std::sort(obstacles_[b].begin(), obstacles_[b].end());
      lowest_[b] = raised(b, 0);
      if (is_placed_[b]) continue;
      all_.push_back(b);
      for (const Range& range : ranges_[b]) {
        for (int t = range.begin; t < range.end; ++t) total_[t] += size_[b];
      }
    }
  }

  Verdict run(int64_t max_nodes, const std::atomic<bool>& cancelled) {
    nodes_left_ = max_nodes;
    cancelled_ = &cancelled;
    aborted_ = false;
    sort_by_lowest(all_);
    if (!fits(all_, 0, -1)) return Verdict::kImpossible;
    const bool found = solve(all_, 0, -1);
    if (aborted_) return Verdict::kGaveUp;
    return found ? Verdict::kFound : Verdict::kImpossible;
  }

  int64_t num_nodes(int64_t max_nodes) const {
    return max_nodes - std::max<int64_t>(nodes_left_, 0);
  }

  Layout layout() const {
    Layout layout{std::vector<Size>(n_), 0};
    for (int i = 0; i < n_; ++i) {
      layout.offsets[order_[i]] = offset_[i];
      layout.height = std::max(layout.height, offset_[i] + size_[i]);
    }
    return layout;
  }

 private:
  struct Undo {
    int buffer;
    Size lowest;
  };
  static constexpr size_t kTableSize = 1 << 18;

  // The lowest address from `floor` on that the fixed buffers leave free.
  Size raised(int b, Size floor) const {
    Size offset = aligned(floor, alignment_[b]);
    for (const Taken& taken : obstacles_[b]) {
      if (offset + size_[b] <= taken.begin) break;
      if (offset < taken.end) offset = aligned(taken.end, alignment_[b]);
    }
    return offset;
  }

  bool is_blocked(int b, Size floor, int last) const {
    return lowest_[b] < floor || (lowest_[b] == floor && b < last);
  }

  bool is_before(int one, int other) const {
    return lowest_[one] != lowest_[other] ? lowest_[one] < lowest_[other] : one < other;
  }

  // By lowest address, then by number; the list is nearly sorted already.
  void sort_by_lowest(std::vector<int>& buffers) const {
    for (size_t i = 1; i < buffers.size(); ++i) {
      const int b = buffers[i];
      size_t j = i;
      for (; j > 0 && is_before(b, buffers[j - 1]); --j) buffers[j] = buffers[j - 1];
      buffers[j] = b;
    }
  }

  // Whether the buffers, sorted, could fit in each section, were sections independent.
  bool fits(const std::vector<int>& buffers, Size floor, int last) {
    by_lowest_.clear();
    for (int b : buffers) {
      Size lowest = std::max(lowest_[b], floor);
      if (is_blocked(b, floor, last)) {
        lowest = kNever;
        for (int other : overlaps_[b]) {
          if (is_placed_[other]) continue;
          lowest = std::min(lowest, std::max(lowest_[other], floor) + size_[other]);
        }
        if (lowest + size_[b] > capacity_) return false;
      }
      size_t i = by_lowest_.size();
      by_lowest_.emplace_back();
      for (; i > 0 && by_lowest_[i - 1].first > lowest; --i) by_lowest_[i] = by_lowest_[i - 1];
      by_lowest_[i] = {lowest, b};
      for (const Range& range : ranges_[b]) {
        std::fill(end_.begin() + range.begin, end_.begin() + range.end, 0);
      }
    }
    for (auto [lowest, b] : by_lowest_) {
      const Size size = size_[b];
      for (const Range& range : ranges_[b]) {
        Size highest = 0;
        for (int t = range.begin; t < range.end; ++t) {
          end_[t] = std::max(end_[t], lowest) + size;
          highest = std::max(highest, end_[t]);
        }
        if (highest > capacity_) return false;
      }
    }
    return true;
  }

  Fingerprint fingerprint(const std::vector<int>& buffers, Size floor, int last) const {
    Fingerprint state;
    for (int b : buffers) {
      const uint64_t key = (static_cast<uint64_t>(b) << 1) | is_blocked(b, floor, last);
      const uint64_t mixed = scramble(scramble(key) ^ static_cast<uint64_t>(lowest_[b]));
      state.high += mixed;
      state.low ^= scramble(mixed);
    }
    return state;
  }

  // Place the buffers, given that the last placed one is number `last` and lies at `floor`.
  bool solve(const std::vector<int>& buffers, Size floor, int last) {
    if (buffers.empty()) return true;
    const Fingerprint state = fingerprint(buffers, floor, last);
    Fingerprint& slot = failed_[state.low % kTableSize];
    if (slot == state) return false;

    Size ceiling = kNever;  // a buffer fits entirely below this address
    for (int b : buffers) ceiling = std::min(ceiling, lowest_[b] + size_[b]);
    std::vector<std::pair<Size, int>> candidates;
    for (int b : buffers) {
      if (lowest_[b] >= ceiling || is_blocked(b, floor, last)) continue;
      candidates.push_back({lowest_[b], b});
    }
    for (auto [offset, b] : candidates) {
      if (solve_with(buffers, b, offset)) return true;
      if (aborted_) return false;
    }
    slot = state;
    return false;
  }

  void place(int b, Size offset) {
    is_placed_[b] = 1;
    offset_[b] = offset;
    for (const Range& range : ranges_[b]) {
      for (int t = range.begin; t < range.end; ++t) total_[t] -= size_[b];
    }
  }

  void remove(int b) {
    is_placed_[b] = 0;
    for (const Range& range : ranges_[b]) {
      for (int t = range.begin; t < range.end; ++t) total_[t] += size_[b];
    }
  }

  bool solve_with(const std::vector<int>& buffers, int b, Size offset) {
    if (--nodes_left_ < 0 || cancelled_->load(std::memory_order_relaxed)) {
      aborted_ = true;
      return false;
    }
    for (const Range& range : ranges_[b]) {
      for (int t = range.begin; t < range.end; ++t) {
        if (offset + total_[t] > capacity_) return false;  // the rest there must lie above
      }
    }
    const size_t mark = trail_.size();
    place(b, offset);
    for (int other : overlaps_[b]) {
      if (is_placed_[other] || lowest_[other] >= offset + size_[b]) continue;
      trail_.push_back({other, lowest_[other]});
      lowest_[other] = raised(other, offset + size_[b]);
    }
    bool solved = true;
    std::vector<int> rest;
    rest.reserve(buffers.size());
    for (int other : buffers) {
      if (other != b) rest.push_back(other);
    }
    sort_by_lowest(rest);
    if (!fits(rest, offset, b)) {
      solved = false;
    } else {
      for (const std::vector<int>& part : independent(rest)) {
        if (!(solved = solve(part, offset, b))) break;
      }
    }
    if (!solved) {
      remove(b);
      while (trail_.size() > mark) {
        lowest_[trail_.back().buffer] = trail_.back().lowest;
        trail_.pop_back();
      }
      // Buffers that were solved in the other parts are not placed any more.
      for (int other : rest) {
        if (is_placed_[other]) remove(other);
      }
    }
    return solved;
  }

  // Split buffers where none of them crosses from one section to the next.
  std::vector<std::vector<int>> independent(const std::vector<int>& buffers) {
    std::vector<std::vector<int>> parts;
    if (buffers.empty()) return parts;
    int begin = static_cast<int>(end_.size()), end = 0;
    for (int b : buffers) {
      begin = std::min(begin, ranges_[b].front().begin);
      end = std::max(end, ranges_[b].back().end);
    }
    std::fill(crossing_.begin() + begin, crossing_.begin() + end + 1, 0);
    for (int b : buffers) {
      ++crossing_[ranges_[b].front().begin + 1];
      --crossing_[ranges_[b].back().end];
    }
    int number = 0, open = 0;
    for (int t = begin; t < end; ++t) {
      open += crossing_[t];
      if (open == 0 && t > begin) ++number;  // none lives on both sides of the start of t
      crossing_[t] = number;
    }
    if (number == 0) return {buffers};
    parts.resize(number + 1);
    for (int b : buffers) parts[crossing_[ranges_[b].front().begin]].push_back(b);
    std::erase_if(parts, [](const std::vector<int>& part) { return part.empty(); });
    // The one that is most likely to fail comes first.
    std::stable_sort(parts.begin(), parts.end(), [](const auto& one, const auto& other) {
      return one.size() < other.size();
    });
    return parts;
  }

  std::vector<int> order_;
  Size capacity_;
  int n_;
  std::vector<Size> size_, alignment_, fixed_;
  std::vector<std::vector<Range>> ranges_;
  std::vector<std::vector<int>> overlaps_;
  std::vector<std::vector<Taken>> obstacles_;

  std::vector<char> is_placed_;
  std::vector<Size> offset_, lowest_, end_, total_;
  std::vector<int> crossing_, all_;
  std::vector<Undo> trail_;
  std::vector<Fingerprint> failed_;  // states, by their low bits
  std::vector<std::pair<Size, int>> by_lowest_;
  int64_t nodes_left_ = 0;
  bool aborted_ = false;
  const std::atomic<bool>* cancelled_ = nullptr;
};

}  // namespace
