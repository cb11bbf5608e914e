// Nodes that are numbered, and lists of neighbours read against them; after `codegen/threads.cpp`.
//
// Numbers are one more than a node's position in the closure; 0 is a node that is not in it, and
// kFound one that this hop has found. They lie in an array over all nodes of the graph, or, where
// that would take more bytes, in a table with open addressing, at most half full (Knuth, The Art of
// Computer Programming 3, 6.4, algorithm L). Nodes are numbered hop by hop in rising order, so that
// the numbers depend neither on threads nor on the direction of the search.

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

namespace {

constexpr int32_t kFound = -1;
constexpr int64_t kOthers = std::numeric_limits<int64_t>::min();  // lists that have changed
constexpr int64_t kManyEntries = 1 << 17;
constexpr int64_t kBlockRows = 256;   // lists that a thread takes at once
constexpr int64_t kBlockNodes = 8192;  // nodes that a thread takes at once, to look at their numbers

// Lists of neighbours, as in `_native.py`.
struct Lists {
  const int64_t* rows;     // the list i is number rows[i] of `offsets`, or i where this is null
  const void* offsets;     // where lists begin and end in `entries`
  const void* entries;     // nodes
  const int64_t* places;   // of the entries in the graph; null: as they stand
  int64_t num_rows;
  int64_t num_entries;
  int64_t has_wide_offsets;  // 64 bits
  int64_t has_wide_entries;
  int64_t num_threads;
};

// Numbers of nodes, as in `_native.py`.
struct Numbers {
  int32_t* slots;
  int64_t num_slots;  // of the table; 0 for an array
  int64_t num_nodes;  // of the graph
};

inline int32_t load(const int32_t* place) { return __atomic_load_n(place, __ATOMIC_RELAXED); }
inline void store(int32_t* place, int32_t number) {
  __atomic_store_n(place, number, __ATOMIC_RELAXED);
}

struct Array {
  int32_t* numbers;
  int64_t num_nodes;

  explicit Array(const Numbers& all) : numbers(all.slots), num_nodes(all.num_nodes) {}

  int32_t find(int64_t node) const { return load(numbers + node); }
  void set(int64_t node, int32_t number) { store(numbers + node, number); }
  void mark(int64_t node) {
    if (find(node) == 0) set(node, kFound);
  }

  int64_t count_found() const { return std::count(numbers, numbers + num_nodes, kFound); }

  void list_found(int64_t* nodes) const {
    for (int64_t node = 0; node < num_nodes; ++node)
      if (numbers[node] == kFound) *nodes++ = node;
  }
};

struct Table {
  struct Slot {
    uint32_t key;  // node + 1; 0 for a free slot
    int32_t number;
  };
  Slot* slots;
  uint64_t num_slots;

  explicit Table(const Numbers& all)
      : slots(reinterpret_cast<Slot*>(all.slots)), num_slots(all.num_slots) {}

  Slot& slot_of(int64_t node) const {
    const uint32_t key = static_cast<uint32_t>(node) + 1;
    // A product with 2^64 / golden ratio (Knuth 3, 6.4) as a fraction of 2^64, times the slots.
    const uint64_t hash = static_cast<uint64_t>(node) * 0x9E3779B97F4A7C15u;
    uint64_t at = static_cast<uint64_t>(static_cast<unsigned __int128>(hash) * num_slots >> 64);
    while (slots[at].key != 0 && slots[at].key != key)
      if (++at == num_slots) at = 0;
    return slots[at];
  }

  int32_t find(int64_t node) const { return slot_of(node).number; }
  void set(int64_t node, int32_t number) {
    Slot& slot = slot_of(node);
    slot = {static_cast<uint32_t>(node) + 1, number};
  }
  void mark(int64_t node) {
    Slot& slot = slot_of(node);
    if (slot.key == 0) slot = {static_cast<uint32_t>(node) + 1, kFound};
  }

  int64_t count_found() const {
    return std::count_if(slots, slots + num_slots,
                         [](Slot each) { return each.number == kFound; });
  }

  void list_found(int64_t* nodes) const {
    int64_t* end = nodes;
    for (uint64_t at = 0; at < num_slots; ++at)
      if (slots[at].number == kFound) *end++ = static_cast<int64_t>(slots[at].key) - 1;
    std::sort(nodes, end);
  }
};

// Tasks in any order, each to the next thread that is free.
template <class Body>
void for_blocks(int64_t count, int64_t num_threads, Body body) {
  std::atomic<int64_t> next{0};
  parallel(static_cast<int>(std::min(num_threads, count)), [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) body(i);
  });
}

int64_t count_blocks(int64_t count, int64_t block) { return (count + block - 1) / block; }

// Lists with the types of their integers.
template <class Offset, class Entry>
struct Reader {
  const Lists& lists;

  int64_t row(int64_t i) const { return lists.rows ? lists.rows[i] : i; }
  int64_t begin(int64_t i) const { return static_cast<const Offset*>(lists.offsets)[row(i)]; }
  int64_t end(int64_t i) const { return static_cast<const Offset*>(lists.offsets)[row(i) + 1]; }
  int64_t node(int64_t at) const { return static_cast<const Entry*>(lists.entries)[at]; }
  int64_t place(int64_t at) const { return lists.places ? lists.places[at] : at; }
  bool is_inside(int64_t i) const {
    return 0 <= begin(i) && begin(i) <= end(i) && end(i) <= lists.num_entries;
  }
};

template <class Body>
int64_t with_reader(const Lists& lists, Body body) {
  if (lists.has_wide_offsets)
    return lists.has_wide_entries ? body(Reader<int64_t, int64_t>{lists})
                                  : body(Reader<int64_t, int32_t>{lists});
  return lists.has_wide_entries ? body(Reader<int32_t, int64_t>{lists})
                                : body(Reader<int32_t, int32_t>{lists});
}

template <class Body>
int64_t with_numbers(const Numbers& numbers, Body body) {
  return numbers.num_slots ? body(Table(numbers)) : body(Array(numbers));
}

// Return the threads that work on lists: one for few entries, which it reads before another wakes.
template <class Lists_>
int64_t count_threads(const Lists_& reader) {
  int64_t total = 0;
  for (int64_t i = 0; i < reader.lists.num_rows; ++i) {
    total += reader.end(i) - reader.begin(i);
    if (total >= kManyEntries) return reader.lists.num_threads;
  }
  return 1;
}

// Visit the nodes of lists [from, to); stop and return false at one that the graph does not have,
// whose place is then in `wrong`, or at a list that leaves the entries.
template <class Lists_, class Body>
bool visit(const Lists_& reader, int64_t num_nodes, int64_t from, int64_t to,
           std::atomic<int64_t>& wrong, Body body) {
  for (int64_t i = from; i < to; ++i) {
    if (!reader.is_inside(i)) {
      wrong = kOthers;
      return false;
    }
    const int64_t end = reader.end(i);
    for (int64_t at = reader.begin(i); at < end; ++at) {
      const int64_t node = reader.node(at);
      if (static_cast<uint64_t>(node) >= static_cast<uint64_t>(num_nodes)) {
        wrong = ~at;
        return false;
      }
      body(i, at, node);
    }
  }
  return true;
}

}  // namespace

extern "C" {

// Number the nodes that have no number yet, from 1 on in their order; return how many there are.
// `positions` are those of the nodes, or null.
int64_t penstock_number_nodes(const Numbers* numbers, const int64_t* nodes, int64_t count,
                              int64_t* positions) {
  return with_numbers(*numbers, [&](auto map) {
    int32_t last = 0;
    for (int64_t i = 0; i < count; ++i) {
      int32_t number = map.find(nodes[i]);
      if (number == 0) map.set(nodes[i], number = ++last);
      if (positions) positions[i] = number - 1;
    }
    return static_cast<int64_t>(last);
  });
}

// Return the entries of all lists, or ~i for the list i that falls or leaves `entries`.
int64_t penstock_sum_lengths(const Lists* lists) {
  return with_reader(*lists, [&](auto reader) {
    int64_t total = 0;
    for (int64_t i = 0; i < lists->num_rows; ++i) {
      if (!reader.is_inside(i)) return ~i;
      total += reader.end(i) - reader.begin(i);
    }
    return total;
  });
}

// Mark all nodes of the lists that have no number. Return 0, or ~at for a wrong entry.
int64_t penstock_mark_nodes(const Lists* lists, const Numbers* numbers) {
  return with_reader(*lists, [&](auto reader) {
    return with_numbers(*numbers, [&](auto map) {
      // Threads may find the same node: in the array it gets the same mark.
      const int64_t threads = numbers->num_slots ? 1 : count_threads(reader);
      std::atomic<int64_t> wrong{0};
      for_blocks(count_blocks(lists->num_rows, kBlockRows), threads, [&](int64_t block) {
        const int64_t from = block * kBlockRows;
        const int64_t to = std::min(from + kBlockRows, lists->num_rows);
        visit(reader, numbers->num_nodes, from, to, wrong,
              [&](int64_t, int64_t, int64_t node) { map.mark(node); });
      });
      return wrong.load();
    });
  });
}

// Mark the nodes without a number whose list, there is one for each node of the graph, has a node
// with a number. Return the entries that were looked at, ~at for a wrong one, or kOthers.
int64_t penstock_pull_nodes(const Lists* lists, const Numbers* numbers) {
  return with_reader(*lists, [&](auto reader) {
    Array map(*numbers);
    std::atomic<int64_t> wrong{0}, total{0};
    const int64_t threads = map.num_nodes < kManyEntries ? 1 : lists->num_threads;
    for_blocks(count_blocks(map.num_nodes, kBlockNodes), threads, [&](int64_t block) {
      const int64_t last = std::min((block + 1) * kBlockNodes, map.num_nodes);
      int64_t touched = 0;
      for (int64_t each = block * kBlockNodes; each < last; ++each) {
        if (map.find(each) != 0) continue;
        if (!reader.is_inside(each)) {
          wrong = kOthers;
          return;
        }
        const int64_t end = reader.end(each);
        for (int64_t at = reader.begin(each); at < end; ++at) {
          const int64_t node = reader.node(at);
          ++touched;
          if (static_cast<uint64_t>(node) >= static_cast<uint64_t>(map.num_nodes)) {
            wrong = ~at;
            return;
          }
          if (map.find(node) > 0) {
            map.set(each, kFound);
            break;
          }
        }
      }
      total += touched;
    });
    return wrong.load() ? wrong.load() : total.load();
  });
}

int64_t penstock_count_found(const Numbers* numbers) {
  return with_numbers(*numbers, [](auto map) { return map.count_found(); });
}

// List the marked nodes in rising order and number them from `first` + 1 on.
void penstock_number_found(const Numbers* numbers, int64_t first, int64_t* nodes, int64_t count) {
  with_numbers(*numbers, [&](auto map) {
    map.list_found(nodes);
    for (int64_t i = 0; i < count; ++i) map.set(nodes[i], static_cast<int32_t>(first + i + 1));
    return count;
  });
}

// Count the entries that are numbered: counts[b + 1] for the block b of lists. All entries of the
// first `num_inner` lists are. Return their sum, or ~at for a wrong entry.
int64_t penstock_count_edges(const Lists* lists, const Numbers* numbers, int64_t num_inner,
                             int64_t* counts) {
  return with_reader(*lists, [&](auto reader) {
    return with_numbers(*numbers, [&](auto map) {
      const int64_t num_blocks = count_blocks(lists->num_rows, kBlockRows);
      std::atomic<int64_t> wrong{0}, total{0};
      for_blocks(num_blocks, count_threads(reader), [&](int64_t block) {
        const int64_t from = block * kBlockRows;
        const int64_t to = std::min(from + kBlockRows, lists->num_rows);
        const int64_t inner = std::max(from, std::min(to, num_inner));
        int64_t count = 0;
        for (int64_t i = from; i < inner; ++i) count += reader.end(i) - reader.begin(i);
        visit(reader, numbers->num_nodes, inner, to, wrong,
              [&](int64_t, int64_t, int64_t node) { count += map.find(node) > 0; });
        counts[block + 1] = count;
        total += count;
      });
      return wrong.load() ? wrong.load() : total.load();
    });
  });
}

// Write the positions of the neighbour and of the list, and perhaps the place, of each entry that
// is numbered, block after block as `counts` says. The first list is at position `first`. Return
// the edges, ~at for a wrong entry, or kOthers if there are others than were counted.
int64_t penstock_write_edges(const Lists* lists, const Numbers* numbers, int64_t first,
                             int64_t* counts, int64_t* neighbors, int64_t* owners,
                             int64_t* places) {
  return with_reader(*lists, [&](auto reader) {
    return with_numbers(*numbers, [&](auto map) {
      const int64_t num_blocks = count_blocks(lists->num_rows, kBlockRows);
      counts[0] = 0;
      for (int64_t block = 0; block < num_blocks; ++block) counts[block + 1] += counts[block];
      std::atomic<int64_t> wrong{0};
      for_blocks(num_blocks, count_threads(reader), [&](int64_t block) {
        const int64_t from = block * kBlockRows;
        const int64_t to = std::min(from + kBlockRows, lists->num_rows);
        const int64_t last = counts[block + 1];
        int64_t edge = counts[block];
        const bool is_right = visit(
            reader, numbers->num_nodes, from, to, wrong, [&](int64_t i, int64_t at, int64_t node) {
              const int32_t number = map.find(node);
              if (number <= 0) return;
              if (edge < last) {
                neighbors[edge] = number - 1;
                owners[edge] = first + i;
                if (places) places[edge] = reader.place(at);
              }
              ++edge;
            });
        if (is_right && edge != last) wrong = kOthers;
      });
      return wrong.load() ? wrong.load() : counts[num_blocks];
    });
  });
}

// Count, for each seed by itself, the nodes within some hops, the entries of their lists, and those
// of them that are such nodes. Return 0, or ~at for a wrong entry.
int64_t penstock_count_closures(const Lists* lists, int64_t num_nodes, const int64_t* seeds,
                                int64_t count, int64_t hops, int64_t* nodes, int64_t* entries,
                                int64_t* edges) {
  return with_reader(*lists, [&](auto reader) {
    std::atomic<int64_t> wrong{0}, next{0};
    const int64_t most = std::min(lists->num_threads, count);
    parallel(static_cast<int>(most), [&](int64_t, int64_t) {
      std::vector<int64_t> seen(num_nodes, -1), order;  // the last seed that found each node
      for (int64_t i = next++; i < count; i = next++) {
        order.assign(1, seeds[i]);
        seen[seeds[i]] = i;
        int64_t total = 0, among = 0;
        size_t begin = 0;
        for (int64_t hop = 0; hop <= hops; ++hop) {
          const size_t end = order.size();
          if (begin == end) break;
          for (; begin < end; ++begin) {
            if (!reader.is_inside(order[begin])) {
              wrong = kOthers;
              return;
            }
            const int64_t first = reader.begin(order[begin]), last = reader.end(order[begin]);
            total += last - first;
            for (int64_t at = first; at < last; ++at) {
              const int64_t node = reader.node(at);
              if (static_cast<uint64_t>(node) >= static_cast<uint64_t>(num_nodes)) {
                wrong = ~at;
                return;
              }
              if (seen[node] != i && hop < hops) {
                seen[node] = i;
                order.push_back(node);
              }
              among += seen[node] == i;
            }
          }
        }
        nodes[i] = static_cast<int64_t>(order.size());
        entries[i] = total;
        edges[i] = among;
      }
    });
    return wrong.load();
  });
}

}  // extern "C"
