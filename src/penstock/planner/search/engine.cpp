// What `_engine.py` calls.

extern "C" {

void problem_greedy_order(const void* problem, const i32* first_predecessor, const i32* predecessors,
                          const i32* base, i32 begin, i32 end, double fetch, double create,
                          double release, double late, i64 capacity, i32 window, const float* noise,
                          i32* order) {
  greedy(*static_cast<const Problem*>(problem), first_predecessor, predecessors, base, begin, end,
         {fetch, create, release, late, capacity, window}, noise, order);
}

void* problem_new(i32 num_operators, i32 num_objects, const double* seconds, const i64* bytes,
                  const std::uint8_t* flags, const i32* first_access, const i32* access_object,
                  const std::uint8_t* access_kind, const i32* first_handover, const i32* handover_from,
                  const i32* handover_to) {
  const i32 num_accesses = first_access[num_operators], num_handovers = first_handover[num_operators];
  return new Problem{num_operators,
                     num_objects,
                     {seconds, seconds + num_operators},
                     {bytes, bytes + num_objects},
                     {flags, flags + num_objects},
                     {first_access, first_access + num_operators + 1},
                     {access_object, access_object + num_accesses},
                     {access_kind, access_kind + num_accesses},
                     {first_handover, first_handover + num_operators + 1},
                     {handover_from, handover_from + num_handovers},
                     {handover_to, handover_to + num_handovers}};
}

void problem_free(void* problem) { delete static_cast<Problem*>(problem); }

void* sequence_new(const void* problem, const i32* order, const std::uint8_t* again, i32 length) {
  return new Sequence(*static_cast<const Problem*>(problem), order, again, length);
}

void sequence_free(void* sequence) { delete static_cast<Sequence*>(sequence); }

i32 sequence_num_gaps(const void* sequence) {
  return static_cast<i32>(static_cast<const Sequence*>(sequence)->gaps.size());
}

// The gaps by object and start, live bytes by position with everything resident, and the handovers.
void sequence_read(const void* sequence, i32* gap_object, i32* gap_start, i32* gap_end, i64* base,
                   i32* handed_from, i32* handed_to) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  for (size_t g = 0; g < s.gaps.size(); ++g) {
    gap_object[g] = s.gaps[g].object;
    gap_start[g] = s.gaps[g].start;
    gap_end[g] = s.gaps[g].end;
  }
  std::copy(s.base.begin(), s.base.end(), base);
  std::copy(s.handed_from.begin(), s.handed_from.end(), handed_from);
  std::copy(s.handed_to.begin(), s.handed_to.end(), handed_to);
}

i64 sequence_choose(const void* sequence, const i64* capacity, i64 min_bytes, const double* bias,
                    std::uint8_t* evicted) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  return choose(s, s.base, s.problem.bytes.data(), capacity, min_bytes, bias, evicted);
}

void sequence_class_needs(const void* sequence, const i32* class_of, i32 num_classes, i64* least, i64* most) {
  class_needs(*static_cast<const Sequence*>(sequence), class_of, num_classes, least, most);
}

// Returns the number of stays with addresses, or -1 where a class has too few slots.
i32 sequence_choose_in_classes(const void* sequence, const i32* class_of, i32 num_classes, const i64* counts,
                               const i64* class_bytes, std::uint8_t* evicted, void* stays) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  return choose_in_classes(s, {class_of, num_classes, counts, class_bytes}, evicted, static_cast<Stay*>(stays));
}

void sequence_dirty(const void* sequence, const std::uint8_t* evicted, std::uint8_t* dirty) {
  const auto result = dirty_gaps(*static_cast<const Sequence*>(sequence), evicted);
  std::copy(result.begin(), result.end(), dirty);
}

i64 sequence_replay(const void* sequence, i64 capacity, const double* out_seconds_per_byte,
                    const double* in_seconds_per_byte, const std::uint8_t* tier, const std::uint8_t* evicted,
                    i32 horizon, i32* out_end, i32* in_start, double* starts, double* step_seconds) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  ByteRoom room(s, capacity, evicted);
  const Links links{{out_seconds_per_byte[0], out_seconds_per_byte[1]},
                    {in_seconds_per_byte[0], in_seconds_per_byte[1]}, tier};
  const auto timing = replay(s, links, evicted, horizon, room, out_end, in_start, starts);
  *step_seconds = timing.step_seconds;
  return timing.overflow;
}

// The same with addresses.
i64 sequence_replay_at(const void* sequence, const void* stays, i32 num_stays,
                       const double* out_seconds_per_byte, const double* in_seconds_per_byte,
                       const std::uint8_t* tier, const std::uint8_t* evicted, i32 horizon, i32* out_end,
                       i32* in_start, double* starts, double* step_seconds) {
  const auto& s = *static_cast<const Sequence*>(sequence);
  AddressRoom room(s, static_cast<const Stay*>(stays), num_stays);
  const Links links{{out_seconds_per_byte[0], out_seconds_per_byte[1]},
                    {in_seconds_per_byte[0], in_seconds_per_byte[1]}, tier};
  const auto timing = replay(s, links, evicted, horizon, room, out_end, in_start, starts);
  room.clamp(in_start, out_end);
  *step_seconds = timing.step_seconds;
  return timing.overflow;
}

i32 stack(void* stays, i32 num_stays, i32 num_positions, i64 capacity, i64 large_bytes,
          i32 fullest, double step_seconds, i32 way, const double* priority, i64* missing) {
  Stacking stacking(static_cast<Stay*>(stays), num_stays, num_positions, capacity, large_bytes, fullest,
                    step_seconds, way, priority);
  return stacking.run(missing);
}

void sequence_place_below(const void* sequence, const std::uint8_t* evicted, i64 host_bytes, std::uint8_t* tier) {
  place_below(*static_cast<const Sequence*>(sequence), evicted, host_bytes, tier);
}

void* recipes_new(i32 num_operators, i32 num_objects, i32 num_values, const i32* object_of, const i32* initial,
                  const std::uint8_t* is_forward, const i32* const* first, const i32* const* items) {
  auto lists = [&](int which, i32 count) { return Lists(first[which], count, items[which]); };
  return new Recipes{num_objects,
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

void recipes_free(void* recipes) { delete static_cast<Recipes*>(recipes); }

// Returns the length of the longer order, which `recipes_read` reads; -1 if there is none.
i32 recipes_expand(void* recipes, const i32* order, i32 length, const i32* dropped, i32 num_dropped, i32 max_chain) {
  auto& r = *static_cast<Recipes*>(recipes);
  if (!Expansion(r, order, length, max_chain).run(dropped, num_dropped)) return -1;
  return static_cast<i32>(r.expanded.size());
}

void recipes_read(const void* recipes, i32* order) {
  const auto& expanded = static_cast<const Recipes*>(recipes)->expanded;
  std::copy(expanded.begin(), expanded.end(), order);
}

}  // extern "C"
