// Functions that Python calls, and the structs that `_problem.py`, `_sequence.py` and `_recompute.py` fill.

extern "C" {

struct GreedyArguments {
  const i32 *first_predecessor, *predecessors, *base;
  i64 begin, end;
  double fetch, create, release, late;
  i64 capacity, window;
  const float* noise;
  i32* order;
};

void problem_greedy_order(const void* problem, const GreedyArguments* a) {
  order_greedily(*static_cast<const Problem*>(problem), a->first_predecessor, a->predecessors, a->base,
                 static_cast<i32>(a->begin), static_cast<i32>(a->end),
                 {a->fetch, a->create, a->release, a->late, a->capacity, static_cast<i32>(a->window)}, a->noise, a->order);
}

struct ProblemArguments {
  i64 num_operators, num_objects;
  const double* seconds;
  const i64* bytes;
  const std::uint8_t* flags;
  const i32 *first_access, *access_object;
  const std::uint8_t* access_kind;
  const i32 *first_reuse, *reuse_from, *reuse_by;
};

void* problem_new(const ProblemArguments* a) {
  const i32 num_operators = static_cast<i32>(a->num_operators), num_objects = static_cast<i32>(a->num_objects);
  const i32 num_accesses = a->first_access[num_operators], num_reuses = a->first_reuse[num_operators];
  return new Problem{num_operators,
                     num_objects,
                     {a->seconds, a->seconds + num_operators},
                     {a->bytes, a->bytes + num_objects},
                     {a->flags, a->flags + num_objects},
                     {a->first_access, a->first_access + num_operators + 1},
                     {a->access_object, a->access_object + num_accesses},
                     {a->access_kind, a->access_kind + num_accesses},
                     {a->first_reuse, a->first_reuse + num_operators + 1},
                     {a->reuse_from, a->reuse_from + num_reuses},
                     {a->reuse_by, a->reuse_by + num_reuses}};
}

void problem_free(void* problem) { delete static_cast<Problem*>(problem); }

void* sequence_new(const void* problem, const i32* order, const std::uint8_t* again, i32 length) {
  return new Sequence(*static_cast<const Problem*>(problem), order, again, length);
}

void sequence_free(void* sequence) { delete static_cast<Sequence*>(sequence); }

i32 sequence_num_holes(const void* sequence) {
  return static_cast<i32>(static_cast<const Sequence*>(sequence)->holes.size());
}

struct SequenceArrays {
  i32 *hole_object, *hole_start, *hole_end;
  i64* base;
  i32 *reused_from, *reused_by;
};

// The holes by object and start, live bytes by position with everything resident, and the reuses in place.
void sequence_read(const void* sequence, const SequenceArrays* a) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  for (size_t hole = 0; hole < s.holes.size(); ++hole) {
    a->hole_object[hole] = s.holes[hole].object;
    a->hole_start[hole] = s.holes[hole].start;
    a->hole_end[hole] = s.holes[hole].end;
  }
  std::copy(s.base.begin(), s.base.end(), a->base);
  std::copy(s.reused_from.begin(), s.reused_from.end(), a->reused_from);
  std::copy(s.reused_by.begin(), s.reused_by.end(), a->reused_by);
}

i64 sequence_evict(const void* sequence, const i64* capacity, i64 min_bytes, const double* bias,
                    std::uint8_t* evicted) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  return evict(s, s.base, s.problem.bytes.data(), capacity, min_bytes, bias, evicted);
}

void sequence_class_needs(const void* sequence, const i32* class_of, i32 num_classes, i64* least, i64* most) {
  class_needs(*static_cast<const Sequence*>(sequence), class_of, num_classes, least, most);
}

struct ClassArguments {
  const i32* class_of;
  i64 num_classes;
  const i64 *counts, *bytes;
  std::uint8_t* evicted;
  Interval* intervals;
};

// Returns the number of intervals with addresses, or -1 where a class has too few slots.
i32 sequence_evict_in_classes(const void* sequence, const ClassArguments* a) {
  const SizeClasses classes{a->class_of, static_cast<i32>(a->num_classes), a->counts, a->bytes};
  return evict_in_classes(*static_cast<const Sequence*>(sequence), classes, a->evicted, a->intervals);
}

void sequence_dirty(const void* sequence, const std::uint8_t* evicted, std::uint8_t* dirty) {
  const auto result = find_dirty_holes(*static_cast<const Sequence*>(sequence), evicted);
  std::copy(result.begin(), result.end(), dirty);
}

struct ReplayArguments {
  i64 capacity;  // bytes, where there are no intervals with addresses
  const Interval* intervals;
  i64 num_intervals;
  double out_seconds_per_byte, in_seconds_per_byte;  // of the links to the first tier
  double second_out_seconds_per_byte, second_in_seconds_per_byte;
  const std::uint8_t *tier, *evicted;
  i64 prefetch_distance;
  i32 *out_end, *in_start;
  double* starts;
  double step_seconds;  // the answer
};

// Two functions: in one, the compiler inlines neither allocator, and a replay takes a sixth longer.
i64 sequence_replay(const void* sequence, ReplayArguments* a) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  const Links links{{a->out_seconds_per_byte, a->second_out_seconds_per_byte},
                    {a->in_seconds_per_byte, a->second_in_seconds_per_byte}, a->tier};
  ByteAllocator allocator(s, a->capacity, a->evicted);
  const auto timing = replay(s, links, a->evicted, static_cast<i32>(a->prefetch_distance), allocator, a->out_end,
                             a->in_start, a->starts);
  a->step_seconds = timing.step_seconds;
  return timing.overflow;
}

i64 sequence_replay_at(const void* sequence, ReplayArguments* a) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  const Links links{{a->out_seconds_per_byte, a->second_out_seconds_per_byte},
                    {a->in_seconds_per_byte, a->second_in_seconds_per_byte}, a->tier};
  AddressAllocator allocator(s, a->intervals, static_cast<i32>(a->num_intervals));
  const auto timing = replay(s, links, a->evicted, static_cast<i32>(a->prefetch_distance), allocator, a->out_end,
                             a->in_start, a->starts);
  allocator.clamp(a->in_start, a->out_end);
  a->step_seconds = timing.step_seconds;
  return timing.overflow;
}

struct OffsetArguments {
  Interval* intervals;
  i64 num_intervals, num_positions, capacity, large_bytes, fullest;
  double step_seconds;
  i64 strategy;
  const double* priority;
  i64* missing;
};

i32 assign_offsets(const OffsetArguments* a) {
  OffsetAssignment assignment(a->intervals, static_cast<i32>(a->num_intervals), static_cast<i32>(a->num_positions),
                              a->capacity, a->large_bytes, static_cast<i32>(a->fullest), a->step_seconds,
                              static_cast<i32>(a->strategy), a->priority);
  return assignment.run(a->missing);
}

void sequence_assign_tiers(const void* sequence, const std::uint8_t* evicted, i64 host_bytes, std::uint8_t* tier) {
  assign_tiers(*static_cast<const Sequence*>(sequence), evicted, host_bytes, tier);
}

struct ExpanderArguments {
  i64 num_operators, num_objects, num_values;
  const i32 *object_of, *initial;
  const std::uint8_t* is_forward;
  const i32* const *first, * const *items;
};

void* expander_new(const ExpanderArguments* a) {
  const i32 num_operators = static_cast<i32>(a->num_operators), num_objects = static_cast<i32>(a->num_objects);
  auto lists = [&](int which, i32 count) { return Lists(a->first[which], count, a->items[which]); };
  return new OrderExpander{num_objects,
                           {a->object_of, a->object_of + a->num_values},
                           {a->initial, a->initial + num_objects},
                           {a->is_forward, a->is_forward + num_operators},
                           lists(0, num_operators),
                           lists(1, num_operators),
                           lists(2, num_operators),
                           lists(3, num_operators),
                           lists(4, num_objects),
                           {}};
}

void expander_free(void* recipes) { delete static_cast<OrderExpander*>(recipes); }

// Returns the length of the longer order, which `expander_read` reads; -1 if there is none.
i32 expander_expand(void* recipes, const i32* order, i32 length, const i32* dropped, i32 num_dropped, i32 max_chain) {
  auto& r = *static_cast<OrderExpander*>(recipes);
  if (!Expansion(r, order, length, max_chain).run(dropped, num_dropped)) return -1;
  return static_cast<i32>(r.expanded.size());
}

void expander_read(const void* recipes, i32* order) {
  const auto& expanded = static_cast<const OrderExpander*>(recipes)->expanded;
  std::copy(expanded.begin(), expanded.end(), order);
}

}  // extern "C"
