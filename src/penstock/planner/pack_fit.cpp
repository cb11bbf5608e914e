// First fit and best fit along a given order: the fast part of the packer.
//
// The buffers take turns. Each goes to the lowest free place (first fit) or into the tightest gap
// (best fit) among those that are placed already and are alive at some time with it.

namespace {

enum class Fit { kFirst, kBest };

// The placed buffers, so that those that share a moment with a given one are found quickly: spans
// lie in blocks, sorted by their beginning, and a block knows how far its placed spans reach.
class Placed {
 public:
  explicit Placed(const Part& part) : part_(part) {
    for (int b = 0; b < part.count(); ++b) {
      for (const Range& range : part.ranges[b]) spans_.push_back({range.begin, range.end, b});
    }
    std::stable_sort(spans_.begin(), spans_.end(),
                     [](const Span& one, const Span& other) { return one.begin < other.begin; });
    where_.resize(part.count());
    for (size_t i = 0; i < spans_.size(); ++i) where_[spans_[i].buffer].push_back(i);
    blocks_.resize((spans_.size() + kBlock - 1) / kBlock);
    for (size_t i = 0; i < spans_.size(); i += kBlock) blocks_[i / kBlock].begin = spans_[i].begin;
    seen_.resize(part.count(), -1);
  }

  void clear() {
    for (Block& block : blocks_) block.reach = 0, block.buffers.clear();
    std::fill(seen_.begin(), seen_.end(), -1);
  }

  void add(int buffer) {
    for (size_t i : where_[buffer]) {
      Block& block = blocks_[i / kBlock];
      block.reach = std::max(block.reach, spans_[i].end);
      block.buffers.push_back(spans_[i]);
    }
  }

  template <class Visit>
  void each_overlapping(int buffer, Visit visit) {
    const bool unique = part_.ranges[buffer].size() == 1 && spans_.size() == part_.ids.size();
    for (const Range& range : part_.ranges[buffer]) {
      for (const Block& block : blocks_) {
        if (block.begin >= range.end) break;
        if (block.reach <= range.begin) continue;
        for (const Span& span : block.buffers) {
          if (span.begin >= range.end || span.end <= range.begin) continue;
          if (!unique) {
            if (seen_[span.buffer] == buffer) continue;
            seen_[span.buffer] = buffer;
          }
          visit(span.buffer);
        }
      }
    }
  }

 private:
  struct Span {
    int begin, end, buffer;
  };
  struct Block {
    int begin = 0, reach = 0;
    std::vector<Span> buffers;
  };
  static constexpr size_t kBlock = 64;

  const Part& part_;
  std::vector<Span> spans_;
  std::vector<std::vector<size_t>> where_;
  std::vector<Block> blocks_;
  std::vector<int> seen_;
};

struct Taken {
  Size begin, end;
  bool operator<(const Taken& other) const { return begin < other.begin; }
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
    placed.add(b);
  }
  for (int b : order) {
    if (part.fixed[b] != kFree) continue;
    taken.clear();
    placed.each_overlapping(b, [&](int other) {
      taken.push_back({layout.offsets[other], layout.offsets[other] + part.size[other]});
    });
    std::sort(taken.begin(), taken.end());
    layout.offsets[b] = place(taken, part.size[b], part.alignment[b], fit);
    layout.height = std::max(layout.height, layout.offsets[b] + part.size[b]);
    if (layout.height > limit) return {};
    placed.add(b);
  }
  return layout;
}

// The orders worth trying, most promising first: what each buffer is sorted by, largest first.
std::vector<std::vector<double>> keys(const Part& part) {
  const int n = part.count();
  const std::vector<Size> crowd = contention(part);
  std::vector<double> size(n), life(n), area(n), crowded(n), early(n), late(n);
  for (int b = 0; b < n; ++b) {
    size[b] = static_cast<double>(part.size[b]);
    life[b] = part.lifetime(b);
    area[b] = size[b] * life[b];
    crowded[b] = static_cast<double>(crowd[b]);
    early[b] = -part.first(b);
    late[b] = part.last(b);
  }
  return {size, area, life, crowded, early, late};
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

// The best of several orders; stops at `goal`. `out_of_time` is asked between orders.
template <class OutOfTime>
Layout best_fit(const Part& part, Size goal, OutOfTime out_of_time) {
  const std::vector<std::vector<double>> by = keys(part);
  enum { kSize, kArea, kLife, kCrowded, kEarly, kLate };
  const std::pair<int, int> orders[] = {{kSize, kLife},    {kLife, kSize},  {kArea, kSize},
                                        {kCrowded, kSize}, {kEarly, kSize}, {kCrowded, kLife},
                                        {kLate, kSize},    {kCrowded, kArea}};
  Placed placed(part);
  Layout best;
  for (auto [first, second] : orders) {
    const std::vector<int> order = sorted_by(by[first], by[second]);
    for (Fit fit : {Fit::kFirst, Fit::kBest}) {
      if (best.height <= goal || (best.height < kNever && out_of_time())) return best;
      Layout layout = fit_along(part, order, fit, best.height - 1, placed);
      if (layout.height < best.height) best = std::move(layout);
    }
  }
  return best;
}

}  // namespace
