// Search for the order of a program's operators whose spills over fixed scratchpads cost least.
//
// For one order it has to be chosen in which holes (between two uses of a buffer) the buffer is kept in
// the scratchpad; every other hole costs a spill. The search needs this thousands of times a second,
// so it keeps holes greedily by what they save for the bytes and time they take. The exact answer for
// the best orders, and the bound, come from a solver afterwards.
//
// An order is decoded from a list of anchors: the operators that do more than prepare one other
// operator. Each anchor is preceded by what it needs and what has not run yet, so every list of
// anchors is legal, and what only loads an operand runs at the last moment, which is never worse.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace {

// Mirrored field by field in `_search.py`.
struct Request {
  int64_t num_operators, num_buffers, num_pools;
  const int64_t *first_predecessor, *predecessors;  // of each operator: CSR
  const int64_t *first_use, *uses;                  // the buffers of each operator: CSR
  const int64_t *pool, *size, *cost;                // of each buffer
  const int64_t* capacity;                          // of each pool
  const uint8_t* is_anchor;                         // of each operator
  double time_limit;
  int64_t seed;
  double temperature;  // at the start, as a share of the first cost
  const std::atomic<int32_t>* stop;
};

struct Hole {
  int begin, end;  // the positions between two uses, half-open
  int64_t size, cost;
  double worth;
};

class Evaluator {
 public:
  explicit Evaluator(const Request& request) : request_(request), last_use_(request.num_buffers) {
    holes_.resize(request.num_pools);
    load_.resize(request.num_pools);
    for (auto& load : load_) load.resize(request.num_operators);
    for (double exponent : {1.0, 0.6, 0.3}) {
      price_of_length_.emplace_back();
      for (int64_t length = 0; length <= request.num_operators; ++length) {
        price_of_length_.back().push_back(std::pow(static_cast<double>(length), exponent));
      }
    }
  }

  // The cost of the spills along an order; -1 where an operator's own buffers do not fit.
  int64_t cost(const std::vector<int>& order) {
    collect(order);
    int64_t total = 0;
    for (int64_t p = 0; p < request_.num_pools; ++p) {
      if (*std::max_element(load_[p].begin(), load_[p].end()) > request_.capacity[p]) return -1;
      if (!contested(p)) continue;
      int64_t least = std::numeric_limits<int64_t>::max();
      for (const std::vector<double>& price : price_of_length_) {
        least = std::min(least, keep(p, price));
      }
      total += least;
    }
    return total;
  }

 private:
  void collect(const std::vector<int>& order) {
    std::fill(last_use_.begin(), last_use_.end(), -1);
    for (auto& holes : holes_) holes.clear();
    for (auto& load : load_) std::fill(load.begin(), load.end(), 0);
    for (size_t t = 0; t < order.size(); ++t) {
      const int64_t op = order[t];
      for (int64_t u = request_.first_use[op]; u < request_.first_use[op + 1]; ++u) {
        const int64_t b = request_.uses[u], pool = request_.pool[b];
        load_[pool][t] += request_.size[b];
        if (last_use_[b] >= 0 && last_use_[b] + 1 < static_cast<int>(t)) {
          holes_[pool].push_back({last_use_[b] + 1, static_cast<int>(t), request_.size[b],
                                 request_.cost[b], 0.0});
        }
        last_use_[b] = static_cast<int>(t);
      }
    }
  }

  // Leaves the holes over a step that would be too full if all were kept, and keeps all others.
  bool contested(int64_t pool) {
    std::vector<int64_t>& load = load_[pool];
    change_.assign(load.size() + 1, 0);
    for (const Hole& hole : holes_[pool]) change_[hole.begin] += hole.size, change_[hole.end] -= hole.size;
    too_full_.assign(load.size() + 1, 0);
    int64_t in_holes = 0;
    for (size_t t = 0; t < load.size(); ++t) {
      in_holes += change_[t];
      too_full_[t + 1] = too_full_[t] + (load[t] + in_holes > request_.capacity[pool]);
    }
    if (too_full_.back() == 0) return false;
    std::vector<Hole>& holes = holes_[pool];
    size_t num_left = 0;
    for (const Hole& hole : holes) {
      if (too_full_[hole.begin] < too_full_[hole.end]) {
        holes[num_left++] = hole;
      } else {
        for (int t = hole.begin; t < hole.end; ++t) load[t] += hole.size;
      }
    }
    holes.resize(num_left);
    return true;
  }

  // Keeps the holes that are worth most; returns what the others cost.
  int64_t keep(int64_t pool, const std::vector<double>& price_of_length) {
    std::vector<Hole>& holes = holes_[pool];
    for (Hole& hole : holes) {
      hole.worth = static_cast<double>(hole.cost) / static_cast<double>(hole.size) /
                  price_of_length[hole.end - hole.begin];
    }
    std::sort(holes.begin(), holes.end(), [](const Hole& one, const Hole& other) {
      if (one.worth != other.worth) return one.worth > other.worth;
      return one.begin != other.begin ? one.begin < other.begin : one.size > other.size;
    });
    kept_ = load_[pool];
    int64_t lost = 0;
    for (const Hole& hole : holes) {
      int64_t most = 0;
      for (int t = hole.begin; t < hole.end; ++t) most = std::max(most, kept_[t]);
      if (most + hole.size > request_.capacity[pool]) {
        lost += hole.cost;
        continue;
      }
      for (int t = hole.begin; t < hole.end; ++t) kept_[t] += hole.size;
    }
    return lost;
  }

  const Request& request_;
  std::vector<int> last_use_;
  std::vector<std::vector<Hole>> holes_;
  std::vector<std::vector<int64_t>> load_;
  std::vector<int64_t> kept_, change_;
  std::vector<int> too_full_;
  std::vector<std::vector<double>> price_of_length_;  // how a hole's time counts, in several ways
};

class OrderSearch {
 public:
  explicit OrderSearch(const Request& request)
      : request_(request), evaluator_(request), random_(request.seed),
        done_(request.num_operators) {}

  // Improves `order` in place; returns its cost, or -1 where it is not possible at all.
  int64_t run(int64_t* order) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<int> anchors, best(order, order + request_.num_operators);
    for (int op : best) {
      if (request_.is_anchor[op]) anchors.push_back(op);
    }
    int64_t best_cost = evaluator_.cost(best);
    std::vector<int> decoded = decode(anchors);
    int64_t cost = evaluator_.cost(decoded);
    if (cost < 0) return -1;
    if (best_cost < 0 || cost < best_cost) best = decoded, best_cost = cost;
    const double hot = request_.temperature * static_cast<double>(best_cost) + 1e-9;
    for (int64_t i = 0; i < kNumProposals && best_cost > 0 && anchors.size() > 1; ++i) {
      if (i % 16 == 0) {
        const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
        if (spent.count() > request_.time_limit || request_.stop->load() != 0) break;
      }
      const double progress = static_cast<double>(i) / static_cast<double>(kNumProposals);
      const double temperature = hot * std::pow(0.01, progress);
      std::vector<int> changed = proposed(anchors);
      decoded = decode(changed);
      const int64_t new_cost = evaluator_.cost(decoded);
      if (new_cost < 0) continue;
      const double chance = std::exp(static_cast<double>(cost - new_cost) / temperature);
      std::uniform_real_distribution<double> draw(0, 1);
      if (new_cost > cost && draw(random_) >= chance) continue;
      // What runs earlier for its users keeps the place that it got.
      anchors.clear();
      for (int op : decoded) {
        if (request_.is_anchor[op]) anchors.push_back(op);
      }
      cost = new_cost;
      if (cost < best_cost) best = decoded, best_cost = cost;
    }
    std::copy(best.begin(), best.end(), order);
    return best_cost;
  }

 private:
  static constexpr int64_t kNumProposals = 150'000;

  std::vector<int> proposed(const std::vector<int>& anchors) {
    std::vector<int> changed = anchors;
    const size_t n = anchors.size();
    const size_t from = random_() % n;
    const size_t longest = std::min<size_t>(n - from, size_t{1} << (random_() % 6));
    const size_t length = 1 + random_() % longest;
    // Half of the moves are short.
    const size_t reach = random_() % 2 ? n : std::min<size_t>(n, 16);
    const size_t low = from > reach ? from - reach : 0;
    const size_t high = std::min(n - length, from + reach);
    const size_t to = low + random_() % (high - low + 1);
    if (to < from) {
      std::rotate(changed.begin() + to, changed.begin() + from, changed.begin() + from + length);
    } else {
      std::rotate(changed.begin() + from, changed.begin() + from + length,
                  changed.begin() + to + length);
    }
    return changed;
  }

  std::vector<int> decode(const std::vector<int>& anchors) {
    std::vector<int> order;
    order.reserve(request_.num_operators);
    std::fill(done_.begin(), done_.end(), 0);
    for (int op : anchors) emit(op, order);
    for (int op = 0; op < request_.num_operators; ++op) emit(op, order);
    return order;
  }

  // Everything that `op` needs, then `op`; an explicit stack, for programs may be long chains.
  void emit(int op, std::vector<int>& order) {
    if (done_[op]) return;
    stack_.assign(1, {op, request_.first_predecessor[op]});
    done_[op] = 1;
    while (!stack_.empty()) {
      auto& [current, next] = stack_.back();
      if (next == request_.first_predecessor[current + 1]) {
        order.push_back(current);
        stack_.pop_back();
        continue;
      }
      const int predecessor = static_cast<int>(request_.predecessors[next++]);
      if (done_[predecessor]) continue;
      done_[predecessor] = 1;
      stack_.push_back({predecessor, request_.first_predecessor[predecessor]});
    }
  }

  const Request& request_;
  Evaluator evaluator_;
  std::mt19937_64 random_;
  std::vector<char> done_;
  std::vector<std::pair<int, int64_t>> stack_;
};

}  // namespace

extern "C" int64_t penstock_scratchpad_order(const Request* request, int64_t* order) {
  return OrderSearch(*request).run(order);
}
