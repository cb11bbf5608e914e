// The layout of outputs and the rows that each batch reads, as in _layout.py, in a few passes over
// the arguments. Compiled together with schedule.cpp.

namespace {

using Longs = std::vector<int64_t>;

// Types that are read as the same argument of one type share a pool; pools are numbered in the
// order of their first types.
void number_pools(int64_t num_nodes, int64_t num_types, const int64_t* types, const int64_t* starts,
                  const int64_t* arguments, int64_t most_arguments, int64_t* pool_of_kind) {
  Longs parent(num_types);
  std::iota(parent.begin(), parent.end(), int64_t(0));
  auto root = [&](int64_t kind) {
    while (parent[kind] != kind) kind = parent[kind] = parent[parent[kind]];
    return kind;
  };
  Longs read_as(num_types * std::max<int64_t>(most_arguments, 1), -1);
  for (int64_t v = 0; v < num_nodes; ++v) {
    int64_t* own = &read_as[types[v] * most_arguments];
    for (int64_t k = starts[v]; k < starts[v + 1]; ++k) {
      const int64_t kind = types[arguments[k]];
      int64_t& first = own[k - starts[v]];
      if (first < 0) first = kind;
      if (first == kind) continue;
      const int64_t one = root(first), other = root(kind);
      parent[std::max(one, other)] = std::min(one, other);
    }
  }
  Longs number(num_types, -1);
  int64_t num_pools = 0;
  for (int64_t kind = 0; kind < num_types; ++kind) {
    int64_t& own = number[root(kind)];
    if (own < 0) own = num_pools++;
    pool_of_kind[kind] = own;
  }
}

}  // namespace

struct LayoutRequest {
  int64_t num_nodes, num_types;
  const int64_t *types, *starts, *arguments;
  int64_t num_batches;
  const int64_t *begins, *kinds, *first_rows;
  int64_t *nodes, *pool_of_kind, *batch_of, *row_of, *places, *index, *plan;
  int64_t num_gathered;
};

// Lays out a schedule. `first_rows`, unless null, has the first row of each batch in its pool.
// `nodes` comes in the order of the schedule and leaves in the order of the rows; `places` gets the
// number of each node within its type. `index` gets the rows to gather, `plan` for every batch:
// kind, count, pool, first row, first input or -1, number of operands; and for every operand: pool,
// first row or -1, the range of its rows in `index`, number of slots, these, number of batches that
// write its rows, these. Returns the length of `plan`.
extern "C" int64_t penstock_batching_layout(LayoutRequest* request) {
  const int64_t num_nodes = request->num_nodes, num_types = request->num_types;
  const int64_t num_batches = request->num_batches;
  const int64_t *types = request->types, *starts = request->starts;
  const int64_t *arguments = request->arguments, *begins = request->begins;
  const int64_t *kinds = request->kinds, *first_rows = request->first_rows;
  int64_t *nodes = request->nodes, *pool_of_kind = request->pool_of_kind;
  int64_t *batch_of = request->batch_of, *row_of = request->row_of;
  int64_t *places = request->places, *index = request->index, *plan = request->plan;
  int64_t most = 1;
  for (int64_t v = 0; v < num_nodes; ++v) most = std::max(most, starts[v + 1] - starts[v]);
  number_pools(num_nodes, num_types, types, starts, arguments, most, pool_of_kind);
  for (int64_t batch = 0; batch < num_batches; ++batch)
    for (int64_t k = begins[batch]; k < begins[batch + 1]; ++k) batch_of[nodes[k]] = batch;

  // From the last batch backwards: nodes that are read together are adjacent, in the order of their
  // first readers: by batch, by argument, by the reader's place. Reads go on a stack of the batch
  // that is read, those of later readers first, so the stack has them in that order.
  const int64_t num_reads = starts[num_nodes];
  Longs top(num_batches, -1), below(num_reads), read(num_reads), num_read(num_batches, 0), left;
  std::vector<char> has_place(num_nodes, 0);
  int64_t used = 0;
  for (int64_t batch = num_batches - 1; batch >= 0; --batch) {
    const int64_t first = begins[batch], last = begins[batch + 1];
    left.assign(nodes + first, nodes + last);
    int64_t place = first;
    for (int64_t k = top[batch]; k >= 0; k = below[k]) {
      if (has_place[read[k]]) continue;
      has_place[read[k]] = 1;
      nodes[place++] = read[k];
    }
    num_read[batch] = place - first;
    for (int64_t node : left)
      if (!has_place[node]) nodes[place++] = node;
    const int64_t arity = starts[nodes[first] + 1] - starts[nodes[first]];
    for (int64_t slot = arity - 1; slot >= 0; --slot)
      for (int64_t k = last - 1; k >= first; --k) {
        const int64_t node = arguments[starts[nodes[k]] + slot], source = batch_of[node];
        read[used] = node;
        below[used] = top[source];
        top[source] = used++;
      }
  }

  Longs next_place(num_types, 0), place_of(num_nodes);
  for (int64_t v = 0; v < num_nodes; ++v) place_of[v] = next_place[types[v]]++;
  std::vector<std::pair<int64_t, int64_t>> keyed;
  Longs next_row(num_types, 0), seen(num_batches, -1), sources, scattered;
  int64_t stamp = 0, gathered = 0;
  int64_t* out = plan;
  for (int64_t batch = 0; batch < num_batches; ++batch) {
    const int64_t first = begins[batch], last = begins[batch + 1], kind = kinds[batch];
    const int64_t arity = starts[nodes[first] + 1] - starts[nodes[first]];
    if (arity > 0) {  // nodes without readers take the order of their operands
      keyed.clear();
      for (int64_t k = first + num_read[batch]; k < last; ++k)
        keyed.push_back({row_of[arguments[starts[nodes[k]]]], k});
      std::sort(keyed.begin(), keyed.end());
      for (auto& [key, k] : keyed) k = nodes[k];
      for (size_t k = 0; k < keyed.size(); ++k) nodes[last - keyed.size() + k] = keyed[k].second;
    }
    const int64_t pool = pool_of_kind[kind];
    if (first_rows != nullptr) next_row[pool] = first_rows[batch];
    bool in_order = true;
    for (int64_t k = first; k < last; ++k) {
      row_of[nodes[k]] = next_row[pool] + k - first;
      places[k] = place_of[nodes[k]];
      in_order = in_order && places[k] == places[first] + k - first;
    }
    *out++ = kind;
    *out++ = last - first;
    *out++ = pool;
    *out++ = next_row[pool];
    *out++ = in_order ? places[first] : -1;
    int64_t* num_operands = out++;
    *num_operands = 0;
    next_row[pool] += last - first;

    auto argument = [&](int64_t k, int64_t slot) { return arguments[starts[nodes[k]] + slot]; };
    // An operand of one slot with consecutive rows from `start` on, or of several, gathered.
    auto write_operand = [&](const Longs& slots, int64_t from, int64_t start) {
      ++*num_operands;
      ++stamp;
      sources.clear();
      const int64_t begin = start < 0 ? gathered : 0;
      for (int64_t slot : slots)
        for (int64_t k = first; k < last; ++k) {
          if (start < 0) index[gathered++] = row_of[argument(k, slot)];
          const int64_t source = batch_of[argument(k, slot)];
          if (seen[source] == stamp) continue;
          seen[source] = stamp;
          sources.push_back(source);
        }
      std::sort(sources.begin(), sources.end());
      const int64_t fields[] = {from, start, begin, start < 0 ? gathered : last - first,
                                int64_t(slots.size())};
      out = std::copy(std::begin(fields), std::end(fields), out);
      out = std::copy(slots.begin(), slots.end(), out);
      *out++ = int64_t(sources.size());
      out = std::copy(sources.begin(), sources.end(), out);
    };
    auto pool_of = [&](int64_t slot) { return pool_of_kind[types[argument(first, slot)]]; };
    scattered.clear();
    for (int64_t slot = 0; slot < arity; ++slot) {
      const int64_t start = row_of[argument(first, slot)];
      bool follows = true;
      for (int64_t k = first; k < last && follows; ++k)
        follows = row_of[argument(k, slot)] == start + k - first;
      if (follows)
        write_operand({slot}, pool_of(slot), start);
      else
        scattered.push_back(slot);
    }
    // Operands that are not contiguous are gathered at once, pool by pool.
    while (!scattered.empty()) {
      const int64_t from = pool_of(scattered[0]);
      Longs together, others;
      for (int64_t slot : scattered) (pool_of(slot) == from ? together : others).push_back(slot);
      write_operand(together, from, -1);
      scattered.swap(others);
    }
  }
  request->num_gathered = gathered;
  return out - plan;
}
