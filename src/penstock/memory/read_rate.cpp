// Reads memory again and again, as fast as a core can.

#include <cstdint>

namespace {

typedef uint64_t Vector __attribute__((vector_size(64)));
constexpr int64_t kVectors = 8;  // sums that do not wait for each other

constexpr int64_t kRowVectors = 4;  // of a random row: 256 bytes

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

// Reads `num_reads` random rows of the first `num_rows`, each at a multiple of its length, and
// returns a sum as above. The rows' numbers are those of a linear congruential generator (Knuth,
// MMIX), so no row waits for another one.
extern "C" uint64_t penstock_read_random(const Vector* vectors, int64_t num_rows,
                                         int64_t num_reads) {
  Vector sums[kRowVectors] = {};
  uint64_t state = static_cast<uint64_t>(num_rows);
  for (int64_t read = 0; read < num_reads; ++read) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const uint64_t row = (state >> 32) * static_cast<uint64_t>(num_rows) >> 32;
    const Vector* at = vectors + row * kRowVectors;
    for (int64_t lane = 0; lane < kRowVectors; ++lane) sums[lane] += at[lane];
  }
  uint64_t total = 0;
  for (int64_t lane = 0; lane < kRowVectors; ++lane) total += sums[lane][0];
  return total;
}
