// Functions that Python calls: `_problem.py` declares them.

extern "C" {

void problem_greedy_order(const Problem* problem, const i32* base, i32 begin, i32 end, const double* w, i32* order) {
  order_greedily(*problem, base, begin, end, {w[0], w[1], w[2], w[3], static_cast<i64>(w[4]), static_cast<i32>(w[5])}, order);
}

Problem* problem_new(i32 num_operators, i32 num_objects, const double* seconds, const i64* bytes, const std::uint8_t* flags,
                     const i32* first_access, const i32* access_object, const std::uint8_t* access_kind,
                     const i32* first_reuse, const i32* reuse_from, const i32* reuse_by, const i32* first_predecessor,
                     const i32* predecessors) {
  return new Problem{num_operators, num_objects, seconds, bytes, flags, first_access, access_object, access_kind,
                     first_reuse, reuse_from, reuse_by, first_predecessor, predecessors};
}

void problem_free(Problem* problem) { delete problem; }

Sequence* sequence_new(const Problem* problem, const i32* order, const std::uint8_t* again, i32 length) {
  return new Sequence(*problem, order, again, length);
}

void sequence_free(Sequence* sequence) { delete sequence; }

i32 sequence_num_holes(const Sequence* s) { return static_cast<i32>(s->holes.size()); }

// Parts of a sequence's live ranges, at most.
i32 sequence_most_parts(const Sequence* s) { return static_cast<i32>(s->holes.size() + s->live_ranges.size()); }

// The holes by object and start, and live bytes by position with everything resident.
void sequence_read(const Sequence* s, i32* hole_object, i32* hole_start, i32* hole_end, i64* base) {
  for (const Hole& hole : s->holes) {
    *hole_object++ = hole.object;
    *hole_start++ = hole.start;
    *hole_end++ = hole.end;
  }
  std::copy(s->base.begin(), s->base.end(), base);
}

void sequence_evict(const Sequence* s, const i64* capacity, i64 min_bytes, const double* bias, std::uint8_t* evicted) {
  evict(*s, s->base, s->problem.bytes, capacity, min_bytes, bias, evicted);
}

// Returns the number of parts.
i32 sequence_cut(const Sequence* s, const std::uint8_t* evicted, const i32* out_end, const i32* in_start, Part* parts) {
  const Cut cut(*s, evicted, out_end, in_start);
  std::copy(cut.parts.begin(), cut.parts.end(), parts);
  return static_cast<i32>(cut.parts.size());
}

void sequence_class_needs(const Sequence* s, const i32* class_of, i32 num_classes, i64* least, i64* most) {
  class_needs(*s, class_of, num_classes, least, most);
}

// Returns the number of intervals with addresses, or -1 where a class has too few slots.
i32 sequence_evict_in_classes(const Sequence* s, const i32* class_of, i32 num_classes, const i64* counts,
                              const i64* bytes, std::uint8_t* evicted, Interval* intervals) {
  return evict_in_classes(*s, {class_of, num_classes, counts, bytes}, evicted, intervals);
}

void sequence_dirty(const Sequence* s, const std::uint8_t* evicted, std::uint8_t* dirty) {
  const auto result = find_dirty_holes(*s, evicted);
  std::copy(result.begin(), result.end(), dirty);
}

// A replay by bytes, and one by addresses; they return the bytes above the capacity. `seconds_per_byte` is
// of the links out to the tiers, and in from them; `starts` receives the time of the step behind the last
// position. Two functions: in one, the compiler inlines neither allocator, and a replay takes a sixth longer.
i64 sequence_replay(const Sequence* s, const std::uint8_t* evicted, const std::uint8_t* tier, const double* seconds_per_byte,
                    i32 prefetch_distance, double worth, i32* out_end, i32* in_start, double* starts, i64 capacity) {
  const Links links(seconds_per_byte, tier);
  ByteAllocator allocator(*s, capacity, evicted);
  const auto timing = replay(*s, links, evicted, prefetch_distance, worth, allocator, out_end, in_start, starts);
  starts[s->length] = timing.step_seconds;
  return timing.overflow;
}

i64 sequence_replay_at(const Sequence* s, const std::uint8_t* evicted, const std::uint8_t* tier, const double* seconds_per_byte,
                       i32 prefetch_distance, double worth, i32* out_end, i32* in_start, double* starts, const Interval* intervals,
                       i32 num_intervals) {
  const Links links(seconds_per_byte, tier);
  AddressAllocator allocator(*s, intervals, num_intervals);
  const auto timing = replay(*s, links, evicted, prefetch_distance, worth, allocator, out_end, in_start, starts);
  allocator.clamp(in_start, out_end);
  starts[s->length] = timing.step_seconds;
  return timing.overflow;
}

void assign_offsets(Interval* intervals, i32 num_intervals, i32 num_positions, i64 capacity, i64 large_bytes, i32 fullest,
                    double step_seconds, i32 strategy, const double* priority, i64* missing) {
  OffsetAssignment(intervals, num_intervals, num_positions, capacity, large_bytes, fullest, step_seconds, strategy, priority)
      .run(missing);
}

void sequence_assign_tiers(const Sequence* s, const std::uint8_t* evicted, i64 host_bytes, std::uint8_t* tier) {
  assign_tiers(*s, evicted, host_bytes, tier);
}

// Lists come one after the other in `first` and `items`: needs and makes of operators, the same where they
// run again, and the chains of objects.
OrderExpander* expander_new(i32 num_operators, i32 num_objects, const i32* object_of, const i32* initial,
                            const std::uint8_t* is_forward, const i32* first, const i32* items) {
  auto lists = [&](i32 which) { return Lists{first + which * num_operators, items}; };
  return new OrderExpander{num_objects, object_of, initial, is_forward, lists(0), lists(1), lists(2), lists(3), lists(4), {}};
}

void expander_free(OrderExpander* recipes) { delete recipes; }

// Returns the length of the longer order, which `expander_read` reads; -1 if there is none.
i32 expander_expand(OrderExpander* recipes, const i32* order, i32 length, const i32* dropped, i32 num_dropped, i32 max_chain) {
  if (!Expansion(*recipes, order, length, max_chain).run(dropped, num_dropped)) return -1;
  return static_cast<i32>(recipes->expanded.size());
}

void expander_read(const OrderExpander* recipes, i32* order) {
  std::copy(recipes->expanded.begin(), recipes->expanded.end(), order);
}

}  // extern "C"
