// First fit and best fit along a given order: the fast part of the packer.
//
// The buffers take turns. Each goes to the lowest free place (first fit) or into the tightest free piece
// (best fit) among those that are placed already and are live at some time with it.

namespace {

enum class Fit { kFirst, kBest };

struct Taken {
  Size begin, end;
  bool operator<(const Taken& other) const { return begin < other.begin; }
};

// The placed buffers, so that those that share a moment with a given one are found quickly. Time is
// cut into equal slices, each with its placed spans in the order of their addresses; so a buffer that
// lives within one slice, as most buffers of a long program do, needs no sorting. For longer ones the
// spans that begin in later slices are in lists of their own.
class Placed {
 public:
  explicit Placed(const Part& part)
      : part_(part),
        num_slices_(std::clamp(part.count() / 200, 1, std::min(256, part.num_sections))),
        slices_(num_slices_),
        beginning_(num_slices_) {}

  void clear() {
    for (int s = 0; s < num_slices_; ++s) slices_[s].clear(), beginning_[s].clear();
  }

  void add(int buffer, Size offset) {
    for (const Range& range : part_.ranges[buffer]) {
      const Entry entry{offset, offset + part_.size[buffer], range};
      beginning_[slice_of(range.begin)].push_back(entry);
      for (int s = slice_of(range.begin); s <= slice_of(range.end - 1); ++s) {
        const auto place = std::upper_bound(
            slices_[s].begin(), slices_[s].end(), entry,
            [](const Entry& one, const Entry& other) { return one.begin < other.begin; });
        slices_[s].insert(place, entry);
      }
    }
  }

  // The addresses that are taken at some moment of the buffer's life, ascending.
  void beside(int buffer, std::vector<Taken>& taken) const {
    taken.clear();
    int num_lists = 0;
    for (const Range& range : part_.ranges[buffer]) {
      const int first = slice_of(range.begin), last = slice_of(range.end - 1);
      for (int s = first; s <= last; ++s, ++num_lists) {
        for (const Entry& entry : s == first ? slices_[s] : beginning_[s]) {
          if (entry.range.begin >= range.end || entry.range.end <= range.begin) continue;
          taken.push_back({entry.begin, entry.end});
        }
      }
    }
    if (num_lists > 1) std::sort(taken.begin(), taken.end());
  }

 private:
  struct Entry {
    Size begin, end;
    Range range;
  };

  int slice_of(int section) const {
    return static_cast<int>(int64_t{section} * num_slices_ / part_.num_sections);
  }

  const Part& part_;
  int num_slices_;
  std::vector<std::vector<Entry>> slices_, beginning_;
};

// The place of a buffer beside the sorted address ranges that are taken.
Size place(const std::vector<Taken>& taken, Size size, Size alignment, Fit fit) {
  Size from = 0, best = -1, best_room = kNever;
  for (const Taken& range : taken) {
    const Size offset = aligned(from, alignment);
    if (offset + size <= range.begin && range.begin - offset < best_room) {
      best = offset;
      best_room = range.begin - offset;
      if (fit == Fit::kFirst) return best;
    }
    from = std::max(from, range.end);
  }
  return best >= 0 ? best : aligned(from, alignment);
}

// Pack along `order`; gives up as soon as something would end above `limit`.
Layout fit_along(const Part& part, const std::vector<int>& order, Fit fit, Size limit,
                 Placed& placed) {
  Layout layout{std::vector<Size>(part.count(), 0), 0};
  std::vector<Taken> taken;
  placed.clear();
  for (int b = 0; b < part.count(); ++b) {
    if (part.fixed[b] == kFree) continue;
    layout.offsets[b] = part.fixed[b];
    layout.height = std::max(layout.height, part.fixed[b] + part.size[b]);
    placed.add(b, layout.offsets[b]);
  }
  for (int b : order) {
    if (part.fixed[b] != kFree) continue;
    placed.beside(b, taken);
    layout.offsets[b] = place(taken, part.size[b], part.alignment[b], fit);
    layout.height = std::max(layout.height, layout.offsets[b] + part.size[b]);
    if (layout.height > limit) return {};
    placed.add(b, layout.offsets[b]);
  }
  return layout;
}

// The orders worth trying, most promising first: what each buffer is sorted by, largest first.
std::vector<std::vector<double>> keys(const Part& part) {
  const int n = part.count();
  const std::vector<Size> crowd = contention(part);
  std::vector<double> size(n), life(n), area(n), crowded(n), early(n), late(n), large(n),
      larger(n);
  for (int b = 0; b < n; ++b) {
    size[b] = static_cast<double>(part.size[b]);
    life[b] = part.lifetime(b);
    area[b] = size[b] * life[b];
    crowded[b] = static_cast<double>(crowd[b]);
    early[b] = -part.first(b);
    late[b] = part.last(b);
    // Few buffers of a long program live long; placed first, they are quickly placed.
    large[b] = size[b] + (life[b] > part.num_sections / 64.0 ? 1e18 : 0.0);
    larger[b] = size[b] + (life[b] > part.num_sections / 4.0 ? 1e18 : 0.0);
  }
  return {size, area, life, crowded, early, late, large, larger};
}

std::vector<int> sorted_by(const std::vector<double>& first, const std::vector<double>& second) {
  std::vector<int> order(first.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    if (first[a] != first[b]) return first[a] > first[b];
    return second[a] != second[b] ? second[a] > second[b] : a < b;
  });
  return order;
}

// The best of several orders, which is returned too; stops at `goal`. `out_of_time` is asked
// between orders.
template <class OutOfTime>
Layout best_fit(const Part& part, Size goal, std::vector<int>& best_order, OutOfTime out_of_time) {
  const std::vector<std::vector<double>> by = keys(part);
  enum { kSize, kArea, kLife, kCrowded, kEarly, kLate, kLarge, kLarger };
  const std::pair<int, int> orders[] = {
      {kLarge, kLife},   {kLarger, kLife},   {kLife, kSize}, {kSize, kLife},   {kArea, kSize},
      {kCrowded, kSize}, {kCrowded, kLife},  {kEarly, kSize}, {kLate, kSize}, {kCrowded, kArea}};
  Placed placed(part);
  Layout best;
  for (auto [first, second] : orders) {
    const std::vector<int> order = sorted_by(by[first], by[second]);
    for (Fit fit : {Fit::kFirst, Fit::kBest}) {
      if (best.height <= goal || (best.height < kNever && out_of_time())) return best;
      Layout layout = fit_along(part, order, fit, best.height - 1, placed);
      if (layout.height >= best.height) continue;
      best = std::move(layout);
      best_order = order;
    }
  }
  return best;
}

// Hill climbing over orders: a buffer that reaches highest moves to an earlier place. Returns the
// first lower packing, or none after `max_passes`.
template <class OutOfTime>
Layout climb(const Part& part, Layout layout, std::vector<int>& order, std::mt19937_64& random,
             int64_t max_passes, OutOfTime out_of_time) {
  Placed placed(part);
  const Size height = layout.height;
  std::vector<size_t> highest;
  for (int64_t pass = 0; pass < max_passes && !out_of_time(); ++pass) {
    highest.clear();
    for (size_t i = 0; i < order.size(); ++i) {
      if (layout.offsets[order[i]] + part.size[order[i]] == layout.height) highest.push_back(i);
    }
    const size_t from = highest[random() % highest.size()], to = random() % (from + 1);
    std::vector<int> changed = order;
    std::rotate(changed.begin() + to, changed.begin() + from, changed.begin() + from + 1);
    Layout next = fit_along(part, changed, Fit::kFirst, height, placed);
    if (next.height > height) continue;
    layout = std::move(next);
    order = std::move(changed);
    if (layout.height < height) return layout;
  }
  return {};
}

}  // namespace
