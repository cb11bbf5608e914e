// Functions for `_sequence.py`.

extern "C" {

void problem_greedy_order(const void* problem, const i32* first_predecessor, const i32* predecessors,
                          const i32* base, i32 begin, i32 end, double fetch, double create,
                          double release, double late, i64 capacity, i32 window, const float* noise,
                          i32* order) {
  order_greedily(*static_cast<const Problem*>(problem), first_predecessor, predecessors, base, begin, end,
         {fetch, create, release, late, capacity, window}, noise, order);
}

void* problem_new(i32 num_operators, i32 num_objects, const double* seconds, const i64* bytes,
                  const std::uint8_t* flags, const i32* first_access, const i32* access_object,
                  const std::uint8_t* access_kind, const i32* first_reuse, const i32* reuse_from,
                  const i32* reuse_by) {
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
                     {reuse_by, reuse_by + num_reuses}};
}

void problem_free(void* problem) { delete static_cast<Problem*>(problem); }

void* sequence_new(const void* problem, const i32* order, const std::uint8_t* again, i32 length) {
  return new Sequence(*static_cast<const Problem*>(problem), order, again, length);
}

void sequence_free(void* sequence) { delete static_cast<Sequence*>(sequence); }

i32 sequence_num_holes(const void* sequence) {
  return static_cast<i32>(static_cast<const Sequence*>(sequence)->holes.size());
}

// The holes by object and start, live bytes by position with everything resident, and the reuses in place.
void sequence_read(const void* sequence, i32* hole_object, i32* hole_start, i32* hole_end, i64* base,
                   i32* reused_from, i32* reused_by) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  for (size_t g = 0; g < s.holes.size(); ++g) {
    hole_object[g] = s.holes[g].object;
    hole_start[g] = s.holes[g].start;
    hole_end[g] = s.holes[g].end;
  }
  std::copy(s.base.begin(), s.base.end(), base);
  std::copy(s.reused_from.begin(), s.reused_from.end(), reused_from);
  std::copy(s.reused_by.begin(), s.reused_by.end(), reused_by);
}

i64 sequence_evict(const void* sequence, const i64* capacity, i64 min_bytes, const double* bias,
                    std::uint8_t* evicted) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  return evict(s, s.base, s.problem.bytes.data(), capacity, min_bytes, bias, evicted);
}

void sequence_class_needs(const void* sequence, const i32* class_of, i32 num_classes, i64* least, i64* most) {
  class_needs(*static_cast<const Sequence*>(sequence), class_of, num_classes, least, most);
}

// Returns the number of intervals with addresses, or -1 where a class has too few slots.
i32 sequence_evict_in_classes(const void* sequence, const i32* class_of, i32 num_classes, const i64* counts,
                               const i64* class_bytes, std::uint8_t* evicted, void* intervals) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  return evict_in_classes(s, {class_of, num_classes, counts, class_bytes}, evicted, static_cast<Interval*>(intervals));
}

void sequence_dirty(const void* sequence, const std::uint8_t* evicted, std::uint8_t* dirty) {
  const auto result = find_dirty_holes(*static_cast<const Sequence*>(sequence), evicted);
  std::copy(result.begin(), result.end(), dirty);
}

i64 sequence_replay(const void* sequence, i64 capacity, const double* out_seconds_per_byte,
                    const double* in_seconds_per_byte, const std::uint8_t* tier, const std::uint8_t* evicted,
                    i32 prefetch_distance, i32* out_end, i32* in_start, double* starts, double* step_seconds) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  ByteAllocator allocator(s, capacity, evicted);
  const Links links{{out_seconds_per_byte[0], out_seconds_per_byte[1]},
                    {in_seconds_per_byte[0], in_seconds_per_byte[1]}, tier};
  const auto timing = replay(s, links, evicted, prefetch_distance, allocator, out_end, in_start, starts);
  *step_seconds = timing.step_seconds;
  return timing.overflow;
}

// The same with addresses.
i64 sequence_replay_at(const void* sequence, const void* intervals, i32 num_intervals,
                       const double* out_seconds_per_byte, const double* in_seconds_per_byte,
                       const std::uint8_t* tier, const std::uint8_t* evicted, i32 prefetch_distance, i32* out_end,
                       i32* in_start, double* starts, double* step_seconds) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  AddressAllocator allocator(s, static_cast<const Interval*>(intervals), num_intervals);
  const Links links{{out_seconds_per_byte[0], out_seconds_per_byte[1]},
                    {in_seconds_per_byte[0], in_seconds_per_byte[1]}, tier};
  const auto timing = replay(s, links, evicted, prefetch_distance, allocator, out_end, in_start, starts);
  allocator.clamp(in_start, out_end);
  *step_seconds = timing.step_seconds;
  return timing.overflow;
}

i32 assign_offsets(void* intervals, i32 num_intervals, i32 num_positions, i64 capacity, i64 large_bytes,
          i32 fullest, double step_seconds, i32 strategy, const double* priority, i64* missing) {
  OffsetAssignment assignment(static_cast<Interval*>(intervals), num_intervals, num_positions, capacity, large_bytes, fullest,
                    step_seconds, strategy, priority);
  return assignment.run(missing);
}

void sequence_assign_tiers(const void* sequence, const std::uint8_t* evicted, i64 host_bytes, std::uint8_t* tier) {
  assign_tiers(*static_cast<const Sequence*>(sequence), evicted, host_bytes, tier);
}

void* expander_new(i32 num_operators, i32 num_objects, i32 num_values, const i32* object_of, const i32* initial,
                  const std::uint8_t* is_forward, const i32* const* first, const i32* const* items) {
  auto lists = [&](int which, i32 count) { return Lists(first[which], count, items[which]); };
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
