// Orders typed nodes so that they run in few batches: the rule and the bound of _schedule.py in one
// pass over the edges, and the search that begins with the rule's result.
//
// A schedule is a sequence of types. Two properties make searching for a shorter one cheap. Read
// backwards it is a schedule of the reversed graph, so every method runs in both directions. And
// whatever lies between two places of a sequence is a graph of its own: the nodes that the part
// before cannot run yet and the part after cannot run alone. So a window is taken out, its nodes
// are scheduled by a beam search, and put back if that takes no more batches (large neighbourhood
// search, Shaw 1998); equally many are taken too, since they open other ways.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

using Ints = std::vector<int32_t>;
using Sequence = Ints;  // the type of each batch

constexpr double kRuleExponents[] = {8.0, std::numeric_limits<double>::infinity(), 4.0};
constexpr double kBeamExponents[] = {8.0, 12.0};
constexpr int kBeamWidth = 32;
constexpr int kWindows[] = {16, 32, 64};  // batches that are taken out together
constexpr int kMostRounds = 8;

struct Graph {
  int32_t num_nodes = 0, num_types = 0;
  Ints types, starts, arguments;       // node v reads arguments[starts[v]:starts[v + 1]]
  Ints reader_starts, readers;         // the readers of a node, as often as they read it
  Ints ahead;                          // [num_nodes, num_types]: most nodes of a type on one path
  Ints length;                         // of the longest path, the node included

  const int32_t* ahead_of(int32_t node) const { return &ahead[size_t(node) * num_types]; }

  int32_t num_arguments(int32_t node) const { return starts[node + 1] - starts[node]; }

  template <class Visit>
  void each_reader(int32_t node, Visit visit) const {
    for (int32_t k = reader_starts[node]; k < reader_starts[node + 1]; ++k) visit(readers[k]);
  }

  // Computes the other fields from types, starts and arguments.
  void finish() {
    reader_starts.assign(num_nodes + 1, 0);
    for (int32_t argument : arguments) ++reader_starts[argument + 1];
    std::partial_sum(reader_starts.begin(), reader_starts.end(), reader_starts.begin());
    readers.resize(arguments.size());
    Ints next(reader_starts.begin(), reader_starts.end() - 1);
    for (int32_t v = 0; v < num_nodes; ++v)
      for (int32_t k = starts[v]; k < starts[v + 1]; ++k) readers[next[arguments[k]]++] = v;
    ahead.assign(size_t(num_nodes) * num_types, 0);
    length.assign(num_nodes, 0);
    for (int32_t v = num_nodes - 1; v >= 0; --v) {
      int32_t* own = &ahead[size_t(v) * num_types];
      each_reader(v, [&](int32_t reader) {
        const int32_t* other = ahead_of(reader);
        for (int32_t t = 0; t < num_types; ++t) own[t] = std::max(own[t], other[t]);
        length[v] = std::max(length[v], length[reader]);
      });
      ++own[types[v]];
      ++length[v];
    }
  }

  int64_t lower_bound() const {
    Ints most(num_types, 0);
    for (int32_t v = 0; v < num_nodes; ++v)
      for (int32_t t = 0; t < num_types; ++t) most[t] = std::max(most[t], ahead_of(v)[t]);
    return std::accumulate(most.begin(), most.end(), int64_t(0));
  }
};

Graph reverse(const Graph& graph) {
  Graph result;
  result.num_nodes = graph.num_nodes;
  result.num_types = graph.num_types;
  result.starts.push_back(0);
  for (int32_t v = graph.num_nodes - 1; v >= 0; --v) {
    result.types.push_back(graph.types[v]);
    graph.each_reader(
        v, [&](int32_t reader) { result.arguments.push_back(graph.num_nodes - 1 - reader); });
    result.starts.push_back(int32_t(result.arguments.size()));
  }
  result.finish();
  return result;
}

Graph induce(const Graph& graph, const std::vector<char>& chosen) {
  Graph result;
  result.num_types = graph.num_types;
  result.starts.push_back(0);
  Ints number(graph.num_nodes, -1);
  for (int32_t v = 0; v < graph.num_nodes; ++v) {
    if (!chosen[v]) continue;
    number[v] = result.num_nodes++;
    result.types.push_back(graph.types[v]);
    for (int32_t k = graph.starts[v]; k < graph.starts[v + 1]; ++k)
      if (chosen[graph.arguments[k]]) result.arguments.push_back(number[graph.arguments[k]]);
    result.starts.push_back(int32_t(result.arguments.size()));
  }
  result.finish();
  return result;
}

// Nodes that are ready, by type, and the paths behind those of each type.
struct Frontier {
  std::vector<Ints> ready;
  Ints ahead;  // [num_types, num_types]: for each type the most ahead of any of its ready nodes

  explicit Frontier(int32_t num_types) : ready(num_types), ahead(num_types * num_types, 0) {}

  void arrive(const Graph& graph, int32_t node) {
    const int32_t type = graph.types[node], num_types = graph.num_types;
    ready[type].push_back(node);
    int32_t* own = &ahead[size_t(type) * num_types];
    const int32_t* other = graph.ahead_of(node);
    for (int32_t t = 0; t < num_types; ++t) own[t] = std::max(own[t], other[t]);
  }

  Ints take(int32_t type) {
    Ints batch;
    batch.swap(ready[type]);
    const size_t num_types = ready.size();
    std::fill_n(ahead.begin() + type * num_types, num_types, 0);
    return batch;
  }

  // True if running the type lowers the bound of the remaining graph.
  bool is_free(int32_t type) const {
    const size_t num_types = ready.size();
    int32_t others = 0;
    for (size_t t = 0; t < num_types; ++t)
      if (t != size_t(type)) others = std::max(others, ahead[t * num_types + type]);
    return ahead[type * num_types + type] > others;
  }
};

Ints count_waits(const Graph& graph) {
  Ints waits(graph.num_nodes);
  for (int32_t v = 0; v < graph.num_nodes; ++v) waits[v] = graph.num_arguments(v);
  return waits;
}

// Weight of a ready node: (l(v) / longest) ** exponent, l(v) the length of the path behind it.
std::vector<double> weigh(const Graph& graph, double exponent) {
  const double longest = graph.num_nodes
      ? *std::max_element(graph.length.begin(), graph.length.end()) : 1.0;
  std::vector<double> of_length(size_t(longest) + 1);
  for (size_t k = 0; k < of_length.size(); ++k) of_length[k] = std::pow(k / longest, exponent);
  std::vector<double> weights(graph.num_nodes);
  for (int32_t v = 0; v < graph.num_nodes; ++v) weights[v] = of_length[graph.length[v]];
  return weights;
}

// Counts of readers that have not run, from which the outputs that a batch frees follow.
class Unread {
 public:
  Unread(const Graph& graph, bool is_used) : graph_(graph), left_(is_used ? graph.num_nodes : 0) {
    for (size_t v = 0; v < left_.size(); ++v)
      left_[v] = graph.reader_starts[v + 1] - graph.reader_starts[v];
  }

  void run(const Ints& batch) {
    each_read(batch, [](int32_t& left) { --left; });
  }

  // Number of nodes that a batch frees, minus its own, which become live.
  int64_t freed_by(const Ints& batch) {
    int64_t freed = -int64_t(batch.size());
    each_read(batch, [&](int32_t& left) { freed += --left == 0; });
    each_read(batch, [](int32_t& left) { ++left; });
    return freed;
  }

 private:
  template <class Visit>
  void each_read(const Ints& batch, Visit visit) {
    for (int32_t node : batch)
      for (int32_t k = graph_.starts[node]; k < graph_.starts[node + 1]; ++k)
        visit(left_[graph_.arguments[k]]);
  }

  const Graph& graph_;
  Ints left_;
};

// The rule: run a free type if there is one, and of several the most urgent one; or, if memory is
// short, the one that frees most, which costs no batch.
Sequence by_rule(const Graph& graph, double exponent, bool frees_most = false) {
  Unread unread(graph, frees_most);
  const bool longest_only = std::isinf(exponent);
  std::vector<double> weights(graph.length.begin(), graph.length.end());
  if (!longest_only) weights = weigh(graph, exponent);
  Ints waits = count_waits(graph);
  Frontier frontier(graph.num_types);
  std::vector<double> urgency(graph.num_types, 0.0);
  auto arrive = [&](int32_t node) {
    frontier.arrive(graph, node);
    double& own = urgency[graph.types[node]];
    own = longest_only ? std::max(own, weights[node]) : own + weights[node];
  };
  for (int32_t v = 0; v < graph.num_nodes; ++v)
    if (waits[v] == 0) arrive(v);
  Sequence done;
  while (true) {
    int32_t best = -1;
    bool best_is_free = false;
    double best_value = 0.0;
    for (int32_t t = 0; t < graph.num_types; ++t) {
      if (frontier.ready[t].empty()) continue;
      const bool free = frontier.is_free(t);
      const bool by_memory = frees_most && free;
      const double value =
          by_memory ? double(unread.freed_by(frontier.ready[t])) : urgency[t];
      if (best < 0 || free > best_is_free || (free == best_is_free && value > best_value)) {
        best = t;
        best_is_free = free;
        best_value = value;
      }
    }
    if (best < 0) return done;
    done.push_back(best);
    urgency[best] = 0.0;
    const Ints batch = frontier.take(best);
    if (frees_most) unread.run(batch);
    for (int32_t node : batch)
      graph.each_reader(node, [&](int32_t reader) {
        if (--waits[reader] == 0) arrive(reader);
      });
  }
}

uint64_t hash_of(uint64_t node) {  // splitmix64
  uint64_t z = (node + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// State of the search after some nodes have run, and the last step to it.
struct State {
  Ints waits;
  Frontier frontier;
  double weight;   // of all ready nodes
  uint64_t done;   // a hash of the nodes that have run
  int32_t last;    // entry of the history
};

struct Step {
  int32_t before, type;
};

struct Candidate {
  double key;
  int32_t state, type;
  uint64_t done;
  double weight;
};

// Evaluates running a type in a state; the state is changed and restored.
Candidate evaluate(const Graph& graph, State& state, int32_t type, const std::vector<double>& weights) {
  const int32_t num_types = graph.num_types;
  Candidate result{0.0, 0, type, state.done, state.weight};
  Ints most(num_types, 0);
  for (int32_t t = 0; t < num_types; ++t)
    if (t != type)
      for (int32_t k = 0; k < num_types; ++k)
        most[k] = std::max(most[k], state.frontier.ahead[size_t(t) * num_types + k]);
  for (int32_t node : state.frontier.ready[type]) {
    result.done ^= hash_of(uint64_t(node));
    result.weight -= weights[node];
    graph.each_reader(node, [&](int32_t reader) {
      if (--state.waits[reader] != 0) return;
      result.weight += weights[reader];
      const int32_t* other = graph.ahead_of(reader);
      for (int32_t k = 0; k < num_types; ++k) most[k] = std::max(most[k], other[k]);
    });
  }
  for (int32_t node : state.frontier.ready[type])
    graph.each_reader(node, [&](int32_t reader) { ++state.waits[reader]; });
  const int64_t remaining = std::accumulate(most.begin(), most.end(), int64_t(0));
  // The bound of the remaining graph comes first; the logarithm breaks ties.
  result.key = double(remaining) + std::log(std::max(result.weight, 1e-300));
  if (remaining == 0) result.key = -std::numeric_limits<double>::infinity();
  return result;
}

// Beam search: of all states that as many batches lead to, the most promising go on. Returns
// nothing where that takes more than `most` batches.
Sequence by_beam(const Graph& graph, int width, double exponent, size_t most) {
  const std::vector<double> weights = weigh(graph, exponent);
  std::vector<Step> history;
  std::vector<State> states;
  states.push_back(State{count_waits(graph), Frontier(graph.num_types), 0.0, 0, -1});
  for (int32_t v = 0; v < graph.num_nodes; ++v) {
    if (states[0].waits[v] != 0) continue;
    states[0].frontier.arrive(graph, v);
    states[0].weight += weights[v];
  }
  for (size_t num_batches = 0;; ++num_batches) {
    std::vector<Candidate> candidates;
    std::unordered_set<uint64_t> seen;
    for (size_t s = 0; s < states.size(); ++s) {
      State& state = states[s];
      bool is_done = true, any_free = false;
      for (int32_t t = 0; t < graph.num_types; ++t) {
        if (state.frontier.ready[t].empty()) continue;
        is_done = false;
        any_free = any_free || state.frontier.is_free(t);
      }
      if (is_done) {
        Sequence result;
        for (int32_t k = state.last; k >= 0; k = history[k].before)
          result.push_back(history[k].type);
        return Sequence(result.rbegin(), result.rend());
      }
      for (int32_t t = 0; t < graph.num_types; ++t) {
        if (state.frontier.ready[t].empty()) continue;
        if (any_free && !state.frontier.is_free(t)) continue;
        Candidate found = evaluate(graph, state, t, weights);
        found.state = int32_t(s);
        if (seen.insert(found.done).second) candidates.push_back(found);
      }
    }
    if (num_batches == most) return {};
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate& a, const Candidate& b) { return a.key < b.key; });
    if (candidates.size() > size_t(width)) candidates.resize(size_t(width));
    std::vector<State> next;
    next.reserve(candidates.size());
    Ints uses(states.size(), 0);
    for (const Candidate& each : candidates) ++uses[each.state];
    for (const Candidate& each : candidates) {
      State& old = states[each.state];
      next.push_back(--uses[each.state] == 0 ? std::move(old) : old);
      State& state = next.back();
      for (int32_t node : state.frontier.take(each.type))
        graph.each_reader(node, [&](int32_t reader) {
          if (--state.waits[reader] == 0) state.frontier.arrive(graph, reader);
        });
      state.weight = std::max(each.weight, 0.0);
      state.done = each.done;
      history.push_back({state.last, each.type});
      state.last = int32_t(history.size()) - 1;
    }
    states.swap(next);
  }
}

// The batch of every node if each runs as early as a sequence allows.
Ints find_earliest(const Graph& graph, const Sequence& sequence) {
  Ints waits = count_waits(graph), batch_of(graph.num_nodes, -1);
  std::vector<Ints> ready(graph.num_types);
  for (int32_t v = 0; v < graph.num_nodes; ++v)
    if (waits[v] == 0) ready[graph.types[v]].push_back(v);
  for (size_t batch = 0; batch < sequence.size(); ++batch) {
    Ints nodes;
    nodes.swap(ready[sequence[batch]]);
    for (int32_t node : nodes) {
      batch_of[node] = int32_t(batch);
      graph.each_reader(node, [&](int32_t reader) {
        if (--waits[reader] == 0) ready[graph.types[reader]].push_back(reader);
      });
    }
  }
  return batch_of;
}

// The sequence without batches that stay empty when every node runs as early as it can.
Sequence drop_empty(const Graph& graph, const Sequence& sequence) {
  std::vector<char> is_used(sequence.size(), 0);
  for (int32_t batch : find_earliest(graph, sequence)) is_used[batch] = 1;
  Sequence result;
  for (size_t batch = 0; batch < sequence.size(); ++batch)
    if (is_used[batch]) result.push_back(sequence[batch]);
  return result;
}

// Takes windows out of a sequence and schedules their nodes anew.
Sequence shorten(const Graph& graph, const Graph& backward, Sequence sequence, size_t bound) {
  for (int round = 0; round < kMostRounds && sequence.size() > bound; ++round) {
    const size_t before = sequence.size();
    const int32_t window = kWindows[round % 3];
    for (int32_t first = 0; first < int32_t(sequence.size()); first += window / 2) {
      const int32_t count = int32_t(sequence.size());
      const int32_t last = std::min(first + window, count);
      const Ints from_front = find_earliest(graph, sequence);
      const Ints from_back = find_earliest(backward, Sequence(sequence.rbegin(), sequence.rend()));
      std::vector<char> between(graph.num_nodes);
      for (int32_t v = 0; v < graph.num_nodes; ++v) {
        const int32_t latest = count - 1 - from_back[graph.num_nodes - 1 - v];
        between[v] = from_front[v] >= first && latest < last;
      }
      const Graph part = induce(graph, between);
      const Sequence found =
          by_beam(part, kBeamWidth, kBeamExponents[round % 2], size_t(last - first));
      if (part.num_nodes > 0 && found.empty()) continue;
      Sequence changed(sequence.begin(), sequence.begin() + first);
      changed.insert(changed.end(), found.begin(), found.end());
      changed.insert(changed.end(), sequence.begin() + last, sequence.end());
      sequence = drop_empty(graph, changed);
    }
    if (sequence.size() == before && round >= 2) break;
  }
  return sequence;
}

int64_t count_by_depth(const Graph& graph) {
  Ints depth(graph.num_nodes, 0);
  std::vector<char> seen;
  int64_t count = 0;
  for (int32_t v = 0; v < graph.num_nodes; ++v) {
    for (int32_t k = graph.starts[v]; k < graph.starts[v + 1]; ++k)
      depth[v] = std::max(depth[v], depth[graph.arguments[k]] + 1);
    const size_t kind = size_t(depth[v]) * graph.num_types + graph.types[v];
    if (kind >= seen.size()) seen.resize(2 * kind + 1, 0);
    count += !seen[kind];
    seen[kind] = 1;
  }
  return count;
}

// The best sequence of all methods; without `search`, of the rule alone.
Sequence best_sequence(const Graph& graph, bool search, bool frees_most, size_t bound) {
  Sequence best;
  bool found = false;
  auto keep = [&](const Sequence& given) {
    Sequence sequence = given.size() <= bound ? given : drop_empty(graph, given);
    if (!found || sequence.size() < best.size()) best.swap(sequence);
    found = true;
    return best.size() <= bound;
  };
  for (double exponent : kRuleExponents)
    if (keep(by_rule(graph, exponent, frees_most))) return best;
  const Graph backward = reverse(graph);
  auto keep_reversed = [&](const Sequence& sequence) {
    return keep(Sequence(sequence.rbegin(), sequence.rend()));
  };
  for (double exponent : kRuleExponents)
    if (keep_reversed(by_rule(backward, exponent))) return best;
  if (!search) return best;
  const Sequence from_rule = best;
  for (double exponent : kBeamExponents) {
    Sequence sequence = by_beam(graph, kBeamWidth, exponent, best.size());
    if (!sequence.empty() && keep(sequence)) return best;
    sequence = by_beam(backward, kBeamWidth, exponent, best.size());
    if (!sequence.empty() && keep_reversed(sequence)) return best;
  }
  const Sequence from_beam = best;
  keep(shorten(graph, backward, from_rule, bound));
  keep(shorten(graph, backward, from_beam, bound));
  return best;
}

}  // namespace

struct OrderRequest {
  int64_t num_nodes, num_types;
  const int64_t *types, *starts, *arguments;
  int64_t search, frees_most;
  int64_t *order, *begins, *kinds;
  int64_t lower_bound, num_by_depth;
};

// Schedules a graph. `order` gets the nodes in execution order, `begins` the first place of each
// batch (num_nodes + 1 entries), `kinds` the type of each batch. Returns the number of batches.
extern "C" int64_t penstock_batching_order(OrderRequest* request) {
  const int64_t num_nodes = request->num_nodes, *starts = request->starts;
  int64_t *order = request->order, *begins = request->begins;
  Graph graph;
  graph.num_nodes = int32_t(num_nodes);
  graph.num_types = int32_t(request->num_types);
  graph.types.assign(request->types, request->types + num_nodes);
  graph.starts.assign(starts, starts + num_nodes + 1);
  graph.arguments.assign(request->arguments, request->arguments + starts[num_nodes]);
  graph.finish();
  request->lower_bound = graph.lower_bound();
  const Sequence sequence =
      best_sequence(graph, request->search != 0, request->frees_most != 0,
                    size_t(request->lower_bound));
  request->num_by_depth = count_by_depth(graph);
  const Ints batch_of = find_earliest(graph, sequence);
  std::fill_n(begins, sequence.size() + 1, int64_t(0));
  for (int32_t batch : batch_of) ++begins[batch + 1];
  std::partial_sum(begins, begins + sequence.size() + 1, begins);
  std::vector<int64_t> next(begins, begins + sequence.size());
  for (int32_t v = 0; v < graph.num_nodes; ++v) order[next[batch_of[v]]++] = v;
  std::copy(sequence.begin(), sequence.end(), request->kinds);
  return int64_t(sequence.size());
}
