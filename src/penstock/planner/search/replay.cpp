// A replay of steps in time, for either allocator.

namespace {

// Replays some steps: evicted objects leave as soon as they may, and come back as early as they fit up
// to their use, in the order of their uses. A late step gives the times and the boundaries.
//
//   start(p)  = max(end(p - 1), end of transfers in for p, end of transfers out that p waits for)
//   end(p)    = start(p) + seconds(p)
//   link free = max(link free, boundary at which the transfer may begin) + bytes / rate
//
// It ends, with an infinite time, where the step that times are read from takes more than `worth` seconds.
template <class Allocator>
Timing replay(const Sequence& s, const Links& links, const std::uint8_t* evicted, i32 prefetch_distance, double worth, Allocator& allocator,
              i32* out_end, i32* in_start, double* starts) {
  constexpr int kSteps = Allocator::kSteps, kRead = Allocator::kRead, kReadOut = Allocator::kReadOut;
  const Problem& p = s.problem;
  const i32 n = s.length, total = kSteps * n;
  const auto dirty = find_dirty_holes(s, evicted);
  std::vector<std::vector<i32>> leaving(n);
  std::vector<i32> arriving[kTiers];
  for (i32 g = 0; g < static_cast<i32>(s.holes.size()); ++g) {
    if (!evicted[g] || s.holes[g].start < 0) continue;
    leaving[s.holes[g].start].push_back(g);
    arriving[links.of(g)].push_back(g);
  }
  for (auto& holes : arriving)
    std::sort(holes.begin(), holes.end(), [&](i32 a, i32 b) {
      const i32 x = s.holes[a].end % n, y = s.holes[b].end % n;
      return x != y ? x < y : a < b;
    });

  struct Leaving { double done; i32 hole, step; };
  std::vector<Leaving> queue[kTiers];
  size_t head[kTiers] = {};
  double out_free[kTiers] = {}, in_free[kTiers] = {};
  i64 next[kTiers] = {};  // of all arrivals in the order of use: step = next / arriving.size()
  // By hole: the step whose object has left by now, so that it may come back.
  std::vector<i32> left(s.holes.size(), -1);
  std::vector<double> due(total + n, 0.0);  // end of the prefetches for a position
  double now = 0, previous_end = 0;
  Timing timing;

  auto hole_of = [&](int t, i64 index) { return arriving[t][index % arriving[t].size()]; };
  auto position_of = [&](int t, i64 index) {
    return s.holes[hole_of(t, index)].end % n + static_cast<i32>(index / arriving[t].size()) * n;
  };
  auto start_of = [&](int t, i64 index) {  // absolute position of the use before
    const Hole& hole = s.holes[hole_of(t, index)];
    return hole.start + (position_of(t, index) - hole.end);
  };
  auto is_last = [&](int t, i64 index) { return index >= static_cast<i64>(kSteps + 1) * static_cast<i64>(arriving[t].size()); };

  for (i32 absolute = 0; absolute < total; ++absolute) {
    const i32 position = absolute % n, step = absolute / n;
    if (position == 0 && absolute > 0 && step <= kRead) previous_end = now;
    auto note_in = [&](int t, i64 index) {
      if (in_start && index / static_cast<i64>(arriving[t].size()) == kRead) in_start[hole_of(t, index)] = absolute - kRead * n;
    };
    // Objects that have left by now.
    auto pop = [&](int t) {
      const Leaving& done = queue[t][head[t]++];
      allocator.release(done.hole);
      left[done.hole] = done.step;
      if (out_end && done.step == kReadOut) out_end[done.hole] = absolute - done.step * n;
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

    allocator.begin(position);
    i64 last_needed[kTiers];
    for (int t = 0; t < kTiers; ++t) {
      last_needed[t] = next[t];
      while (!arriving[t].empty() && !is_last(t, last_needed[t]) && position_of(t, last_needed[t]) <= absolute)
        allocator.add_arrival(hole_of(t, last_needed[t]++));
    }
    while (!allocator.fits() && wait()) {}
    // An object that has to come back may still be on its way out.
    for (int t = 0; t < kTiers; ++t)
      for (i64 index = next[t]; index < last_needed[t]; ++index) {
        const i32 hole_step = start_of(t, index) >= 0 ? start_of(t, index) / n : -1;
        while (hole_step >= 0 && left[hole_of(t, index)] < hole_step && wait()) {}
      }
    timing.overflow = std::max(timing.overflow, allocator.allocate());
    if (Allocator::kStopsWhenFull && timing.overflow > 0) return timing;
    const double boundary = now;
    for (int t = 0; t < kTiers; ++t)
      for (; next[t] < last_needed[t]; ++next[t]) {
        in_free[t] = std::max(in_free[t], boundary) + p.bytes[s.holes[hole_of(t, next[t])].object] * links.in[t];
        note_in(t, next[t]);
        now = std::max(now, in_free[t]);
      }
    const double start = std::max(now, due[absolute]), finish = start + p.seconds[s.operators[position]];
    if (starts && step == kRead) starts[position] = start - previous_end;
    if (step == kRead && finish - previous_end > worth) {
      timing.step_seconds = std::numeric_limits<double>::infinity();
      return timing;
    }

    // Prefetch while the link would idle before the next boundary.
    for (int t = 0; t < kTiers; ++t)
      while (!arriving[t].empty() && !is_last(t, next[t]) && in_free[t] < finish) {
        const i32 use = position_of(t, next[t]), before = start_of(t, next[t]), g = hole_of(t, next[t]);
        if (use >= total + n || use > absolute + prefetch_distance) break;
        if (before >= absolute) break;  // still in use
        if (before >= 0 && left[g] < before / n) break;  // still on its way out
        if (!allocator.allocate_early(g, absolute, use)) break;
        in_free[t] = std::max(in_free[t], boundary) + p.bytes[s.holes[g].object] * links.in[t];
        due[use] = std::max(due[use], in_free[t]);
        note_in(t, next[t]);
        ++next[t];
      }
    now = finish;
    if (position == n - 1 && step == kRead) timing.step_seconds = now - previous_end;
    allocator.end_position(position);
    for (i32 g : leaving[position]) {
      const int t = links.of(g);
      if (dirty[g]) {
        out_free[t] = std::max(out_free[t], now) + p.bytes[s.holes[g].object] * links.out[t];
        queue[t].push_back({out_free[t], g, step});
      } else {
        allocator.release(g);
        left[g] = step;
        if (out_end && step == kReadOut) out_end[g] = position + 1;
      }
    }
  }
  return timing;
}

}  // namespace
