// Evaluates candidates of the genetic search (`_genetic.py`): from genes to the time of a step.
//
// This is what `_order`, `_walk`, `_genetic_objects` and `_timing` do in Python, function by function,
// for the one case that the search asks for thousands of times: every operator once, pools of equal
// objects, Belady's choice of victims. `_genetic_engine.py` owns all memory. Tests hold both to the
// same result, to the last bit.
//
// First part: the graph, what an order of it asks of memory, and allocations that give it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <queue>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using i32 = std::int32_t;
using i64 = std::int64_t;

constexpr i64 kNever = i64{1} << 60;      // the next use of what nobody uses again
constexpr i64 kUnbounded = i64{1} << 62;  // the end of a room that is still taken

// Lists of lists in one array.
struct Lists {
  std::vector<i32> first, items;

  Lists(const i32* offsets, const i32* values, i32 count)
      : first(offsets, offsets + count + 1), items(values, values + offsets[count]) {}
  const i32* begin(i32 list) const { return items.data() + first[list]; }
  const i32* end(i32 list) const { return items.data() + first[list + 1]; }
};

struct Graph {
  i32 num_operators, num_values, num_storages, num_sizes;
  std::vector<double> seconds;               // of each operator
  std::vector<i32> storage_of_value;
  std::vector<i32> size_of_value;            // index of the distinct size; -1 for no bytes
  std::vector<i64> sizes;                    // distinct sizes, in rising order
  std::vector<i32> initial, final;           // values of each storage; -1 for none
  std::vector<std::uint8_t> persistent;      // of each storage
  Lists needs, creates;                      // values of each operator; those without bytes are not there
  Lists mutates, overwrites;                 // pairs (old, new), flat
  std::vector<i32> initial_of_final;         // by value: what it is called a step later; -1 if the same
  std::vector<std::uint8_t> pinned;          // by value: stays to the end of the step
  std::vector<i32> inputs;                   // values that the caller puts in place
};

// What an operator does with memory at one position: ranges of the arrays of an `Order`.
struct Visit {
  i32 needs, num_needs;
  i32 makes, num_creates, num_makes;  // created values first, then those that are handed over
  i32 handovers, num_handovers;       // pairs (old, new)
};

// A graph in an order, seen from memory; positions of the next step count on.
struct Order {
  const Graph& graph;
  i32 num_positions;
  std::vector<Visit> visits;
  std::vector<i32> needs, makes;
  std::vector<i64> next_needs, next_makes;
  std::vector<std::pair<i32, i32>> handovers;
  std::vector<i64> next_initial;  // by value: where in the step it is needed first, or kNever

  Order(const Graph& g, const i32* operators)
      : graph(g), num_positions(g.num_operators), visits(g.num_operators), next_initial(g.num_values, kNever) {
    std::vector<i64> next_use(g.num_values, kNever);
    for (i32 position = num_positions - 1; position >= 0; --position)
      visit(operators[position], i64{num_positions} + position, next_use, visits[position]);
    begin_again(next_use);
    needs.clear(), makes.clear(), next_needs.clear(), next_makes.clear(), handovers.clear();
    for (i32 position = num_positions - 1; position >= 0; --position)
      visit(operators[position], position, next_use, visits[position]);
  }

  bool hands_over(const Visit& v, i32 value) const {
    for (i32 k = v.handovers; k < v.handovers + v.num_handovers; ++k)
      if (handovers[k].first == value) return true;
    return false;
  }

 private:
  // The step after this one needs what persistent storages hold, under the names of this one.
  void begin_again(std::vector<i64>& next_use) {
    std::vector<i64> first(graph.num_values, kNever);
    for (i32 storage = 0; storage < graph.num_storages; ++storage) {
      const i32 value = graph.initial[storage];
      if (value < 0 || next_use[value] == kNever) continue;
      next_initial[value] = next_use[value] - num_positions;
      if (!graph.persistent[storage]) continue;
      first[graph.final[storage] < 0 ? value : graph.final[storage]] = next_use[value];
    }
    next_use.swap(first);
  }

  // One position of a scan from the end of the step to its beginning.
  void visit(i32 op, i64 at, std::vector<i64>& next_use, Visit& v) {
    const Graph& g = graph;
    v.handovers = static_cast<i32>(handovers.size());
    for (const i32* pair = g.mutates.begin(op); pair < g.mutates.end(op); pair += 2)
      handovers.emplace_back(pair[0], pair[1]);
    const i32 num_mutates = static_cast<i32>(handovers.size()) - v.handovers;
    auto is_mutated = [&](i32 value) {
      for (i32 k = v.handovers; k < v.handovers + num_mutates; ++k)
        if (handovers[k].first == value) return true;
      return false;
    };
    v.needs = static_cast<i32>(needs.size());
    for (const i32* value = g.needs.begin(op); value < g.needs.end(op); ++value) {
      needs.push_back(*value);
      next_needs.push_back(is_mutated(*value) ? kNever : next_use[*value]);
    }
    v.num_needs = static_cast<i32>(needs.size()) - v.needs;
    auto lasts = [&](i32 value) {
      for (i32 k = v.needs; k < v.needs + v.num_needs; ++k)
        if (needs[k] == value) return next_needs[k] != kNever;
      return false;
    };
    for (const i32* pair = g.overwrites.begin(op); pair < g.overwrites.end(op); pair += 2) {
      const auto [old, made] = std::pair(pair[0], pair[1]);
      bool free = !lasts(old) && !g.pinned[old] && g.size_of_value[old] >= 0 &&
                  g.size_of_value[old] == g.size_of_value[made];
      for (i32 k = v.handovers; k < static_cast<i32>(handovers.size()); ++k)
        free = free && handovers[k].first != old && handovers[k].second != made;
      if (free) handovers.emplace_back(old, made);
    }
    v.num_handovers = static_cast<i32>(handovers.size()) - v.handovers;
    v.makes = static_cast<i32>(makes.size());
    for (const i32* value = g.creates.begin(op); value < g.creates.end(op); ++value) {
      bool handed = false;
      for (i32 k = v.handovers; k < v.handovers + v.num_handovers; ++k) handed |= handovers[k].second == *value;
      if (!handed) makes.push_back(*value);
    }
    v.num_creates = static_cast<i32>(makes.size()) - v.makes;
    for (i32 k = v.handovers; k < v.handovers + v.num_handovers; ++k) makes.push_back(handovers[k].second);
    v.num_makes = static_cast<i32>(makes.size()) - v.makes;
    for (i32 k = v.makes; k < v.makes + v.num_makes; ++k) {
      next_makes.push_back(next_use[makes[k]]);
      next_use[makes[k]] = kNever;
    }
    for (i32 k = v.handovers; k < v.handovers + num_mutates; ++k) next_use[handovers[k].first] = kNever;
    for (i32 k = v.needs; k < v.needs + v.num_needs; ++k) next_use[needs[k]] = at;
  }
};

// How many objects of each distinct size live at once, at most.
std::vector<i64> most_at_once(const Order& order) {
  const Graph& g = order.graph;
  std::vector<i64> live(g.num_sizes, 0);
  for (i32 storage = 0; storage < g.num_storages; ++storage) {
    const i32 value = g.initial[storage];
    if (value >= 0 && g.size_of_value[value] >= 0) ++live[g.size_of_value[value]];
  }
  std::vector<i64> most = live;
  for (const Visit& v : order.visits) {
    for (i32 k = v.makes; k < v.makes + v.num_creates; ++k) {
      const i32 size = g.size_of_value[order.makes[k]];
      most[size] = std::max(most[size], ++live[size]);
    }
    auto die = [&](i32 value, i64 after) {
      if (after >= kNever && !order.hands_over(v, value) && !g.persistent[g.storage_of_value[value]])
        --live[g.size_of_value[value]];
    };
    for (i32 k = v.needs; k < v.needs + v.num_needs; ++k) die(order.needs[k], order.next_needs[k]);
    for (i32 k = v.makes; k < v.makes + v.num_makes; ++k) die(order.makes[k], order.next_makes[k]);
  }
  return most;
}

// How many objects of each class an operator needs at once, at most; classes by size index. What
// the operator before has made counts too: it cannot have left yet.
std::vector<i64> least_at_once(const Order& order, const i32* class_of_size) {
  const Graph& g = order.graph;
  std::vector<i64> least(g.num_sizes, 0), count(g.num_sizes, 0);
  std::vector<i32> values, before;
  for (const Visit& v : order.visits) {
    values = before;
    values.insert(values.end(), order.needs.begin() + v.needs, order.needs.begin() + v.needs + v.num_needs);
    values.insert(values.end(), order.makes.begin() + v.makes, order.makes.begin() + v.makes + v.num_creates);
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
    for (i32 value : values) {
      const i32 name = class_of_size[g.size_of_value[value]];
      least[name] = std::max(least[name], ++count[name]);
    }
    for (i32 value : values) count[class_of_size[g.size_of_value[value]]] = 0;
    before.clear();
    for (i32 k = v.makes; k < v.makes + v.num_makes; ++k)
      if (k < v.makes + v.num_creates || !order.hands_over(v, order.makes[k])) before.push_back(order.makes[k]);
  }
  return least;
}

// Makes the counts of an allocation fit every operator and the capacity; false if that cannot be.
bool repair(const Order& order, const i32* class_of_size, const i64* wanted, i64 capacity, i64* objects) {
  const Graph& g = order.graph;
  const std::vector<i64> least = least_at_once(order, class_of_size), most_of_size = most_at_once(order);
  std::vector<i64> most(g.num_sizes, 0), more(g.num_sizes, 0);
  std::vector<std::uint8_t> is_class(g.num_sizes, 0);
  for (i32 size = 0; size < g.num_sizes; ++size) {
    most[class_of_size[size]] += most_of_size[size];
    is_class[class_of_size[size]] = 1;
  }
  i64 free = capacity, asked = 0;
  for (i32 name = 0; name < g.num_sizes; ++name) free -= g.sizes[name] * least[name];
  if (free < 0) return false;
  for (i32 name = 0; name < g.num_sizes; ++name) {
    if (!is_class[name]) continue;
    more[name] = std::max<i64>(0, std::min(wanted[name], std::max(most[name], least[name])) - least[name]);
    asked += g.sizes[name] * more[name];
  }
  const double share = asked ? std::min(1.0, static_cast<double>(free) / static_cast<double>(asked)) : 0.0;
  free = capacity;
  for (i32 name = 0; name < g.num_sizes; ++name) {
    objects[name] = is_class[name] ? least[name] + static_cast<i64>(static_cast<double>(more[name]) * share) : 0;
    free -= g.sizes[name] * objects[name];
  }
  for (i32 name = g.num_sizes - 1; name >= 0; --name) {  // what is left goes to whoever can use it
    if (!is_class[name]) continue;
    const i64 extra = std::min(free / g.sizes[name], std::max<i64>(0, most[name] - objects[name]));
    objects[name] += extra;
    free -= extra * g.sizes[name];
  }
  return true;
}

}  // namespace
