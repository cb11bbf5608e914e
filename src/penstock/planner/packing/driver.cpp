// The packer's entry: first and best fit for all parts, then the search for parts that are not optimal.
//
// Searches run in rounds. A round is a list of tasks (a capacity, an order, a number of nodes) that
// depends on the seed and on earlier rounds only, and its first task that succeeds wins. So the
// result does not depend on how many threads there are or how they happen to run.

namespace {

// `EngineAnswer` of _native.py, field by field.
struct Answer {
  int64_t height, lower_bound;
  int64_t impossible;    // with a capacity: it is proven that nothing fits
  int64_t searched;      // whether the fast part was improved on
  int64_t num_nodes;     // of the search
  int64_t num_parts;
};

class Driver {
 public:
  Driver(const Request& request, Answer& answer, int64_t* offsets)
      : request_(request), answer_(answer), offsets_(offsets), divisor_(common_divisor(request)),
        start_(std::chrono::steady_clock::now()), parts_(split(request, divisor_)) {}

  void run() {
    bounds_.reserve(parts_.size());
    for (const Part& part : parts_) bounds_.push_back(lower_bound(part));
    for (size_t i = 0; i < parts_.size(); ++i) {
      orders_.emplace_back();
      layouts_.push_back(best_fit(parts_[i], goal(), orders_[i], [&] { return out_of_time(); }));
    }
    search();
    Size height = 0;
    for (size_t i = 0; i < parts_.size(); ++i) {
      height = std::max(height, layouts_[i].height);
      for (int b = 0; b < parts_[i].count(); ++b) {
        offsets_[parts_[i].ids[b]] = layouts_[i].offsets[b] * divisor_;
      }
    }
    answer_.height = height * divisor_;
    answer_.lower_bound = bound() * divisor_;
    answer_.num_parts = static_cast<int64_t>(parts_.size());
    answer_.impossible = has_capacity() && bound() > capacity();
  }

 private:
  // The search keeps a list of what is left at each depth; beyond this only orders are improved.
  static constexpr int kMostSearched = 4000;
  static constexpr int64_t kPasses = 300;

  struct Task {
    Size capacity;
    std::vector<int> order;
    int64_t max_nodes;
    Verdict verdict = Verdict::kGaveUp;
    Layout layout;
    std::atomic<bool> cancelled{false};
  };

  bool has_capacity() const { return request_.capacity >= 0; }
  Size capacity() const { return request_.capacity / divisor_; }
  Size bound() const {
    return bounds_.empty() ? 0 : *std::max_element(bounds_.begin(), bounds_.end());
  }
  // There is no use in packing a part lower than this.
  Size goal() const { return has_capacity() ? std::max(capacity(), bound()) : bound(); }

  bool out_of_time() const {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start_;
    return spent.count() > request_.time_limit || request_.stop->load() != 0;
  }

  void search() {
    while (true) {
      size_t worst = 0;
      for (size_t i = 0; i < parts_.size(); ++i) {
        if (layouts_[i].height > layouts_[worst].height) worst = i;
      }
      if (parts_.empty() || layouts_[worst].height <= goal()) return;
      if (has_capacity() && bound() > capacity()) return;
      if (out_of_time() || !improve(worst)) return;
    }
  }

  // Make one part lower, or raise its bound; false where the time ran out before either.
  bool improve(size_t index) {
    Part& part = parts_[index];
    std::mt19937_64 random(static_cast<uint64_t>(request_.seed) * 7919u + num_climbs_++);
    const bool is_small = part.count() <= kMostSearched;
    Layout lower = climb(part, layouts_[index], orders_[index], random,
                         is_small ? kPasses : std::numeric_limits<int64_t>::max(),
                         [&] { return out_of_time(); });
    if (lower.height < layouts_[index].height) {
      layouts_[index] = std::move(lower);
      answer_.searched = 1;
      return true;
    }
    if (!is_small) return false;
    fill_overlaps(part);
    const Size target = goal();
    for (int round = 0; !out_of_time(); ++round) {
      auto tasks = round_of(part, round, target, layouts_[index].height);
      run_tasks(part, tasks);
      for (const auto& task : tasks) {
        if (task->verdict == Verdict::kImpossible) {
          bounds_[index] = std::max(bounds_[index], task->capacity + 1);
        } else if (task->verdict == Verdict::kFound) {
          layouts_[index] = std::move(task->layout);
          answer_.searched = 1;
          return true;  // what later tasks found depends on when they were cancelled
        }
      }
      if (bound() > target) return true;
    }
    return false;
  }

  std::vector<std::unique_ptr<Task>> round_of(const Part& part, int round, Size target,
                                              Size height) {
    static constexpr int kTasks = 4;
    const std::vector<std::vector<double>> by = keys(part);
    enum { kSize, kArea, kLife, kCrowded, kEarly, kLate };
    static constexpr int kPairs[][2] = {{kCrowded, kArea}, {kCrowded, kLife}, {kLife, kArea},
                                        {kArea, kSize},    {kCrowded, kSize}, {kLife, kSize},
                                        {kSize, kLife},    {kSize, kArea}};
    const Size capacities[] = {target, height - 1, (target + height - 1) / 2, target};
    std::vector<std::unique_ptr<Task>> tasks;
    for (int i = 0; i < kTasks; ++i) {
      auto task = std::make_unique<Task>();
      task->capacity = has_capacity() ? target : capacities[i];
      const int number = round * kTasks + i;
      std::vector<double> first = by[kPairs[number % 8][0]], second = by[kPairs[number % 8][1]];
      if (number >= 8) {
        std::mt19937_64 random(static_cast<uint64_t>(request_.seed) * 1000003u + number);
        std::uniform_real_distribution<double> noise(0.7, 1.0);
        for (size_t b = 0; b < first.size(); ++b) first[b] *= noise(random);
      }
      task->order = sorted_by(first, second);
      // Short searches from many orders find what one long search misses; they grow slowly.
      task->max_nodes = static_cast<int64_t>(2000 * std::pow(1.3, std::min(round, 60)));
      tasks.push_back(std::move(task));
    }
    return tasks;
  }

  void run_tasks(const Part& part, std::vector<std::unique_ptr<Task>>& tasks) {
    std::atomic<size_t> next{0};
    std::atomic<bool> done{false};
    std::atomic<int64_t> num_nodes{0};
    auto work = [&] {
      for (size_t i; (i = next++) < tasks.size();) {
        Task& task = *tasks[i];
        if (task.cancelled) continue;
        Search search(part, task.order, task.capacity);
        task.verdict = search.run(task.max_nodes, task.cancelled);
        num_nodes += search.num_nodes(task.max_nodes);
        if (task.verdict == Verdict::kGaveUp) continue;
        if (task.verdict == Verdict::kFound) task.layout = search.layout();
        for (size_t later = i + 1; later < tasks.size(); ++later) {
          const bool answered = tasks[later]->capacity <= task.capacity;
          if (task.verdict == Verdict::kFound || answered) tasks[later]->cancelled = true;
        }
      }
    };
    std::thread watch([&] {
      while (!done) {
        if (out_of_time()) {
          for (auto& task : tasks) task->cancelled = true;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    });
    std::thread other(work);  // beside this one
    work();
    other.join();
    done = true;
    watch.join();
    answer_.num_nodes += num_nodes;
  }

  const Request& request_;
  Answer& answer_;
  int64_t* offsets_;
  Size divisor_;
  std::chrono::steady_clock::time_point start_;
  std::vector<Part> parts_;
  std::vector<Size> bounds_;
  std::vector<Layout> layouts_;
  std::vector<std::vector<int>> orders_;  // that gave the layouts of the fast part
  uint64_t num_climbs_ = 0;
};

}  // namespace

extern "C" void penstock_pack(const Request* request, Answer* answer, int64_t* offsets) {
  Driver(*request, *answer, offsets).run();
}
