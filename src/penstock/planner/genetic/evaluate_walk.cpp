// Second part: who is on the device when (`_walk.py`), and in which object (`_genetic_objects.py`).

namespace {

// A place on the device, from the value that takes it first to the last one it is handed to.
struct Room {
  i32 size, pool;
  i32 first, value;  // who is in it first and last, as they were called when they came in
  i32 key;           // what its present value is called in the present step
  i64 start, made, first_need, last_need, next_need;
  bool loaded, dirty, written = false;
  i64 end = kUnbounded;
};

// What a walk finds, for one step of many equal ones; of rooms that are never free only the pools.
struct Residency {
  std::vector<Room> rooms;
  std::vector<i32> pools_of_lasting;
};

class Walk {
 public:
  Walk(const Order& order, const std::vector<i32>& pool_of_size, const std::vector<i64>& capacities)
      : order_(order), graph_(order.graph), pool_of_size_(pool_of_size), capacities_(capacities),
        room_of_value_(graph_.num_values, -1), is_copied_(graph_.num_values, 0),
        used_(capacities.size(), 0), heaps_(capacities.size()), kept_(graph_.num_values, 0) {
    for (i32 storage = 0; storage < graph_.num_storages; ++storage)
      if (graph_.persistent[storage] && graph_.initial[storage] >= 0) is_copied_[graph_.initial[storage]] = 1;
  }

  // Walks until a step begins as the one before it did; false if an operator does not fit.
  bool run(Residency& residency) {
    constexpr i32 kCycles = 4;  // before what is there when a step begins is laid down
    std::vector<std::tuple<i32, i64, i64, bool>> before{{-1, 0, 0, false}}, now;
    for (i32 cycle = 0; cycle < 3 * kCycles; ++cycle) {
      if (!run_cycle(cycle)) return false;
      now = snapshot(i64{cycle + 1} * order_.num_positions);
      if (now == before) {
        if (!run_cycle(cycle + 1)) return false;
        residency = of_cycle(cycle);
        return true;
      }
      before.swap(now);
      if (cycle + 1 == kCycles || cycle + 1 == 2 * kCycles) {
        is_laid_down_ = true;
        laid_down_.clear();
        if (cycle + 1 == kCycles)
          for (i32 value = 0; value < graph_.num_values; ++value)
            if (room_of_value_[value] >= 0) laid_down_.push_back(value);
      }
    }
    return false;
  }

 private:
  using Entry = std::tuple<i64, i32, i32>;  // key, storage, room; the least goes first

  bool run_cycle(i32 cycle) {
    const i64 base = i64{cycle} * order_.num_positions;
    for (i32 value : graph_.inputs) {
      const i64 next = order_.next_initial[value];
      if (next == kNever) continue;
      if (!make_room(value, base)) return false;
      take(value, base, base, base + next, false);
    }
    for (i32 position = 0; position < order_.num_positions; ++position)
      if (!visit(base, position)) return false;
    end_step(base + order_.num_positions);
    return true;
  }

  bool visit(i64 base, i32 position) {
    const Visit& v = order_.visits[position];
    const i64 at = base + position;
    const i32* needs = order_.needs.data() + v.needs;
    const i32* makes = order_.makes.data() + v.makes;
    bool fits = true;
    for (i32 k = 0; k < v.num_needs; ++k) kept_[needs[k]] = 1;
    for (i32 k = 0; k < v.num_needs && fits; ++k)
      if (room_of_value_[needs[k]] < 0) {
        fits = make_room(needs[k], at);
        if (fits) take(needs[k], at, at, at, true);
      }
    for (i32 k = 0; k < v.num_creates; ++k) kept_[makes[k]] = 1;
    for (i32 k = 0; k < v.num_creates && fits; ++k) {
      fits = make_room(makes[k], at);
      if (fits) take(makes[k], at, at, at, false);
    }
    for (i32 k = 0; k < v.num_needs; ++k) kept_[needs[k]] = 0;
    for (i32 k = 0; k < v.num_creates; ++k) kept_[makes[k]] = 0;
    if (!fits) return false;
    for (i32 k = v.handovers; k < v.handovers + v.num_handovers; ++k) {
      const auto [old, made] = order_.handovers[k];
      const i32 index = room_of_value_[old];
      Room& room = rooms_[index];
      room_of_value_[old] = -1;
      room.value = room.key = made;
      room.made = at, room.dirty = true;
      room_of_value_[made] = index;
      is_copied_[old] = 0;
    }
    for (i32 k = 0; k < v.num_makes; ++k) is_copied_[makes[k]] = 0;
    auto touch = [&](i32 value, i64 after) {
      if (order_.hands_over(v, value)) return;
      const i32 index = room_of_value_[value];
      Room& room = rooms_[index];
      room.last_need = at;
      room.next_need = after == kNever ? kNever : base + after;
      if (graph_.pinned[value]) return;
      if (after == kNever) free(index, at + 1);
      else offer(index);
    };
    for (i32 k = 0; k < v.num_needs; ++k) touch(needs[k], order_.next_needs[v.needs + k]);
    for (i32 k = 0; k < v.num_makes; ++k) touch(makes[k], order_.next_makes[v.makes + k]);
    return true;
  }

  // A step is over: results go, and what is final is the next one's initial.
  void end_step(i64 at) {
    for (i32 value = 0; value < graph_.num_values; ++value)
      if (graph_.pinned[value] && room_of_value_[value] >= 0) {
        rooms_[room_of_value_[value]].last_need = at - 1;
        free(room_of_value_[value], at);
      }
    std::vector<std::pair<i32, i32>> renamed;
    std::vector<i32> copied;
    for (i32 final = 0; final < graph_.num_values; ++final) {
      const i32 initial = graph_.initial_of_final[final];
      if (initial < 0) continue;
      if (room_of_value_[final] >= 0) renamed.emplace_back(initial, room_of_value_[final]);
      room_of_value_[final] = -1;
      if (is_copied_[final]) copied.push_back(initial);
      is_copied_[final] = 0;
    }
    for (const auto& [initial, index] : renamed) {
      rooms_[index].key = initial;
      room_of_value_[initial] = index;
    }
    for (i32 initial : copied) is_copied_[initial] = 1;
    if (!is_laid_down_) return;
    for (i32 value = 0; value < graph_.num_values; ++value)
      if (room_of_value_[value] >= 0 && !std::binary_search(laid_down_.begin(), laid_down_.end(), value))
        put_out(room_of_value_[value], at);
    for (i32 value : laid_down_)
      if (room_of_value_[value] < 0) take(value, at, at, at + order_.next_initial[value], true);
  }

  void take(i32 value, i64 at, i64 last, i64 next, bool loaded) {
    const i32 size = graph_.size_of_value[value], pool = pool_of_size_[size];
    const i32 index = static_cast<i32>(rooms_.size());
    ++used_[pool];
    const i64 made = loaded ? -1 : at;
    rooms_.push_back({size, pool, value, value, value, at, made, at, last, next, loaded, !loaded});
    room_of_value_[value] = index;
    if (next != at && next != kNever) offer(index);
  }

  void offer(i32 index) {
    const Room& room = rooms_[index];
    const i32 storage = graph_.storage_of_value[room.value];
    heaps_[room.pool].emplace(-room.next_need, storage, index);
  }

  // Puts values out until one more fits; operands and results of the operator (`kept_`) stay.
  bool make_room(i32 value, i64 at) {
    const i32 pool = pool_of_size_[graph_.size_of_value[value]];
    auto& heap = heaps_[pool];
    std::vector<Entry> later;
    bool fits = true;
    while (used_[pool] + 1 > capacities_[pool]) {
      if (heap.empty()) {
        fits = false;
        break;
      }
      const Entry entry = heap.top();
      heap.pop();
      const i32 index = std::get<2>(entry);
      const Room& room = rooms_[index];
      if (room.end != kUnbounded || std::get<0>(entry) != -room.next_need) continue;  // of an earlier use
      if (kept_[room.key] || (room.dirty && room.made >= at)) {
        later.push_back(entry);
        continue;
      }
      put_out(index, at);
    }
    for (const Entry& entry : later) heap.push(entry);
    return fits;
  }

  void put_out(i32 index, i64 at) {
    rooms_[index].written = rooms_[index].dirty;
    is_copied_[rooms_[index].key] = 1;
    free(index, at);
  }

  void free(i32 index, i64 at) {
    rooms_[index].end = at;
    room_of_value_[rooms_[index].key] = -1;
    --used_[rooms_[index].pool];
  }

  // What decides how the walk goes on.
  std::vector<std::tuple<i32, i64, i64, bool>> snapshot(i64 end) const {
    std::vector<std::tuple<i32, i64, i64, bool>> state;
    for (i32 value = 0; value < graph_.num_values; ++value) {
      if (room_of_value_[value] < 0) continue;
      const Room& room = rooms_[room_of_value_[value]];
      state.emplace_back(value, room.last_need - end, room.next_need - end, room.dirty);
    }
    return state;
  }

  Residency of_cycle(i32 cycle) const {
    const i64 begin = i64{cycle} * order_.num_positions, end = begin + order_.num_positions;
    Residency found;
    for (const Room& room : rooms_) {  // in the order in which they were taken
      if (room.end == kUnbounded && room.start < end) {
        found.pools_of_lasting.push_back(room.pool);  // it outlives the step after, too
      } else if (begin <= room.start && room.start < end) {
        found.rooms.push_back(room);
        Room& copy = found.rooms.back();
        copy.start -= begin, copy.end -= begin, copy.first_need -= begin, copy.last_need -= begin;
      }
    }
    return found;
  }

  const Order& order_;
  const Graph& graph_;
  const std::vector<i32>& pool_of_size_;
  const std::vector<i64>& capacities_;
  std::vector<Room> rooms_;
  std::vector<i32> room_of_value_;
  std::vector<std::uint8_t> is_copied_;
  std::vector<i64> used_;
  std::vector<std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>>> heaps_;
  std::vector<std::uint8_t> kept_;
  std::vector<i32> laid_down_;
  bool is_laid_down_ = false;
};

struct Window {
  i64 free_from, blocked_from;
  i32 item;
  bool operator<(const Window& other) const {
    return std::tie(free_from, blocked_from, item) < std::tie(other.free_from, other.blocked_from, other.item);
  }
};

// Gives every room an object of its pool, the same one in every step; -1 where there is none.
// `missing`: how many more objects of each pool would do.
std::vector<i32> assign_objects(const Residency& residency, const std::vector<i64>& counts, i64 num_positions,
                                std::vector<i64>& missing) {
  const std::vector<Room>& rooms = residency.rooms;
  const i32 num_pools = static_cast<i32>(counts.size()), num_rooms = static_cast<i32>(rooms.size());
  missing.assign(num_pools, 0);
  std::vector<i64> taken(num_pools, 0);
  for (i32 pool : residency.pools_of_lasting) {  // rooms that are never free take the first ones
    if (taken[pool] < counts[pool]) ++taken[pool];
    else missing[pool] = 1;
  }
  std::vector<std::vector<Window>> windows(num_pools);
  for (i32 pool = 0; pool < num_pools; ++pool)
    for (i64 item = taken[pool]; item < counts[pool]; ++item)
      windows[pool].push_back({0, num_positions, static_cast<i32>(item)});
  std::vector<i32> objects(num_rooms, -1), inside;
  std::vector<i64> unblocked(num_pools);
  for (i32 pool = 0; pool < num_pools; ++pool) unblocked[pool] = static_cast<i64>(windows[pool].size());
  for (i32 index = 0; index < num_rooms; ++index) {
    const Room& room = rooms[index];
    if (room.end <= num_positions) {
      inside.push_back(index);
    } else if (unblocked[room.pool] > 0) {  // round the end of the step: the last object still whole
      Window& window = windows[room.pool][--unblocked[room.pool]];
      window.free_from = room.end - num_positions;
      window.blocked_from = room.start;
      objects[index] = window.item;
    }
  }
  std::stable_sort(inside.begin(), inside.end(), [&](i32 a, i32 b) { return rooms[a].start < rooms[b].start; });
  for (auto& of_pool : windows) std::sort(of_pool.begin(), of_pool.end());
  std::vector<size_t> next(num_pools, 0);
  std::vector<std::set<std::pair<i64, i32>>> free(num_pools);  // blocked from, object
  using Busy = std::tuple<i64, i64, i32>;                      // end of its room, blocked from, object
  std::vector<std::priority_queue<Busy, std::vector<Busy>, std::greater<Busy>>> busy(num_pools);
  for (i32 index : inside) {
    const Room& room = rooms[index];
    const i32 pool = room.pool;
    for (; next[pool] < windows[pool].size() && windows[pool][next[pool]].free_from <= room.start; ++next[pool])
      free[pool].emplace(windows[pool][next[pool]].blocked_from, windows[pool][next[pool]].item);
    while (!busy[pool].empty() && std::get<0>(busy[pool].top()) <= room.start) {
      const auto [end, blocked, item] = busy[pool].top();
      busy[pool].pop();
      free[pool].emplace(blocked, item);
    }
    const auto place = free[pool].lower_bound({room.end, -1});  // the first that stays free so long
    if (place == free[pool].end()) continue;
    objects[index] = place->second;
    busy[pool].emplace(room.end, place->first, place->second);
    free[pool].erase(place);
  }
  std::vector<std::vector<std::pair<i64, i32>>> events(num_pools);
  for (i32 index = 0; index < num_rooms; ++index)
    if (objects[index] < 0) {
      missing[rooms[index].pool] = std::max<i64>(missing[rooms[index].pool], 1);
      events[rooms[index].pool].emplace_back(rooms[index].start, 1);
      events[rooms[index].pool].emplace_back(rooms[index].end, -1);
    }
  for (i32 pool = 0; pool < num_pools; ++pool) {
    std::sort(events[pool].begin(), events[pool].end());
    i64 at_once = 0;
    for (const auto& event : events[pool]) missing[pool] = std::max(missing[pool], at_once += event.second);
  }
  return objects;
}

}  // namespace
