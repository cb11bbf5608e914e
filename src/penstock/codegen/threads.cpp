// Work on many rows by several threads; the first part of every library with such work.
//
// The threads are those of torch. Compiled OpenMP code enters its runtime through GOMP_parallel, and
// so does this file, by the weak name that the process resolves to whatever runtime torch has
// loaded. Linking an OpenMP runtime of our own would bring a second pool of threads that spin
// against the first one. Where there is no such runtime the work is done by the calling thread.

#include <cstdint>

extern "C" {
void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));
int omp_get_thread_num() __attribute__((weak));
int omp_get_num_threads() __attribute__((weak));
}

namespace {

constexpr int64_t kLine = 64;  // bytes of a cache line

template <class Body>
void parallel(int num_threads, Body body) {
  if (num_threads < 2 || GOMP_parallel == nullptr || omp_get_thread_num == nullptr ||
      omp_get_num_threads == nullptr) {
    body(0, 1);
    return;
  }
  GOMP_parallel(
      [](void* data) {
        (*static_cast<Body*>(data))(omp_get_thread_num(), omp_get_num_threads());
      },
      &body, static_cast<unsigned>(num_threads), 0);
}

// Split `count` tasks between threads: each gets the tasks of one range.
template <class Body>
void for_tasks(int64_t count, int64_t num_threads, Body body) {
  const int64_t most = num_threads < count ? num_threads : count;
  parallel(static_cast<int>(most), [&](int64_t thread, int64_t threads) {
    for (int64_t i = count * thread / threads; i < count * (thread + 1) / threads; ++i) body(i);
  });
}

}  // namespace

