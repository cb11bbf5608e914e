// Third part: when transfers begin and end (`_timing.py`), and the functions that Python calls.

namespace {

struct Move {
  i32 room;
  i64 start, end;  // boundaries; a start may lie before the step
  double seconds;
};

i64 modulo(i64 value, i64 period) {
  const i64 rest = value % period;
  return rest < 0 ? rest + period : rest;
}

// Floor division of floating point numbers, as Python has it; both are positive.
i64 floor_divide(double value, double divisor) {
  const double quotient = (value - std::fmod(value, divisor)) / divisor;
  const double whole = std::floor(quotient);
  return static_cast<i64>(quotient - whole > 0.5 ? whole + 1 : whole);
}

// The first boundary that is not before a time; `times` are those of one step's boundaries.
i64 boundary_at(const std::vector<double>& times, double period, double at) {
  if (period <= 0) return 0;
  const i64 steps = floor_divide(at, period);
  const double inside = (at - static_cast<double>(steps) * period) * (1 - 1e-12);
  const auto found = std::lower_bound(times.begin(), times.end(), inside);
  return steps * static_cast<i64>(times.size() - 1) + (found - times.begin());
}

// Moves by the boundary of the step at which something happens to them, in the order of their starts.
struct Agenda {
  std::vector<i32> first_start, starting, first_end, ending;

  Agenda(const std::vector<Move>& moves, i32 num_positions) {
    std::vector<i32> turn(moves.size());
    for (size_t k = 0; k < moves.size(); ++k) turn[k] = static_cast<i32>(k);
    auto start = [&](i32 k) { return modulo(moves[k].start, num_positions); };
    std::stable_sort(turn.begin(), turn.end(), [&](i32 a, i32 b) { return start(a) < start(b); });
    fill(turn, num_positions, start, first_start, starting);
    fill(turn, num_positions, [&](i32 k) { return modulo(moves[k].end, num_positions); }, first_end, ending);
  }

 private:
  template <class Boundary>
  static void fill(const std::vector<i32>& turn, i32 num_positions, Boundary boundary, std::vector<i32>& first,
                   std::vector<i32>& items) {
    first.assign(num_positions + 1, 0);
    for (i32 k : turn) ++first[boundary(k) + 1];
    for (i32 position = 0; position < num_positions; ++position) first[position + 1] += first[position];
    std::vector<i32> place(first.begin(), first.end() - 1);
    items.resize(turn.size());
    for (i32 k : turn) items[place[boundary(k)]++] = k;
  }
};

// Runs steps on three streams until they repeat; `reached`: the boundary at which each write is
// really finished.
double replay(const std::vector<double>& seconds, const std::vector<Move>& writes, const std::vector<Move>& loads,
              std::vector<i64>& reached) {
  const i32 num_positions = static_cast<i32>(seconds.size());
  const Agenda out(writes, num_positions), in(loads, num_positions);
  std::vector<double> finish_write(writes.size(), 0.0), finish_load(loads.size(), 0.0), times(num_positions + 1);
  double clock = 0, free_out = 0, free_in = 0, began = 0;
  for (int step = 0; step < 3; ++step) {
    began = clock;
    for (i32 position = 0; position < num_positions; ++position) {
      times[position] = clock;
      for (i32 k = out.first_start[position]; k < out.first_start[position + 1]; ++k) {
        const i32 move = out.starting[k];
        free_out = finish_write[move] = std::max(free_out, clock) + writes[move].seconds;
      }
      for (i32 k = out.first_end[position]; k < out.first_end[position + 1]; ++k)
        clock = std::max(clock, finish_write[out.ending[k]]);
      for (i32 k = in.first_start[position]; k < in.first_start[position + 1]; ++k) {
        const i32 move = in.starting[k];
        free_in = finish_load[move] = std::max(free_in, clock) + loads[move].seconds;
      }
      for (i32 k = in.first_end[position]; k < in.first_end[position + 1]; ++k)
        clock = std::max(clock, finish_load[in.ending[k]]);
      clock += seconds[position];
    }
  }
  const double period = clock - began;
  times[num_positions] = clock;
  for (double& time : times) time -= began;
  reached.resize(writes.size());
  for (size_t k = 0; k < writes.size(); ++k) {
    const i64 boundary = boundary_at(times, period, finish_write[k] - began);
    reached[k] = writes[k].start < num_positions ? boundary : boundary + num_positions;
  }
  return period;
}

// Where each room's predecessor is: (index or -1, how many steps ago).
using Earlier = std::vector<std::pair<i32, i64>>;

std::vector<i32> by_start(const std::vector<Room>& rooms) {
  std::vector<i32> order(rooms.size());
  for (size_t k = 0; k < rooms.size(); ++k) order[k] = static_cast<i32>(k);
  std::stable_sort(order.begin(), order.end(), [&](i32 a, i32 b) { return rooms[a].start < rooms[b].start; });
  return order;
}

// Who had the object before.
Earlier before_in_object(const std::vector<Room>& rooms, const std::vector<i32>& objects) {
  std::vector<std::tuple<i32, i32, i64, i32>> tenants;  // pool, object, start, room
  for (size_t k = 0; k < rooms.size(); ++k)
    tenants.emplace_back(rooms[k].pool, objects[k], rooms[k].start, static_cast<i32>(k));
  std::sort(tenants.begin(), tenants.end());
  Earlier before(rooms.size());
  for (size_t begin = 0, end; begin < tenants.size(); begin = end) {
    const auto same = [&](size_t k) {
      return std::get<0>(tenants[k]) == std::get<0>(tenants[begin]) &&
             std::get<1>(tenants[k]) == std::get<1>(tenants[begin]);
    };
    for (end = begin + 1; end < tenants.size() && same(end); ++end)
      before[std::get<3>(tenants[end])] = {std::get<3>(tenants[end - 1]), 0};
    before[std::get<3>(tenants[begin])] = {std::get<3>(tenants[end - 1]), 1};
  }
  return before;
}

// Who held the value of a loaded room before.
Earlier sources_of_loads(const Graph& graph, const std::vector<Room>& rooms) {
  Earlier found(rooms.size(), {-1, 0}), latest(graph.num_values, {-1, 0});
  const std::vector<i32> order = by_start(rooms);
  auto canonical = [&](i32 value) {
    return graph.initial_of_final[value] < 0 ? value : graph.initial_of_final[value];
  };
  for (i64 cycle = 0; cycle < 2; ++cycle)
    for (i32 index : order) {
      const Room& room = rooms[index];
      const auto& source = latest[canonical(room.first)];
      if (room.loaded && cycle == 1 && source.first >= 0) found[index] = {source.first, 1 - source.second};
      latest[canonical(room.value)] = {index, cycle};
    }
  return found;
}

struct Rates {
  double out, in;  // bytes per second
};

// The boundary by which each write is finished, if operators never wait.
std::vector<i64> without_waiting(const std::vector<double>& seconds, const std::vector<Move>& writes) {
  const i64 num_positions = static_cast<i64>(seconds.size());
  std::vector<double> times(1, 0.0);
  for (double duration : seconds) times.push_back(times.back() + duration);
  const double period = times.back();
  std::vector<i64> boundaries;
  double free = 0;
  for (const Move& move : writes) {
    const i64 steps = move.start / num_positions, position = move.start % num_positions;
    free = std::max(free, static_cast<double>(steps) * period + times[position]) + move.seconds;
    boundaries.push_back(boundary_at(times, period, free));
  }
  return boundaries;
}

// Gives every transfer its place, `passes` times; returns the best time of a step.
double arrange(const Order& order, const std::vector<double>& seconds, const Residency& residency,
               const std::vector<i32>& objects, Rates rates, i32 passes) {
  const Graph& graph = order.graph;
  const std::vector<Room>& rooms = residency.rooms;
  const i64 num_positions = order.num_positions;
  std::vector<Move> writes, loads;
  for (size_t k = 0; k < rooms.size(); ++k) {
    const double num_bytes = static_cast<double>(graph.sizes[rooms[k].size]);
    const i32 index = static_cast<i32>(k);
    if (rooms[k].written) writes.push_back({index, rooms[k].last_need + 1, rooms[k].end, num_bytes / rates.out});
    if (rooms[k].loaded) loads.push_back({index, 0, rooms[k].first_need, num_bytes / rates.in});
  }
  std::stable_sort(writes.begin(), writes.end(), [&](const Move& a, const Move& b) {
    return std::tie(a.start, rooms[a.room].end) < std::tie(b.start, rooms[b.room].end);
  });
  std::stable_sort(loads.begin(), loads.end(), [](const Move& a, const Move& b) { return a.end < b.end; });
  const Earlier before = before_in_object(rooms, objects), sources = sources_of_loads(graph, rooms);
  std::vector<i64> reached = without_waiting(seconds, writes), ends(rooms.size());
  double best = HUGE_VAL;
  for (i32 pass = 0; pass < passes; ++pass) {
    for (size_t k = 0; k < rooms.size(); ++k) ends[k] = rooms[k].written ? rooms[k].end : rooms[k].last_need + 1;
    for (size_t k = 0; k < writes.size(); ++k) {
      const Room& room = rooms[writes[k].room];
      writes[k].end = ends[writes[k].room] = std::min(room.end, std::max(room.last_need + 1, reached[k]));
    }
    i64 latest = -kUnbounded;
    for (Move& load : loads) {
      const auto& [previous, ago] = before[load.room];
      const auto& [source, steps] = sources[load.room];
      i64 earliest = std::max(ends[load.room] - num_positions, ends[previous] - ago * num_positions);
      if (source >= 0) earliest = std::max(earliest, ends[source] - steps * num_positions);
      load.start = std::min(earliest, load.end);
      latest = std::max(latest, load.start - num_positions);
    }
    for (Move& load : loads)  // none begins before one that is needed earlier; steps follow each other
      load.start = latest = std::min(std::max(latest, load.start), load.end);
    best = std::min(best, replay(seconds, writes, loads, reached));
    if (writes.empty()) break;
  }
  return best;
}

}  // namespace

extern "C" {

struct GraphArrays {
  i32 num_operators, num_values, num_storages, num_sizes, num_inputs;
  const double* seconds;
  const i32 *storage_of_value, *size_of_value;
  const i64* sizes;
  const i32 *initial, *final;
  const std::uint8_t* persistent;
  const i32 *first_need, *needs, *first_create, *creates, *first_mutate, *mutates, *first_overwrite, *overwrites;
  const i32* initial_of_final;
  const std::uint8_t* pinned;
  const i32* inputs;
};

void* penstock_genetic_graph(const GraphArrays* a) {
  const i32 n = a->num_operators, values = a->num_values, storages = a->num_storages;
  return new Graph{n,
                   values,
                   storages,
                   a->num_sizes,
                   {a->seconds, a->seconds + n},
                   {a->storage_of_value, a->storage_of_value + values},
                   {a->size_of_value, a->size_of_value + values},
                   {a->sizes, a->sizes + a->num_sizes},
                   {a->initial, a->initial + storages},
                   {a->final, a->final + storages},
                   {a->persistent, a->persistent + storages},
                   Lists(a->first_need, a->needs, n),
                   Lists(a->first_create, a->creates, n),
                   Lists(a->first_mutate, a->mutates, n),
                   Lists(a->first_overwrite, a->overwrites, n),
                   {a->initial_of_final, a->initial_of_final + values},
                   {a->pinned, a->pinned + values},
                   {a->inputs, a->inputs + a->num_inputs}};
}

void penstock_genetic_free(void* graph) { delete static_cast<Graph*>(graph); }

// The largest number of values of each size that live at once in an order.
void penstock_genetic_demand(const void* graph, const i32* operators, i64* most) {
  const Order order(*static_cast<const Graph*>(graph), operators);
  const std::vector<i64> found = most_at_once(order);
  std::copy(found.begin(), found.end(), most);
}

// Repairs an allocation, derives its swap plan and times it; `objects` receives the counts. Returns
// the time of a step; infinity where an operator does not fit.
double penstock_genetic_evaluate(const void* handle, const i32* operators, const i32* class_of_size, const i64* wanted, i64 capacity,
                double out_bytes_per_second, double in_bytes_per_second, i32 passes, i64* objects) {
  constexpr int kSpares = 6;  // times that objects are given up, so that rooms go round the step's end
  const Graph& graph = *static_cast<const Graph*>(handle);
  const Order order(graph, operators);
  if (!repair(order, class_of_size, wanted, capacity, objects)) return HUGE_VAL;
  std::vector<i32> pool_of_class(graph.num_sizes, -1), pool_of_size(graph.num_sizes);
  std::vector<i64> counts;
  for (i32 size = 0; size < graph.num_sizes; ++size)
    if (class_of_size[size] == size) {  // a class is named by its largest size
      pool_of_class[size] = static_cast<i32>(counts.size());
      counts.push_back(objects[size]);
    }
  for (i32 size = 0; size < graph.num_sizes; ++size) pool_of_size[size] = pool_of_class[class_of_size[size]];
  std::vector<double> seconds(graph.num_operators);
  for (i32 position = 0; position < graph.num_operators; ++position)
    seconds[position] = graph.seconds[operators[position]];
  std::vector<i64> used = counts, missing;
  for (int attempt = 0; attempt < kSpares; ++attempt) {
    Residency residency;
    if (!Walk(order, pool_of_size, used).run(residency)) return HUGE_VAL;
    const std::vector<i32> given = assign_objects(residency, counts, order.num_positions, missing);
    if (std::all_of(missing.begin(), missing.end(), [](i64 count) { return count == 0; }))
      return arrange(order, seconds, residency, given, {out_bytes_per_second, in_bytes_per_second}, passes);
    for (size_t pool = 0; pool < used.size(); ++pool) used[pool] = std::max<i64>(0, used[pool] - missing[pool]);
  }
  return HUGE_VAL;
}

}  // extern "C"
