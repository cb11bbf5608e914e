// Evictions, the tier of each, and the parts of live ranges between them.

namespace {

// Chooses evictions: at every position that does not fit, the object with the latest next use (Belady),
// shifted by `bias`; then keeps those that fit after all. `evicted` may hold a choice to begin with.
// Objects have weights, in bytes or otherwise; `base` is their sum by position if nothing leaves, and an
// object without weight never does. Returns the excess over the capacity at the worst position.
i64 evict(const Sequence& s, const std::vector<i64>& base, const i64* weights, const i64* capacity,
           i64 min_weight, const double* bias, std::uint8_t* evicted) {
  const i32 n = s.length, num_holes = static_cast<i32>(s.holes.size());
  std::vector<i64> live(base);
  Changes released(n);  // of `live`, by what is evicted
  std::vector<std::vector<i32>> starting(n), wrapping(1);
  for (i32 g = 0; g < num_holes; ++g) {
    const Hole& hole = s.holes[g];
    if (evicted[g]) released.add(s, hole, -weights[hole.object]);
    if (hole.end > n || hole.start < 0) wrapping[0].push_back(g);
    if (hole.start + 1 < n && hole.start >= 0) starting[hole.start + 1].push_back(g);
  }
  released.apply(live);
  i64 worst = 0;
  for (int pass = 0; pass < 2; ++pass) {
    // First large objects only; small ones where these are not enough.
    const i64 least = pass == 0 ? min_weight : 1;
    worst = 0;
    std::priority_queue<std::pair<double, i32>> heap;
    auto push = [&](i32 g, i32 end) {
      const Hole& hole = s.holes[g];
      if (evicted[g] || weights[hole.object] < least) return;
      heap.push({end + (bias ? bias[g] : 0.0), g});
    };
    for (i32 g : wrapping[0]) push(g, s.holes[g].start < 0 ? n : s.holes[g].end - n);
    i64 here = 0;  // change of live bytes by the evictions so far, here
    std::vector<i64> ahead(n + 1, 0);  // and from each position on
    for (i32 position = 0; position < n; ++position) {
      here += ahead[position];
      for (i32 g : starting[position]) push(g, s.holes[g].end);
      while (live[position] + here > capacity[position] && !heap.empty()) {
        const i32 g = heap.top().second;
        const Hole& hole = s.holes[g];
        heap.pop();
        if (evicted[g]) continue;
        const auto [first, last, wrapped] = span(s, hole);
        if (!((first <= position && position < last) || position < wrapped)) continue;
        const i64 bytes = weights[hole.object];
        evicted[g] = 1;
        released.add(s, hole, -bytes);
        here -= bytes;
        if (first <= position) {
          ahead[last] += bytes;
        } else {  // around the end of the step: it is used before it leaves
          ahead[wrapped] += bytes;
          ahead[first] -= bytes;
          ahead[last] += bytes;
        }
      }
      worst = std::max(worst, live[position] + here - capacity[position]);
    }
    released.apply(live);
    if (worst <= 0) break;
  }
  // Keep, largest first, the objects that fit after all.
  for (i32 position = 0; position < n; ++position) live[position] -= capacity[position];
  RangeMax tree(live);
  std::vector<i32> back;
  for (i32 g = 0; g < num_holes; ++g)
    if (evicted[g]) back.push_back(g);
  std::sort(back.begin(), back.end(), [&](i32 a, i32 b) {
    const i64 x = weights[s.holes[a].object], y = weights[s.holes[b].object];
    const i32 u = s.holes[a].end - s.holes[a].start, v = s.holes[b].end - s.holes[b].start;
    return x != y ? x > y : u != v ? u < v : a < b;
  });
  for (i32 g : back) {
    const Hole& hole = s.holes[g];
    const i64 bytes = weights[hole.object];
    if (is_empty(s, hole) || max_span(tree, s, hole) + bytes <= 0) {
      evicted[g] = 0;
      add_span(tree, s, hole, bytes);
    }
  }
  return worst;
}

// Whether an evicted object has to be written first: not if a copy below is still valid.
std::vector<std::uint8_t> find_dirty_holes(const Sequence& s, const std::uint8_t* evicted) {
  std::vector<std::uint8_t> dirty(s.holes.size(), 0);
  for (i32 object = 0; object < s.problem.num_objects; ++object) {
    const i32 begin = s.first_hole[object], end = s.first_hole[object + 1];
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
        if (g < end && s.holes[g].start == at[k] && (k + 1 == at.size() || at[k + 1] > at[k])) {
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

// Assigns tiers to the evicted holes: the host first to objects that move often and lie there briefly, as
// far as `host_bytes` go, else the file. All holes of an object have one tier, as a copy that is written
// once may come back often.
void assign_tiers(const Sequence& s, const std::uint8_t* evicted, i64 host_bytes, std::uint8_t* tier) {
  const Problem& p = s.problem;
  const i32 n = s.length;
  const auto dirty = find_dirty_holes(s, evicted);
  struct Item { double worth; i32 object; };
  std::vector<Item> items;
  std::vector<std::vector<Hole>> copies(p.num_objects);  // below the device: each from `start` + 1 to `end`
  for (i32 object = 0; object < p.num_objects; ++object) {
    const i32 begin = s.first_hole[object], end = s.first_hole[object + 1];
    i32 moves = 0, first_dirty = -1;
    bool any = false;
    for (i32 g = begin; g < end; ++g) {
      if (!evicted[g]) continue;
      any = true;
      moves += (s.holes[g].start >= 0) + dirty[g];
      if (dirty[g] && first_dirty < 0) first_dirty = g;
    }
    auto& own = copies[object];
    if (!any) continue;
    if (first_dirty < 0) own.push_back({object, -1, n});  // no step changes it: a copy for ever
    // A copy lasts from the hole in which it is written to the last hole before the next writing.
    for (i32 g = begin; g < end; ++g) {
      if (!evicted[g] || !dirty[g]) continue;
      i32 until = s.holes[g].end + 1;
      i32 h = g + 1;
      for (; h < end && !(evicted[h] && dirty[h]); ++h)
        if (evicted[h]) until = s.holes[h].end + 1;
      if (h == end && (p.flags[object] & kPersistent))
        for (h = begin; h < first_dirty; ++h)
          if (evicted[h]) until = s.holes[h].end + n + 1;
      own.push_back({object, s.holes[g].start, std::min(until, s.holes[g].start + 1 + n)});
    }
    i64 length = 0;
    for (const Hole& copy : own) length += copy.end - copy.start - 1;
    items.push_back({static_cast<double>(moves) / static_cast<double>(std::max<i64>(length, 1)), object});
  }
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.worth > b.worth; });
  RangeMax taken(std::vector<i64>(n, 0));
  for (const Item& item : items) {
    const i64 bytes = p.bytes[item.object];
    i64 most = 0;
    for (const Hole& copy : copies[item.object]) {
      add_span(taken, s, copy, bytes);
      most = std::max(most, max_span(taken, s, copy));
    }
    const bool fits = most <= host_bytes;
    if (!fits)
      for (const Hole& copy : copies[item.object]) add_span(taken, s, copy, -bytes);
    for (i32 g = s.first_hole[item.object]; g < s.first_hole[item.object + 1]; ++g) tier[g] = fits ? 0 : 1;
  }
}

// An object on the device between two of its evicted holes; `arrives` and `leaves` as of `Interval`.
struct Part {
  i32 object, start, end, arrives, leaves;
  i32 before = -1, next = -1;  // the part whose place it reuses, and the one that reuses its place
  i32 chain = -1;              // number of the chain of such parts that it belongs to
};

// Cuts live ranges at their evicted holes. Objects have left by `out_end` and come back from `in_start`
// on, by hole; null: by uses alone, transfers take no time.
class Cut {
 public:
  Cut(const Sequence& s, const std::uint8_t* evicted, const i32* out_end, const i32* in_start)
      : s_(s), evicted_(evicted), out_end_(out_end), in_start_(in_start) {
    for (i32 object = 0; object < s.problem.num_objects; ++object) {
      first_.push_back(static_cast<i32>(parts.size()));
      if (s.problem.bytes[object] == 0) continue;
      if (s.problem.flags[object] & kPersistent) add_persistent(object);
      else add_temporary(object);
    }
    first_.push_back(static_cast<i32>(parts.size()));
    join();
  }
  std::vector<Part> parts;

 private:
  i32 out_end(i32 hole) const { return out_end_ ? out_end_[hole] : s_.holes[hole].start + 1; }
  i32 in_start(i32 hole) const { return in_start_ ? in_start_[hole] : s_.holes[hole].end; }
  void add_persistent(i32 object) {
    const i32 n = s_.length;
    std::vector<i32> out;
    for (i32 g = s_.first_hole[object]; g < s_.first_hole[object + 1]; ++g)
      if (evicted_[g]) out.push_back(g);
    if (out.empty()) parts.push_back({object, 0, n, -2, -2});
    for (size_t k = 0; k < out.size() && s_.holes[out[k]].start >= 0; ++k) {
      const bool around = k + 1 == out.size();
      const i32 following = around ? out[0] : out[k + 1], start = in_start(out[k]);
      const i32 end = out_end(following) + (around ? n : 0), shift = start >= n ? n : 0;
      parts.push_back({object, start - shift, end - shift, out[k], following});
    }
  }
  void add_temporary(i32 object) {
    const auto& at = s_.uses[object];
    const auto& kinds = s_.use_kinds[object];
    const i32 count = static_cast<i32>(at.size());
    i32 g = s_.first_hole[object], arrives = -1;
    i32 begin = s_.problem.flags[object] & kInput ? 0 : -1;
    for (i32 k = 0; k < count; ++k) {
      if (begin < 0) begin = at[k];
      const bool last = k + 1 == count;
      const bool has_hole = g < s_.first_hole[object + 1] && s_.holes[g].start == at[k] && (last || at[k + 1] > at[k]);
      if (has_hole && evicted_[g]) {
        parts.push_back({object, begin, out_end(g), arrives, g});
        begin = in_start(g), arrives = g;
      } else if (last || kinds[k + 1] == kCreate) {
        const bool kept = last && (s_.problem.flags[object] & kKept);
        parts.push_back({object, begin, kept ? s_.length : at[k] + 1, arrives, -1});
        begin = arrives = -1;
      }
      if (has_hole) ++g;
    }
  }
  // In-place reuse: a result goes on in the place of its operand.
  void join() {
    for (i32 position = 0; position < s_.length; ++position) {
      if (s_.reused_from[position] < 0) continue;
      const i32 old = find(s_.reused_from[position], &Part::end, position + 1);
      const i32 made = find(s_.reused_by[position], &Part::start, position);
      if (old < 0 || made < 0) continue;
      parts[old].end = position;
      parts[old].next = made;
      parts[made].before = old;
    }
    i32 num_chains = 0;
    for (const Part& part : parts) {
      if (part.before >= 0) continue;
      for (i32 index = static_cast<i32>(&part - parts.data()); index >= 0; index = parts[index].next)
        parts[index].chain = num_chains;
      ++num_chains;
    }
  }
  i32 find(i32 object, i32 Part::*boundary, i32 position) const {
    for (i32 index = first_[object]; index < first_[object + 1]; ++index)
      if (parts[index].*boundary == position) return index;
    return -1;
  }
  const Sequence& s_;
  const std::uint8_t* evicted_;
  const i32 *out_end_, *in_start_;
  std::vector<i32> first_;  // part of each object
};

}  // namespace
