// Memory in size classes: each class is a number of equal slots, and a value takes one of its class.
//
// This is the memory of SwapAdvisor (Huang, Jin, Li, ASPLOS 2020, section 4): where no slot of a class
// is free, the value of the class that is used again the latest leaves, and what takes its slot waits
// until it has left.

namespace {

struct SizeClasses {
  const i32* class_of;  // of each object; -1 for objects without bytes
  i32 num_classes;
  const i64 *counts, *bytes;  // slots of each class, and bytes of a slot
};

std::vector<i64> members(const Sequence& s, const i32* class_of, i32 name) {
  std::vector<i64> weights(s.problem.num_objects);
  for (i32 object = 0; object < s.problem.num_objects; ++object) weights[object] = class_of[object] == name;
  return weights;
}

i64 largest(const std::vector<i64>& values) { return values.empty() ? 0 : *std::max_element(values.begin(), values.end()); }

// For each class the slots that its values use at once, with all that can leave outside, and with nothing.
void class_needs(const Sequence& s, const i32* class_of, i32 num_classes, i64* least, i64* most) {
  for (i32 name = 0; name < num_classes; ++name) {
    const std::vector<i64> weights = members(s, class_of, name);
    std::vector<i64> live = s.live(weights.data());
    most[name] = largest(live);
    Changes outside(s.length);
    for (const Hole& hole : s.holes) outside.add(s, hole, -weights[hole.object]);
    outside.apply(live);
    least[name] = largest(live);
  }
}

// Assigns a slot to each interval of one class, the same one in every step: `offset` is its number, or -1.
// What is there over the end of the step comes first, then the others by their start; each takes the
// slot that is free the shortest of those that are free for long enough.
void assign_slots(const std::vector<Interval*>& intervals, i64 count, i32 num_positions) {
  std::vector<std::pair<i64, i64>> windows(count, {0, num_positions});  // of each slot: free from, until
  i64 whole = count;  // slots that are free for all the step; the last ones are taken first
  std::vector<Interval*> inside;
  for (Interval* interval : intervals) {
    interval->offset = -1;
    if (interval->end <= num_positions && interval->leaves != -2) {
      inside.push_back(interval);
    } else if (whole > 0) {
      interval->offset = --whole;
      windows[whole] = interval->leaves == -2 ? std::pair<i64, i64>{0, 0} : std::pair<i64, i64>{interval->end - num_positions, interval->start};
    }
  }
  std::stable_sort(inside.begin(), inside.end(), [](const Interval* a, const Interval* b) { return a->start < b->start; });
  using Slot = std::tuple<i64, i64, i64>;  // free from, free until, number
  std::priority_queue<Slot, std::vector<Slot>, std::greater<Slot>> busy;
  for (i64 slot = 0; slot < count; ++slot) busy.emplace(windows[slot].first, windows[slot].second, slot);
  std::vector<Slot> free;  // those that are free the longest first
  for (Interval* interval : inside) {
    for (; !busy.empty() && std::get<0>(busy.top()) <= interval->start; busy.pop()) free.push_back(busy.top());
    const auto slot = std::find_if(free.begin(), free.end(), [&](const Slot& it) { return std::get<1>(it) >= interval->end; });
    if (slot == free.end()) continue;
    interval->offset = std::get<2>(*slot);
    busy.emplace(interval->end, std::get<1>(*slot), std::get<2>(*slot));
    free.erase(slot);
  }
}

// How many intervals without a slot there are at once, at most.
i64 most_without_slot(const std::vector<Interval*>& intervals, i32 num_positions) {
  std::vector<i64> change(2 * num_positions + 1, 0), at_once(num_positions, 0);
  for (const Interval* interval : intervals)
    if (interval->offset < 0) ++change[interval->start], --change[interval->end];
  i64 here = 0;
  for (i32 position = 0; position < 2 * num_positions; ++position)
    at_once[position % num_positions] += here += change[position];
  return largest(at_once);
}

// Chooses what leaves so that every class has slots enough; `intervals` receives one for each chain of
// in-place reuse, with its address. Intervals over the end of the step can block more slots than their
// number says: then the choice is made for fewer. Returns the number of intervals; -1 if nothing fits.
i32 evict_in_classes(const Sequence& s, const SizeClasses& classes, std::uint8_t* evicted, Interval* intervals) {
  constexpr int kTries = 6;
  const i32 n = s.length, num_classes = classes.num_classes;
  std::vector<i64> usable(classes.counts, classes.counts + num_classes);
  std::vector<i32> needs_choice(num_classes, 1);
  std::vector<std::vector<std::uint8_t>> chosen(num_classes, std::vector<std::uint8_t>(s.holes.size(), 0));
  for (int attempt = 0; attempt < kTries; ++attempt) {
    std::fill(evicted, evicted + s.holes.size(), 0);
    for (i32 name = 0; name < num_classes; ++name) {
      if (needs_choice[name]) {
        const std::vector<i64> weights = members(s, classes.class_of, name), capacity(n, usable[name]);
        const std::vector<i64> live = s.live(weights.data());
        std::uint8_t* own = chosen[name].data();
        std::fill(own, own + s.holes.size(), 0);
        const bool fits = largest(live) <= usable[name];
        if (!fits && evict(s, live, weights.data(), capacity.data(), 1, nullptr, own) > 0) return -1;
      }
      for (size_t g = 0; g < s.holes.size(); ++g) evicted[g] |= chosen[name][g];
    }
    const Cut cut(s, evicted, nullptr, nullptr);
    std::vector<std::vector<Interval*>> of_class(num_classes);
    i32 num_intervals = 0;
    for (const Part& part : cut.parts) {
      if (part.before >= 0) continue;
      const Part* last = &part;
      while (last->next >= 0) last = &cut.parts[last->next];
      intervals[num_intervals] = {0, s.problem.bytes[part.object], 0, 0, part.start, last->end, part.arrives, last->leaves};
      of_class[classes.class_of[part.object]].push_back(&intervals[num_intervals++]);
    }
    bool all_fit = true;
    i64 base = 0;
    for (i32 name = 0; name < num_classes; ++name) {
      assign_slots(of_class[name], classes.counts[name], n);
      const i64 missing = most_without_slot(of_class[name], n);
      needs_choice[name] = missing > 0;
      all_fit = all_fit && missing == 0;
      usable[name] = std::max<i64>(0, usable[name] - missing);
      for (Interval* interval : of_class[name]) interval->offset = base + interval->offset * classes.bytes[name];
      base += classes.counts[name] * classes.bytes[name];
    }
    if (all_fit) return num_intervals;
  }
  return -1;
}

}  // namespace
