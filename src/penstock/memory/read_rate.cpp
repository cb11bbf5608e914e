// Reads memory again and again, as fast as a core can.

#include <cstdint>

namespace {

typedef uint64_t Vector __attribute__((vector_size(64)));
constexpr int64_t kVectors = 8;  // sums that do not wait for each other

}  // namespace

// Returns the sum of the words, so that no read is left out. `num_bytes` are read in whole blocks of
// kVectors vectors, `num_sweeps` times.
extern "C" uint64_t penstock_read(const Vector* vectors, int64_t num_bytes, int64_t num_sweeps) {
  uint64_t total = 0;
  const int64_t count = num_bytes / 64 / kVectors * kVectors;
  for (int64_t sweep = 0; sweep < num_sweeps; ++sweep) {
    Vector sums[kVectors] = {};
    for (int64_t first = 0; first < count; first += kVectors) {
#pragma GCC unroll 8
      for (int64_t lane = 0; lane < kVectors; ++lane) sums[lane] += vectors[first + lane];
    }
    for (int64_t lane = 1; lane < kVectors; ++lane) sums[0] += sums[lane];
    for (int64_t word = 0; word < 8; ++word) total += sums[0][word];
    asm volatile("" : : "r"(total) : "memory");  // the next sweep reads again
  }
  return total;
}
