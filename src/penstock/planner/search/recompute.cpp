// Orders with second runs that make dropped values again: `_recompute.py` defines the words.

namespace {

// Lists of numbers in one array (CSR).
struct Lists {
  const i32 *first, *items;
  struct Range {
    const i32 *from, *to;
    const i32* begin() const { return from; }
    const i32* end() const { return to; }
  };
  Range operator[](i32 i) const { return {items + first[i], items + first[i + 1]}; }
};

// Accesses and chains by which the values of a graph are made again, in arrays of `RecomputeChains`.
struct OrderExpander {
  i32 num_objects;
  const i32* object_of;                   // of each value
  const i32* initial;                     // of each object: the value that it holds at first; -1: none
  const std::uint8_t* is_forward;         // of each operator
  Lists needs, makes;                     // values of each operator
  Lists needs_again, makes_again;         // the same where it runs again
  Lists chain;                            // of each object that can be dropped: operators that make it
  std::vector<i32> expanded;              // the last result
};

// One walk through an order.
class Expansion {
 public:
  Expansion(OrderExpander& recipes, const i32* order, i32 length, i32 max_chain)
      : r_(recipes), order_(order), length_(length), max_chain_(max_chain), content_(recipes.initial, recipes.initial + recipes.num_objects),
        gone_(recipes.num_objects, 0), is_dropped_(recipes.num_objects, 0), is_brief_(recipes.num_objects, 0),
        dropped_at_(length) {
    r_.expanded.clear();
  }

  // `dropped`: objects, and complements of those that are dropped after each use.
  bool run(const i32* dropped, i32 num_dropped) {
    bool any_brief = false;
    for (i32 k = 0; k < num_dropped; ++k) {
      if (dropped[k] >= 0) is_dropped_[dropped[k]] = 1;
      else is_brief_[~dropped[k]] = 1, any_brief = true;
    }
    find_drops();
    for (i32 position = 0; position < length_; ++position) {
      const i32 op = order_[position];
      const size_t num_before = r_.expanded.size();
      for (i32 value : r_.needs[op])
        if (!provide(value, 0)) return false;
      r_.expanded.push_back(op);
      for (i32 value : r_.makes[op]) hold(value);
      for (i32 object : dropped_at_[position]) gone_[object] = 1;
      if (!any_brief || r_.is_forward[op]) continue;
      for (size_t ran = num_before; ran < r_.expanded.size(); ++ran)
        touched(r_.expanded[ran], [&](i32 object) {
          if (is_brief_[object]) gone_[object] = 1;
        });
    }
    return true;
  }

 private:
  // Dropped objects go after their last use in the forward pass, and after their last use.
  void find_drops() {
    std::vector<i32> last(r_.num_objects, -1), last_forward(r_.num_objects, -1);
    std::vector<std::uint8_t> is_over(r_.num_objects, 0);  // whether it was used by another phase
    for (i32 position = 0; position < length_; ++position) {
      const i32 op = order_[position];
      touched(op, [&](i32 object) {
        last[object] = position;
        if (!r_.is_forward[op]) is_over[object] = 1;
        if (!is_over[object]) last_forward[object] = position;
      });
    }
    for (i32 object = 0; object < r_.num_objects; ++object) {
      if (!is_dropped_[object] || last[object] < 0) continue;
      dropped_at_[last[object]].push_back(object);
      if (last_forward[object] >= 0) dropped_at_[last_forward[object]].push_back(object);
    }
  }

  template <class Visit>
  void touched(i32 op, Visit visit) const {
    for (i32 value : r_.needs[op]) visit(r_.object_of[value]);
    for (i32 value : r_.makes[op]) visit(r_.object_of[value]);
  }

  void hold(i32 value) {
    const i32 object = r_.object_of[value];
    content_[object] = value;
    gone_[object] = 0;
  }

  // Makes an object hold a value, by second runs of the operators that make it if need be.
  bool provide(i32 value, i32 depth) {
    const i32 object = r_.object_of[value];
    if (content_[object] == value && !gone_[object]) return true;
    if (depth > max_chain_) return false;
    for (i32 op : r_.chain[object]) {
      for (i32 needed : r_.needs_again[op])
        if (!provide(needed, depth + 1)) return false;
      const auto makes = r_.makes_again[op];
      for (i32 made : makes)
        if (would_overwrite(made, object)) return false;
      r_.expanded.push_back(op);
      for (i32 made : makes) hold(made);
      if (std::find(makes.begin(), makes.end(), value) != makes.end()) return true;
    }
    return false;
  }

  // Whether making a value again would set back an object that has a later value now.
  bool would_overwrite(i32 made, i32 object) const {
    const i32 other = r_.object_of[made], held = content_[other];
    return other != object && held >= 0 && held != made && !gone_[other];
  }

  OrderExpander& r_;
  const i32* order_;
  i32 length_, max_chain_;
  std::vector<i32> content_;  // of each object: the value that it holds; -1: none
  std::vector<std::uint8_t> gone_, is_dropped_, is_brief_;
  std::vector<std::vector<i32>> dropped_at_;  // objects by position
};

}  // namespace
