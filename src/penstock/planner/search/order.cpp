// Orders of operators.

namespace {

// Weights of the score of a greedy order; the ready operator with the least score runs next:
// fetch * bytes to fetch + create * bytes made - release * bytes freed + late * operators overtaken.
struct GreedyWeights {
  double fetch, create, release, late;
  i64 capacity;  // bytes touched since an object's last use after which it counts as evicted
  i32 window;    // candidates, the earliest of the program first
};

// List scheduling of positions [begin, end) of `base`; the others stay where they are.
void order_greedily(const Problem& p, const i32* base, i32 begin, i32 end, const GreedyWeights& weights, i32* order) {
  const i32 n = p.num_operators;
  std::copy(base, base + n, order);
  std::vector<i32> rank(n), waiting(n, 0), uses(p.num_objects, 0);
  std::vector<double> touched(p.num_objects, -1e300);
  std::vector<std::vector<i32>> successors(n);
  for (i32 position = 0; position < n; ++position) rank[base[position]] = position;
  for (i32 position = begin; position < end; ++position) {
    const i32 op = base[position];
    for (i32 k = p.first_predecessor[op]; k < p.first_predecessor[op + 1]; ++k) {
      const i32 before = p.predecessors[k];
      if (rank[before] < begin) continue;
      ++waiting[op];
      successors[before].push_back(op);
    }
  }
  double clock = 0;
  auto touch = [&](i32 op) {
    for (i32 k = p.first_access[op]; k < p.first_access[op + 1]; ++k) {
      const i32 object = p.access_object[k];
      if (clock - touched[object] > static_cast<double>(weights.capacity) || p.access_kind[k] == kCreate)
        clock += static_cast<double>(p.bytes[object]);
      touched[object] = clock;
      --uses[object];
    }
  };
  for (i32 k = 0; k < p.first_access[n]; ++k) ++uses[p.access_object[k]];
  for (i32 position = 0; position < begin; ++position) touch(base[position]);
  // Ready operators by rank: few are candidates, so a sorted vector of ranks will do.
  std::vector<i32> ready;
  for (i32 position = begin; position < end; ++position)
    if (waiting[base[position]] == 0) ready.push_back(position);
  for (i32 position = begin; position < end; ++position) {
    double best = std::numeric_limits<double>::infinity();
    size_t chosen = 0;
    const size_t looked_at = std::min<size_t>(ready.size(), weights.window);
    for (size_t r = 0; r < looked_at; ++r) {
      const i32 op = base[ready[r]];
      double fetch = 0, create = 0, release = 0;
      for (i32 k = p.first_access[op]; k < p.first_access[op + 1]; ++k) {
        const i32 object = p.access_object[k];
        const double bytes = static_cast<double>(p.bytes[object]);
        if (p.access_kind[k] == kCreate) create += bytes;
        else if (clock - touched[object] > static_cast<double>(weights.capacity)) fetch += bytes;
        if (uses[object] == 1 && !(p.flags[object] & (kPersistent | kKept))) release += bytes;
      }
      const double score = weights.fetch * fetch + weights.create * create - weights.release * release +
                           weights.late * (ready[r] - ready[0]);
      if (score < best) {
        best = score;
        chosen = r;
      }
    }
    const i32 op = base[ready[chosen]];
    ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(chosen));
    order[position] = op;
    touch(op);
    for (i32 next : successors[op])
      if (--waiting[next] == 0) ready.insert(std::lower_bound(ready.begin(), ready.end(), rank[next]), rank[next]);
  }
}

}  // namespace
