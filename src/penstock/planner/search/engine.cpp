// Functions that Python calls: `_library.py` declares them.

extern "C" {

void problem_greedy_order(const void* problem, const i32* base, i32 begin, i32 end, const double* weights, i32* order) {
  const double* w = weights;
  order_greedily(*static_cast<const Problem*>(problem), base, begin, end,
                 {w[0], w[1], w[2], w[3], static_cast<i64>(w[4]), static_cast<i32>(w[5])}, order);
}

void* problem_new(i32 num_operators, i32 num_objects, const double* seconds, const i64* bytes, const std::uint8_t* flags,
                  const i32* first_access, const i32* access_object, const std::uint8_t* access_kind,
                  const i32* first_reuse, const i32* reuse_from, const i32* reuse_by, const i32* first_predecessor,
                  const i32* predecessors) {
  const i32 num_accesses = first_access[num_operators], num_reuses = first_reuse[num_operators];
  return new Problem{num_operators,
                     num_objects,
                     {seconds, seconds + num_operators},
                     {bytes, bytes + num_objects},
                     {flags, flags + num_objects},
                     {first_access, first_access + num_operators + 1},
                     {access_object, access_object + num_accesses},
                     {access_kind, access_kind + num_accesses},
                     {first_reuse, first_reuse + num_operators + 1},
                     {reuse_from, reuse_from + num_reuses},
                     {reuse_by, reuse_by + num_reuses},
                     {first_predecessor, first_predecessor + num_operators + 1},
                     {predecessors, predecessors + first_predecessor[num_operators]}};
}

void problem_free(void* problem) { delete static_cast<Problem*>(problem); }

void* sequence_new(const void* problem, const i32* order, const std::uint8_t* again, i32 length) {
  return new Sequence(*static_cast<const Problem*>(problem), order, again, length);
}

void sequence_free(void* sequence) { delete static_cast<Sequence*>(sequence); }

i32 sequence_num_holes(const void* sequence) {
  return static_cast<i32>(static_cast<const Sequence*>(sequence)->holes.size());
}

// Parts of a sequence's live ranges, at most.
i32 sequence_most_parts(const void* sequence) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  return static_cast<i32>(s.holes.size() + s.live_ranges.size());
}

// The holes by object and start, and live bytes by position with everything resident.
void sequence_read(const void* sequence, i32* hole_object, i32* hole_start, i32* hole_end, i64* base) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  for (size_t hole = 0; hole < s.holes.size(); ++hole) {
    hole_object[hole] = s.holes[hole].object;
    hole_start[hole] = s.holes[hole].start;
    hole_end[hole] = s.holes[hole].end;
  }
  std::copy(s.base.begin(), s.base.end(), base);
}

i64 sequence_evict(const void* sequence, const i64* capacity, i64 min_bytes, const double* bias,
                    std::uint8_t* evicted) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  return evict(s, s.base, s.problem.bytes.data(), capacity, min_bytes, bias, evicted);
}

// Returns the number of parts.
i32 sequence_cut(const void* sequence, const std::uint8_t* evicted, const i32* out_end, const i32* in_start, Part* parts) {
  const Cut cut(*static_cast<const Sequence*>(sequence), evicted, out_end, in_start);
  std::copy(cut.parts.begin(), cut.parts.end(), parts);
  return static_cast<i32>(cut.parts.size());
}

void sequence_class_needs(const void* sequence, const i32* class_of, i32 num_classes, i64* least, i64* most) {
  class_needs(*static_cast<const Sequence*>(sequence), class_of, num_classes, least, most);
}

// Returns the number of intervals with addresses, or -1 where a class has too few slots.
i32 sequence_evict_in_classes(const void* sequence, const i32* class_of, i32 num_classes, const i64* counts,
                              const i64* bytes, std::uint8_t* evicted, Interval* intervals) {
  return evict_in_classes(*static_cast<const Sequence*>(sequence), {class_of, num_classes, counts, bytes}, evicted, intervals);
}

void sequence_dirty(const void* sequence, const std::uint8_t* evicted, std::uint8_t* dirty) {
  const auto result = find_dirty_holes(*static_cast<const Sequence*>(sequence), evicted);
  std::copy(result.begin(), result.end(), dirty);
}

// A replay by bytes, and one by addresses; they return the bytes above the capacity. `seconds_per_byte` is
// of the links out to the tiers, and in from them; `starts` receives the time of the step behind the last
// position. Two functions: in one, the compiler inlines neither allocator, and a replay takes a sixth longer.
i64 sequence_replay(const void* sequence, const std::uint8_t* evicted, const std::uint8_t* tier, const double* seconds_per_byte,
                    i32 prefetch_distance, i32* out_end, i32* in_start, double* starts, i64 capacity) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  const Links links(seconds_per_byte, tier);
  ByteAllocator allocator(s, capacity, evicted);
  const auto timing = replay(s, links, evicted, prefetch_distance, allocator, out_end, in_start, starts);
  starts[s.length] = timing.step_seconds;
  return timing.overflow;
}

i64 sequence_replay_at(const void* sequence, const std::uint8_t* evicted, const std::uint8_t* tier, const double* seconds_per_byte,
                       i32 prefetch_distance, i32* out_end, i32* in_start, double* starts, const Interval* intervals,
                       i32 num_intervals) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  const Links links(seconds_per_byte, tier);
  AddressAllocator allocator(s, intervals, num_intervals);
  const auto timing = replay(s, links, evicted, prefetch_distance, allocator, out_end, in_start, starts);
  allocator.clamp(in_start, out_end);
  starts[s.length] = timing.step_seconds;
  return timing.overflow;
}

void assign_offsets(Interval* intervals, i32 num_intervals, i32 num_positions, i64 capacity, i64 large_bytes, i32 fullest,
                    double step_seconds, i32 strategy, const double* priority, i64* missing) {
  OffsetAssignment(intervals, num_intervals, num_positions, capacity, large_bytes, fullest, step_seconds, strategy, priority)
      .run(missing);
}

void sequence_assign_tiers(const void* sequence, const std::uint8_t* evicted, i64 host_bytes, std::uint8_t* tier) {
  assign_tiers(*static_cast<const Sequence*>(sequence), evicted, host_bytes, tier);
}

// Lists come one after the other in `first` and `items`: needs and makes of operators, the same where they
// run again, and the chains of objects.
void* expander_new(i32 num_operators, i32 num_objects, i32 num_values, const i32* object_of, const i32* initial,
                   const std::uint8_t* is_forward, const i32* first, const i32* items) {
  auto lists = [&](i32 which, i32 count) { return Lists(first + which * num_operators, count, items); };
  return new OrderExpander{num_objects,
                           {object_of, object_of + num_values},
                           {initial, initial + num_objects},
                           {is_forward, is_forward + num_operators},
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
